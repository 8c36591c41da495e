// The names of the GEMMs of a layer, and of their operands and results.
//   fprop: output = activation . weight^T
//   dgrad: dgrad = gradient . weight
//   wgrad: wgrad = gradient^T . activation
#pragma once

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace te::inspect {

inline constexpr std::array<std::string_view, 3> kGemms = {"fprop", "dgrad", "wgrad"};
inline constexpr std::array<std::string_view, 6> kTensors = {"activation", "weight", "gradient",
                                                             "output",     "wgrad",  "dgrad"};

inline bool takes_or_gives(std::string_view gemm, std::string_view tensor) {
  using Pair = std::pair<std::string_view, std::string_view>;
  constexpr std::array<Pair, 9> kPairs = {
      Pair{"fprop", "activation"}, {"fprop", "weight"},     {"fprop", "output"},
      {"dgrad", "gradient"},       {"dgrad", "weight"},     {"dgrad", "dgrad"},
      {"wgrad", "gradient"},       {"wgrad", "activation"}, {"wgrad", "wgrad"}};
  return std::ranges::find(kPairs, Pair(gemm, tensor)) != kPairs.end();
}

}  // namespace te::inspect
