// Finds and loads the files of feature directories.
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

// All *.py files below the directory, sorted by path, without hidden folders, __pycache__ and
// symbolic links to folders. Throws Error (Value) for a path that is no directory.
std::vector<std::filesystem::path> feature_files(const std::filesystem::path& directory);

// Loads the files of all directories in order, each file once. Returns those that could not be
// loaded, which does not prevent the others from being loaded.
std::vector<BrokenFile> discover(const std::vector<std::string>& directories,
                                 FeatureCall& features);

}  // namespace te::inspect
