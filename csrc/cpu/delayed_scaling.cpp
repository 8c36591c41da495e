// The meaning of delayed_scaling_update and gather_amax: see ops/delayed_scaling.h.
#include "ops/delayed_scaling.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/scaling.h"

namespace te::cpu {
namespace {

// Drops row 1, moves the others up, and puts `newest` at the end; row 0 is empty again.
void roll(std::span<float> column, float newest) {
  if (column.size() > 1) {
    std::shift_left(column.begin() + 1, column.end(), 1);
    column.back() = newest;
  }
  column.front() = 0.0f;
}

float amax_of(std::span<const float> column, float newest, AmaxAlgorithm algorithm) {
  float amax = newest;
  if (algorithm == AmaxAlgorithm::Max)
    for (const float older : column.subspan(1)) amax = max_ignoring_nan(amax, older);
  return amax;
}

}  // namespace

void delayed_scaling_update(const DelayedScalingArgs& args) {
  const float margin_factor = std::ldexp(1.0f, args.margin);
  const float* reduced = args.reduced.ptr<float>();
  const ScalingEntry* table = args.table.ptr<ScalingEntry>();
  for (int64_t s = 0; s < args.table.size(0); ++s) {
    const ScalingEntry& entry = table[s];
    auto* history = reinterpret_cast<float*>(entry.history);
    auto* scale = reinterpret_cast<float*>(entry.scale);
    for (int64_t i = 0; i < entry.count; ++i) {
      const std::span column(history + i * entry.column_stride, static_cast<size_t>(entry.length));
      const float other_ranks = reduced ? *reduced++ : 0.0f;
      const float newest = other_ranks != 0.0f ? other_ranks : column.front();
      if (newest == 0.0f) continue;
      const float amax = amax_of(column, newest, args.algorithm);
      float& factor = scale[i * entry.scale_stride];
      factor = delayed_scale(amax, factor, args.fp8_max, margin_factor);
      roll(column, newest);
    }
  }
}

void gather_amax(const GatherAmaxArgs& args) {
  float* out = args.out.ptr<float>();
  const ScalingEntry* table = args.table.ptr<ScalingEntry>();
  for (int64_t s = 0; s < args.table.size(0); ++s) {
    const auto* row = reinterpret_cast<const float*>(table[s].history);
    for (int64_t i = 0; i < table[s].count; ++i) *out++ = row[i * table[s].column_stride];
  }
}

}  // namespace te::cpu
