// The parts that this build lacks. cmake/SelectCuda.cmake decides about them and fills in
// left_out.cpp.in.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace te::cuda {

struct LeftOut {
  std::string part;     // "CUDA" or "cuDNN attention"
  std::string reason;   // why
  std::string command;  // what builds it, run in the sources
};

const std::vector<LeftOut>& left_out();

// `this build lacks CUDA: <reason>; in the sources run: <command>`, for errors of functions that
// need the part.
std::string lack_of(std::string_view part);

}  // namespace te::cuda
