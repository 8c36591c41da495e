// Finds the files of feature directories and has them loaded.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "inspect/callouts.h"

namespace te::inspect {

struct BrokenFile {
  std::string path;
  std::string reason;
};

// All *.py files below the directory, sorted by path; neither hidden folders nor __pycache__. A
// symbolic link to a folder is not followed. Throws Error (Value) for a path that is no directory.
std::vector<std::filesystem::path> feature_files(const std::filesystem::path& directory);

// Loads the files of all directories in order, each file once. A file that cannot be loaded stops
// nothing: it is returned.
std::vector<BrokenFile> discover(const std::vector<std::string>& directories,
                                 FeatureCall& features);

}  // namespace te::inspect
