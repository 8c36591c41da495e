#include "cuda/dynlib.h"

#include <dlfcn.h>
#include <link.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "cuda/runtime.h"

namespace te::cuda {
namespace {

struct Paths {
  std::mutex mutex;
  std::map<std::string, std::string> by_name;
};

Paths& paths() {
  static auto* paths = new Paths;
  return *paths;
}

std::string path_of(const std::string& name) {
  Paths& known = paths();
  const std::scoped_lock lock(known.mutex);
  const auto found = known.by_name.find(name);
  return found == known.by_name.end() ? std::string() : found->second;
}

std::string reason() {
  const char* text = dlerror();
  return text != nullptr ? text : "no reason given";
}

std::string file_of(void* handle) {
  link_map* entry = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &entry) != 0 || entry == nullptr) return "?";
  return entry->l_name;
}

}  // namespace

void set_library_path(std::string name, std::string path) {
  Paths& known = paths();
  const std::scoped_lock lock(known.mutex);
  known.by_name.insert_or_assign(std::move(name), std::move(path));
}

DynamicLibrary::DynamicLibrary(std::string name, std::string soname)
    : name_(std::move(name)), soname_(std::move(soname)) {
  const std::string path = path_of(name_);
  if (!path.empty()) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    require(handle_ != nullptr, Kind::Runtime, soname_, "expected a library at TE_", name_,
            "_PATH=", path, ", got: ", reason());
    return;
  }
  handle_ = dlopen(soname_.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle_ == nullptr) handle_ = dlopen(soname_.c_str(), RTLD_NOW | RTLD_LOCAL);
  require(handle_ != nullptr, Kind::Runtime, soname_,
          "expected torch to have loaded it or the loader to find it (or TE_", name_,
          "_PATH to name the file), got: ", reason());
}

Symbol DynamicLibrary::find(const char* symbol) const {
  void* address = dlsym(handle_, symbol);
  require(address != nullptr, Kind::Runtime, soname_, "expected the function ", symbol, " in ",
          file_of(handle_), ", got none; is it another version?");
  return {address};
}

}  // namespace te::cuda
