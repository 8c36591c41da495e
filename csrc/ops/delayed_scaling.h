// delayed_scaling: the end-of-step update of every amax history and scale of a model, one launch.
//
// A table, which is a tensor on the device, describes the states of one (recipe, group, direction).
// A column belongs to one quantised tensor. For each column i of each state:
//   a = the amax over the history, or that of row 0; a NaN does not count
//   scale[i] = fp8_max / a / 2^margin (see delayed_scale)
//   the history is rolled by one row, and row 0 becomes zero
// A column whose row 0 is zero did not run, so its history and scale stay as they are. A non-zero
// value of `reduced` takes the place of row 0, so a rank on which the module did not run follows
// the others. If a recipe has its own functions, `amax` and `scale` hold their results for all
// columns, in the order of the table, in place of a and of fp8_max / a / 2^margin.
#pragma once

#include "core/tensor_view.h"

namespace te {

// One row of the table, as int64: pointers to history [length, count] and scale [count], both fp32.
// Strides are in floats. The rows of one column of the history are adjacent in memory.
struct ScalingEntry {
  int64_t history;
  int64_t scale;
  int64_t length;
  int64_t count;
  int64_t column_stride;  // of the history
  int64_t scale_stride;
};

enum class AmaxAlgorithm : int32_t { Max = 0, MostRecent = 1 };

struct DelayedScalingArgs {
  TensorView table;    // int64 [states, 6]: rows of ScalingEntry
  TensorView reduced;  // fp32 [total columns]: gather_amax, reduced over ranks; may be absent
  TensorView amax;     // fp32 [total columns]; may be absent
  TensorView scale;    // fp32 [total columns]; may be absent
  AmaxAlgorithm algorithm = AmaxAlgorithm::Max;
  float fp8_max = 448.0f;
  int32_t margin = 0;
};

void delayed_scaling_update(const DelayedScalingArgs& args, Stream stream);

// Writes the amaxes from which the update computes scales to one vector, in the order of the table.
// With MostRecent and without `reduced` these are the values of row 0, which ranks then reduce.
struct GatherAmaxArgs {
  TensorView table;
  TensorView reduced;  // as in DelayedScalingArgs
  AmaxAlgorithm algorithm = AmaxAlgorithm::MostRecent;
  TensorView out;  // fp32 [total columns]
};

void gather_amax(const GatherAmaxArgs& args, Stream stream);

namespace cpu {
void delayed_scaling_update(const DelayedScalingArgs& args);
void gather_amax(const GatherAmaxArgs& args);
}  // namespace cpu
namespace cuda {
void delayed_scaling_update(const DelayedScalingArgs& args, Stream stream);
void gather_amax(const GatherAmaxArgs& args, Stream stream);
}  // namespace cuda

}  // namespace te
