// The meaning of delayed_scaling_update and gather_amax: see ops/delayed_scaling.h.
#include "ops/delayed_scaling.h"

#include <cmath>

#include "core/scaling.h"

namespace te::cpu {
namespace {

// A column of a history: row r is `values[r * pitch]`.
struct Column {
  float* values;
  int64_t length, pitch;
  float& row(int64_t r) const { return values[r * pitch]; }
};

// Drops row 1, moves the others up, and puts `newest` at the end; row 0 is empty again.
void roll(const Column& history, float newest) {
  for (int64_t r = 1; r + 1 < history.length; ++r) history.row(r) = history.row(r + 1);
  if (history.length > 1) history.row(history.length - 1) = newest;
  history.row(0) = 0.0f;
}

float amax_of(const Column& history, float newest, AmaxAlgorithm algorithm) {
  float amax = newest;
  if (algorithm == AmaxAlgorithm::Max)
    for (int64_t r = 1; r < history.length; ++r) amax = max_ignoring_nan(amax, history.row(r));
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
      const int64_t at = i * entry.stride;
      const Column column{history + at, entry.length, entry.count * entry.stride};
      const float other_ranks = reduced ? *reduced++ : 0.0f;
      const float newest = other_ranks != 0.0f ? other_ranks : column.row(0);
      if (newest == 0.0f) continue;
      const float amax = amax_of(column, newest, args.algorithm);
      scale[at] = delayed_scale(amax, scale[at], args.fp8_max, margin_factor);
      roll(column, newest);
    }
  }
}

void gather_amax(const GatherAmaxArgs& args) {
  float* out = args.out.ptr<float>();
  const ScalingEntry* table = args.table.ptr<ScalingEntry>();
  for (int64_t s = 0; s < args.table.size(0); ++s) {
    const auto* row = reinterpret_cast<const float*>(table[s].history);
    for (int64_t i = 0; i < table[s].count; ++i) *out++ = row[i * table[s].stride];
  }
}

}  // namespace te::cpu
