// The CPU backend of delayed_scaling_update and gather_amax, which defines their results: see
// ops/delayed_scaling.h.
#include "ops/delayed_scaling.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/scaling.h"

namespace te::cpu {
namespace {

// Drops row 1 (the oldest amax), moves the later rows one up, and puts `newest` at the end. Row 0,
// in which ops collect the amax of the next step, becomes 0.
void roll(std::span<float> column, float newest) {
  if (column.size() > 1) {
    std::shift_left(column.begin() + 1, column.end(), 1);
    column.back() = newest;
  }
  column.front() = 0.0f;
}

float amax_of(std::span<const float> column, float newest, AmaxAlgorithm algorithm) {
  float amax = max_ignoring_nan(newest, 0.0f);
  if (algorithm == AmaxAlgorithm::Max)
    for (const float older : column.subspan(1)) amax = max_ignoring_nan(amax, older);
  return amax;
}

// Calls use(history, scale, newest amax, index) for each column of the table.
template <class Use>
void each_column(const TensorView& table, const TensorView& reduced, const Use& use) {
  const ScalingEntry* entries = table.ptr<ScalingEntry>();
  int64_t index = 0;
  for (int64_t s = 0; s < table.size(0); ++s) {
    const ScalingEntry& entry = entries[s];
    auto* history = reinterpret_cast<float*>(entry.history);
    auto* scale = reinterpret_cast<float*>(entry.scale);
    for (int64_t i = 0; i < entry.count; ++i, ++index) {
      const std::span column(history + i * entry.column_stride, static_cast<size_t>(entry.length));
      const float of_ranks = reduced ? reduced.ptr<float>()[index] : 0.0f;
      use(column, scale[i * entry.scale_stride], of_ranks != 0.0f ? of_ranks : column.front(),
          index);
    }
  }
}

}  // namespace

void delayed_scaling_update(const DelayedScalingArgs& args) {
  const float margin_factor = std::ldexp(1.0f, args.margin);
  const float *own_amax = args.amax.ptr<float>(), *own_scale = args.scale.ptr<float>();
  each_column(args.table, args.reduced,
              [&](std::span<float> history, float& scale, float newest, int64_t i) {
                if (newest == 0.0f) return;
                const float amax =
                    own_amax ? own_amax[i] : amax_of(history, newest, args.algorithm);
                scale = own_scale ? bounded_scale(own_scale[i], scale)
                                  : delayed_scale(amax, scale, args.fp8_max, margin_factor);
                roll(history, newest);
              });
}

void gather_amax(const GatherAmaxArgs& args) {
  each_column(args.table, args.reduced,
              [&](std::span<const float> history, float, float newest, int64_t i) {
                args.out.ptr<float>()[i] = amax_of(history, newest, args.algorithm);
              });
}

}  // namespace te::cpu
