// Libraries that are opened at first use: never at import, never linked, never closed.
//
// Order: the file that TE_<NAME>_PATH names, else the library of that soname which the process has
// already loaded (torch's own, on every CUDA build of torch), else the one that the loader finds.
// The loader comes last, because a system copy beside torch's breaks both.
#pragma once

#include <string>
#include <type_traits>

namespace te::cuda {

// The address of a function; becomes the function pointer that it is assigned to.
struct Symbol {
  void* address;

  template <class Function>
  requires std::is_function_v<std::remove_pointer_t<Function>>
  operator Function() const {  // NOLINT(google-explicit-constructor): tables are read as lists
    return reinterpret_cast<Function>(address);
  }
};

class DynamicLibrary {
 public:
  // `name` as in TE_<NAME>_PATH, for instance "CUBLASLT" with the soname "libcublasLt.so.13".
  // Throws Kind::Runtime with the loader's reason where the library cannot be opened.
  DynamicLibrary(std::string name, std::string soname);

  // Throws Kind::Runtime naming the symbol and the file that lacks it.
  Symbol find(const char* symbol) const;

  // What dlopen gave, for headers that look functions up by themselves.
  void* handle() const { return handle_; }

 private:
  std::string name_;
  std::string soname_;
  void* handle_ = nullptr;
};

}  // namespace te::cuda
