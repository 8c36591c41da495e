// One pass over a tensor and its codes, by the same walk as moments.cu.
#include "cuda/device/float8.cuh"
#include "cuda/device/merge_rows.cuh"
#include "cuda/device/octet_walk.cuh"
#include "cuda/device/vector.cuh"
#include "ops/moments.h"

namespace te::cuda {
namespace {

template <class In, class Fp8>
struct CastStream {
  const In* x;
  const uint8_t* codes;
  const float* scales;
  OctetWalk<In> walk;
  RowSink<CastMoments> out;
};

// What a thread gathers. Errors are taken in units of the codes, so that their squares stay within
// fp32 for all but odd tensors; in fp64 they always do.
template <class Fp8, class Real>
struct CastErrors {
  float scale_inverse;
  Real scale;  // 1 in fp64
  int underflows = 0, overflows = 0;
  double squares = 0;
  Real part[2] = {};

  __device__ __forceinline__ void add(float value, bool is_zero, float decoded, int lane) {
    const Real error = static_cast<Real>(value) - static_cast<Real>(decoded * scale_inverse);
    const Real scaled = error * scale;
    part[lane] += scaled * scaled;
    underflows += is_zero && value != 0.0f;
    overflows += fabsf(value) > Fp8::kMax * scale_inverse;
  }
  template <class In>
  __device__ __forceinline__ void add(const Octet<In>& x, uint2 codes) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint32_t pair = (i < 4 ? codes.x : codes.y) >> (8 * (i % 4));
      const float2 decoded = decode2<Fp8>(pair & 0xffffu);
      add(x[i], decoded.x == 0.0f, decoded.x, 0);
      add(x[i + 1], decoded.y == 0.0f, decoded.y, 1);
    }
  }
  __device__ __forceinline__ void fold() {
    squares += static_cast<double>(part[0] + part[1]);
    part[0] = part[1] = 0;
  }
};

template <class Real, class In, class Fp8>
__device__ __forceinline__ CastMoments gather(const CastStream<In, Fp8>& args) {
  const auto& walk = args.walk;
  constexpr bool kExact = std::is_same_v<Real, double>;
  const float scale_inverse = args.scales[0], scale = args.scales[1];
  CastErrors<Fp8, Real> errors{scale_inverse, kExact ? 1 : scale};
  int count = 0;
  constexpr int kBatch = kExact ? 1 : OctetWalk<In>::kInFlight;  // rare, and short of registers
#pragma unroll 1
  for (int64_t at = walk.first(); at < walk.octets; at += walk.step()) {
#pragma unroll 1
    for (int first = 0; first < OctetWalk<In>::kInFlight; first += kBatch) {
      Octet<In> x[kBatch];
      uint2 codes[kBatch];
      walk.template for_batch<kBatch>(at + first * walk.kThreads, [&](int k, int64_t octet) {
        x[k] = load_octet(args.x + 8 * octet);
        codes[k] = __ldg(reinterpret_cast<const uint2*>(args.codes) + octet);
      });
      walk.template for_batch<kBatch>(at + first * walk.kThreads, [&](int k, int64_t) {
        errors.add(x[k], codes[k]);
        count += 8;
      });
      errors.fold();
    }
  }
  walk.for_rest([&](int64_t i) {
    const float decoded = Fp8::decode(args.codes[i]);
    errors.add(static_cast<float>(args.x[i]), decoded == 0.0f, decoded, 0);
    errors.fold();
    ++count;
  });
  CastMoments row = CastMoments::empty();
  row.count = warp_add(static_cast<double>(count));
  row.underflows = warp_add(static_cast<double>(errors.underflows));
  row.overflows = warp_add(static_cast<double>(errors.overflows));
  const double unit = kExact ? 1.0 : static_cast<double>(scale_inverse);
  row.squared_error = warp_add(errors.squares) * unit * unit;
  if (row.count > 0) row.add_scale_inverse(static_cast<double>(scale_inverse));
  return row;
}

// Whether fp32 has held the squares of the errors.
__device__ __forceinline__ bool is_exact(const CastMoments& row, float scale) {
  constexpr double kTooSmall = 0x1p-60;
  const double squares =
      row.squared_error * static_cast<double>(scale) * static_cast<double>(scale);
  return squares - squares == 0 && (squares >= kTooSmall || row.underflows == 0);
}

template <class In, class Fp8>
__global__ void __launch_bounds__(OctetWalk<In>::kThreads, OctetWalk<In>::kBlocksPerMultiprocessor)
    cast_moments_kernel(const CastStream<In, Fp8> args) {
  if (args.out.is_idle()) return;
  CastMoments row = gather<float>(args);
  if (!is_exact(row, args.scales[1])) row = gather<double>(args);
  merge_grid<OctetWalk<In>::kWarps>(row, args.out);
}

}  // namespace

void cast_moments(const CastMomentsArgs& args, Stream stream) {
  const TensorView& x = args.x;
  const DeviceGuard guard(x.device);
  dispatch_high_precision(x.dtype, "cast_moments", [&](auto in) {
    dispatch_fp8(args.format, "cast_moments", [&](auto out) {
      using In = typename decltype(in)::type;
      using Fp8 = typename decltype(out)::type;
      const bool wide = is_aligned(x.data, 16) && is_aligned(args.codes.data, 8);
      const OctetWalk<In> walk(x.numel(), wide);
      cast_moments_kernel<In, Fp8><<<walk.blocks(x.device), walk.kThreads, 0, stream_of(stream)>>>(
          {x.ptr<In>(), args.codes.ptr<uint8_t>(), args.scales.ptr<float>(), walk,
           row_sink_of<CastMoments>(args.out)});
    });
  });
  check_launch("cast_moments");
}

}  // namespace te::cuda
