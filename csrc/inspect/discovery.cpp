#include "inspect/discovery.h"

#include <algorithm>
#include <set>

#include "core/error.h"

namespace te::inspect {

namespace fs = std::filesystem;

std::vector<fs::path> feature_files(const fs::path& directory) {
  require(fs::is_directory(directory), Kind::Value, "initialize",
          "expected a directory with feature files, got ", directory,
          "; built-in features need no feature_dirs");
  std::vector<fs::path> files;
  std::error_code unreadable;
  fs::recursive_directory_iterator entry(directory, fs::directory_options::skip_permission_denied,
                                         unreadable),
      end;
  while (!unreadable && entry != end) {
    const std::string name = entry->path().filename().string();
    std::error_code gone;
    if (entry->is_directory(gone)) {
      if (name.starts_with('.') || name == "__pycache__") entry.disable_recursion_pending();
    } else if (entry->path().extension() == ".py" && entry->is_regular_file(gone)) {
      files.push_back(entry->path());
    }
    entry.increment(unreadable);
  }
  std::ranges::sort(files);
  return files;
}

std::vector<BrokenFile> discover(const std::vector<std::string>& directories,
                                 FeatureCall& features) {
  std::vector<BrokenFile> broken;
  std::set<fs::path> seen;
  for (const std::string& directory : directories) {
    for (const fs::path& file : feature_files(directory)) {
      if (!seen.insert(fs::weakly_canonical(file)).second) continue;
      if (auto reason = features.load(file.string())) broken.push_back({file.string(), *reason});
    }
  }
  return broken;
}

}  // namespace te::inspect
