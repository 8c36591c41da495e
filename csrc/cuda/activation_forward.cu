// Activation forward by the tile map, in one pass: y, its FP8 codes row-wise and transposed, and
// its amax or current scale.
#include "cuda/device/tile_map_launch.cuh"
#include "ops/activation.h"

namespace te::cuda {
namespace {

constexpr const char* kOp = "activation_forward";

template <class Unit, class Factor>
struct Forward {
  static constexpr bool kGated = Factor::kGated;
  static constexpr int kInputs = kGated ? 2 : 1;
  static constexpr int kOutputs = 1;
  static constexpr int kPitch(int) { return kInputs; }  // x1 and x2 are halves of rows
  static constexpr bool kPlain = true, kColumnSums = false, kCopies = false, kAgain = false;
  Unit unit;
  Factor factor;

  __device__ __forceinline__ void operator()(const float (&in)[kInputs],
                                             float (&out)[kOutputs]) const {
    out[0] = unit.value(in[0]);
    if constexpr (kGated) out[0] *= factor.value(in[1]);
  }
};

template <class Unit, class Factor>
void forward(const ActivationForwardArgs& args, const Unit& unit, const Factor& factor,
             cudaStream_t stream) {
  constexpr bool kGated = Factor::kGated;
  const TensorView& x = args.x;
  const int64_t cols = x.cols() / (kGated ? 2 : 1);
  TileMap<Forward<Unit, Factor>> map{.function = {unit, factor},
                                     .inputs = {x.data},
                                     .rows = x.rows(),
                                     .cols = tile_map_cols(cols, kOp),
                                     .plain = args.y.data,
                                     .quantized = sink_of(args.quantized),
                                     .e5m2 = args.quantized.dtype == DType::Float8E5M2,
                                     .current = sink_of(args.current)};
  if constexpr (kGated) map.inputs[1] = x.ptr<char>() + cols * size_of(x.dtype);
  if (!launch_tile_map(map, x.dtype, args.moments, kOp, stream) && args.moments)
    cuda::moments({args.y, args.moments}, {stream});
}

}  // namespace

void activation_forward(const ActivationForwardArgs& args, Stream stream) {
  const DeviceGuard guard(args.x.device);
  dispatch_activation(args.kind, args.parameters, [&](auto unit, auto factor) {
    forward(args, unit, factor, stream_of(stream));
  });
}

}  // namespace te::cuda
