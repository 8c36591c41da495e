// The gradient of cross entropy by the tile map, with a function that depends on the position of an
// element: on its row, and on whether its column is the label.
#include "cuda/cross_entropy_codes.h"

#include "cuda/device/exponential.cuh"
#include "cuda/device/tile_map_launch.cuh"

namespace te::cuda {
namespace {

// The gradient of eight neighbours in a row.
struct Softmax {
  float log_sum, factor, evenly, at_label;
  int label;  // counted from the first of them
  bool ignored;

  __device__ __forceinline__ void operator()(const float (&in)[1], float (&out)[1], int j) const {
    float value = fast_exp(in[0] - log_sum) - evenly;
    if (j == label) value -= at_label;
    out[0] = ignored ? 0.0f : factor * value;
  }
};

struct Backward {
  static constexpr int kInputs = 1, kOutputs = 1;
  static constexpr int kPitch(int) { return 1; }
  static constexpr bool kPlain = true, kColumnSums = false, kCopies = false, kAgain = false;
  const int* labels;
  const float* log_sums;
  const float* factors;
  float smoothing, evenly;
  int64_t column_pitch;

  __device__ __forceinline__ Softmax at(int64_t row, int col) const {
    const int label = labels[row];
    return {log_sums[row],    factors ? factors[row] : 1.0f, evenly, 1.0f - smoothing, label - col,
            label == kIgnored};
  }
};

}  // namespace

void cross_entropy_codes(const CrossEntropyBackwardArgs& args, Stream stream) {
  constexpr const char* kOp = "cross_entropy_backward";
  const TensorView& logits = args.logits;
  const DeviceGuard guard(logits.device);
  launch_tile_map(
      TileMap<Backward>{.function = {args.labels.ptr<int>(), args.log_sums.ptr<float>(),
                                     args.factors.ptr<float>(), args.smoothing, args.evenly,
                                     args.codes.columnwise ? args.codes.columnwise.stride(-2) : 0},
                        .inputs = {logits.data},
                        .rows = logits.rows(),
                        .cols = tile_map_cols(logits.cols(), kOp),
                        .backwards = true,  // the forward has just read the logits
                        .plain = args.dx.data,
                        .quantized = sink_of(args.codes),
                        .e5m2 = args.codes.dtype == DType::Float8E5M2},
      logits.dtype, {}, kOp, stream_of(stream));
}

}  // namespace te::cuda
