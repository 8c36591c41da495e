// Activation backward by the tile map, in one pass over dy and x: dx, its FP8 codes row-wise and
// transposed, its amax or current scale, the bias gradient, and the result of the forward again.
#include "cuda/column_sum.h"
#include "cuda/device/tile_map_launch.cuh"
#include "ops/activation.h"

namespace te::cuda {
namespace {

constexpr const char* kOp = "activation_backward";

// Inputs: dy, x, or if gated dy, x1, x2. Outputs: dx, or if gated dx1, dx2.
template <class Unit, class Factor, bool kWithAgain>
struct Backward {
  static constexpr bool kGated = Factor::kGated;
  static constexpr int kInputs = kGated ? 3 : 2;
  static constexpr int kOutputs = kGated ? 2 : 1;
  static constexpr int kPitch(int k) { return k == 0 ? 1 : kOutputs; }
  static constexpr bool kPlain = true, kColumnSums = true, kCopies = false, kAgain = kWithAgain;
  Unit unit;
  Factor factor;

  __device__ __forceinline__ void operator()(const float (&in)[kInputs],
                                             float (&out)[kOutputs]) const {
    if constexpr (kGated) {
      const auto [value, gradient] = unit.value_and_gradient(in[1], in[0] * factor.value(in[2]));
      out[0] = gradient;
      out[1] = factor.gradient(in[2], in[0] * value);
    } else {
      out[0] = unit.value_and_gradient(in[1], in[0]).gradient;
    }
  }

  // The result of the forward, computed in the same way, so that it is equal bit for bit.
  __device__ __forceinline__ float again(const float (&in)[kInputs]) const {
    float y = unit.value(in[1]);
    if constexpr (kGated) y *= factor.value(in[2]);
    return y;
  }
};

template <bool kAgain, class Unit, class Factor>
void backward(const ActivationBackwardArgs& args, const Unit& unit, const Factor& factor,
              cudaStream_t stream) {
  constexpr bool kGated = Factor::kGated;
  const TensorView& x = args.x;
  const QuantizedView& again = args.again.quantized;
  const int64_t cols = args.dy.cols();
  TileMap<Backward<Unit, Factor, kAgain>> map{
      .function = {unit, factor},
      .inputs = {args.dy.data, x.data},
      .rows = x.rows(),
      .cols = tile_map_cols(cols, kOp),
      .plain = args.dx.data,
      .quantized = sink_of(args.quantized),
      .e5m2 = args.quantized.dtype == DType::Float8E5M2,
      .current = sink_of(args.current),
      .column_parts = args.dbias ? args.workspace.memory.ptr<float>() : nullptr,
      .again = {args.again.y.data, again.columnwise.ptr<uint8_t>(), again.scales.ptr<float>(),
                again.dtype == DType::Float8E5M2, args.again.rounded}};
  if constexpr (kGated) map.inputs[2] = x.ptr<char>() + cols * size_of(x.dtype);
  if (!launch_tile_map(map, x.dtype, args.moments, kOp, stream) && args.moments)
    cuda::moments({args.dx, args.moments}, {stream});
}

}  // namespace

void activation_backward(const ActivationBackwardArgs& args, Stream on) {
  const DeviceGuard guard(args.x.device);
  const cudaStream_t stream = stream_of(on);
  dispatch_activation(args.kind, args.parameters, [&](auto unit, auto factor) {
    dispatch_bool(static_cast<bool>(args.again),
                  [&](auto again) { backward<again()>(args, unit, factor, stream); });
  });
  if (args.dbias)
    finish_column_sums(args.workspace, ceil_div(args.x.rows(), kTile), args.x.cols(), args.dbias,
                       {}, stream);
}

}  // namespace te::cuda
