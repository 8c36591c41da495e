// Statistics of an FP8 cast (underflows, overflows and squared error), in one pass over a tensor
// and its codes, by the same walk as in moments.cu.
#include "cuda/cast_counts.h"
#include "cuda/device/cast_counts.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/float8.cuh"
#include "cuda/device/merge_rows.cuh"
#include "cuda/device/tensor_walk.cuh"
#include "cuda/device/vector.cuh"
#include "ops/moments.h"

namespace te::cuda {
namespace {

template <class In>
using CastWalk = OctetWalk<In, 320>;

// An octet and its codes.
template <class In>
struct Slot {
  Octet<In> x;
  uint2 codes;
};

template <class In, class Fp8>
struct CastStream {
  const In* x;
  const uint8_t* codes;
  const float* scales;
  CastWalk<In> walk;
  RowSink<CastMoments> out;
};

// The results of a warp.
struct CastFields {
  double underflows, overflows, squared_error;
};

// What a thread gathers. In fp32, errors are multiplied by the scale, so that their squares stay
// within the range of fp32 for all but unusual tensors. For those `Real` is double, which needs no
// scale.
template <class In, class Fp8, class Real>
struct CastErrors {
  float scale_inverse;
  Real scale;  // 1 in fp64
  OctetCastCounts<In> counts;
  double squares = 0;
  Real part[2] = {};

  __device__ __forceinline__ CastErrors(float scale_inverse, float scale)
      : scale_inverse(scale_inverse),
        scale(std::is_same_v<Real, double> ? 1 : scale),
        counts(overflow_limit(Fp8::kMax, scale_inverse)) {}

  __device__ __forceinline__ void add_error(float value, float decoded, int lane) {
    const Real error = static_cast<Real>(value) - static_cast<Real>(decoded * scale_inverse);
    const Real scaled = error * scale;
    part[lane] += scaled * scaled;
  }
  __device__ __forceinline__ void add(float value, uint8_t code) {
    add_error(value, Fp8::decode(code), 0);
    counts.add(value, code);
  }
  __device__ __forceinline__ void add(const Slot<In>& slot) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t pair = (i < 4 ? slot.codes.x : slot.codes.y) >> (8 * (i % 4));
      const float2 decoded = decode2<Fp8>(pair & 0xffffu);
      add_error(slot.x[i], decoded.x, 0);
      add_error(slot.x[i + 1], decoded.y, 1);
    }
    counts.add(slot.x, slot.codes);
  }
  __device__ __forceinline__ void fold() {
    squares += static_cast<double>(part[0] + part[1]);
    part[0] = part[1] = 0;
    counts.fold();
  }
  // Returns the results of the warp.
  __device__ __forceinline__ CastFields warp_sums() const {
    constexpr unsigned kAll = 0xffffffffu;
    const double unit = std::is_same_v<Real, double> ? 1.0 : static_cast<double>(scale_inverse);
    return {
        static_cast<double>(__reduce_add_sync(kAll, counts.underflows())),
        static_cast<double>(__reduce_add_sync(kAll, counts.overflows())),
        warp_add(squares) * unit * unit,
    };
  }
};

template <class Real, class In, class Fp8>
__device__ __forceinline__ CastFields gather(const CastStream<In, Fp8>& args) {
  const auto& walk = args.walk;
  CastErrors<In, Fp8, Real> errors(args.scales[0], args.scales[1]);
  const auto load = [&](int64_t octet, Slot<In>& slot) {
    slot.x = load_octet(args.x + 8 * octet);
    slot.codes = __ldg(reinterpret_cast<const uint2*>(args.codes) + octet);
  };
  if constexpr (std::is_same_v<Real, double>)  // rare, and short of registers
    walk.for_each([&](int64_t octet) {
      Slot<In> slot;
      load(octet, slot);
      errors.add(slot);
      errors.fold();
    });
  else
    walk.template stream<Slot<In>>(
        load, [] {}, [&](const Slot<In>& slot, int, int64_t) { errors.add(slot); },
        [&] { errors.fold(); });
  walk.for_rest([&](int64_t i) {
    errors.add(static_cast<float>(args.x[i]), args.codes[i]);
    errors.fold();
  });
  return errors.warp_sums();
}

// Whether fp32 was enough: the squared errors have not overflowed, nor become so small that those
// of underflows may be lost.
__device__ __forceinline__ bool is_exact(const CastFields& found, float scale) {
  constexpr double kTooSmall = 0x1p-60;
  const double squares =
      found.squared_error * static_cast<double>(scale) * static_cast<double>(scale);
  return squares - squares == 0 && (squares >= kTooSmall || found.underflows == 0);
}

template <class In, class Fp8>
__global__ void __launch_bounds__(CastWalk<In>::kThreads, CastWalk<In>::kBlocksPerMultiprocessor)
    cast_moments_kernel(const CastStream<In, Fp8> args) {
  follow_previous_kernel();
  if (args.out.is_idle()) return;
  CastFields found = gather<float>(args);
  if (!is_exact(found, args.scales[1])) found = gather<double>(args);
  const double fields[] = {found.underflows, found.overflows, found.squared_error};
  merge_grid<CastWalk<In>::kWarps, 3>(fields, args.out, [&](const double* total, CastMoments& row) {
    add_cast(row, args.walk.count, args.scales[0], total[0], total[1], total[2]);
  });
}

}  // namespace

void cast_moments(const CastMomentsArgs& args, Stream stream) {
  const TensorView& x = args.x;
  const DeviceGuard guard(x.device);
  if (!args.squared_error) return cast_counts(args, stream);
  dispatch_high_precision(x.dtype, "cast_moments", [&](auto in) {
    dispatch_fp8(args.format, "cast_moments", [&](auto out) {
      using In = typename decltype(in)::type;
      using Fp8 = typename decltype(out)::type;
      const bool wide = is_aligned(x.data, 16) && is_aligned(args.codes.data, 8);
      const CastWalk<In> walk(x.numel(), wide, x.device);
      launch_dependent(
          cast_moments_kernel<In, Fp8>, walk.blocks, walk.kThreads, 0, stream_of(stream),
          CastStream<In, Fp8>{x.ptr<In>(), args.codes.ptr<uint8_t>(), args.scales.ptr<float>(),
                              walk, row_sink_of<CastMoments>(args.out)});
    });
  });
}

}  // namespace te::cuda
