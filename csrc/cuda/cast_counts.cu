// Counts underflows and overflows of an FP8 cast. Codes alone are nearly enough: an element can
// only have become zero if its code is a zero, and only have been clipped if its code is the
// largest one. So the kernel reads all codes, but values only of those octets that have such codes.
#include "cuda/cast_counts.h"

#include "cuda/device/cast_counts.cuh"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/merge_rows.cuh"
#include "cuda/device/tensor_walk.cuh"

namespace te::cuda {
namespace {

using CodeWalk = TensorWalk<16, 4, 384>;

template <class In, class Fp8>
struct CountStream {
  const In* x;
  const uint8_t* codes;
  const float* scales;
  CodeWalk walk;
  RowSink<CastMoments> out;
};

// Sets the high bit of each of four bytes whose code is neither a zero nor the largest one.
template <class Fp8>
__device__ __forceinline__ uint32_t are_plain(uint32_t codes) {
  const uint32_t magnitudes = codes & 0x7f7f7f7fu;
  return (magnitudes + 0x7f7f7f7fu) & ((magnitudes ^ Fp8::kMaxCode * 0x01010101u) + 0x7f7f7f7fu);
}
template <class Fp8>
__device__ __forceinline__ bool tell_all(uint32_t first, uint32_t second) {
  return (~(are_plain<Fp8>(first) & are_plain<Fp8>(second)) & 0x80808080u) == 0;
}

// The octets of a thread's batch whose values have to be read.
template <class In, class Fp8>
class OpenOctets {
 public:
  __device__ __forceinline__ void add(const uint4& codes, int k, int64_t pack) {
    if (k == 0) first_ = pack;
    if (!tell_all<Fp8>(codes.x, codes.y)) bits_ |= 1u << (2 * k);
    if (!tell_all<Fp8>(codes.z, codes.w)) bits_ |= 2u << (2 * k);
  }

  // Counts two octets at a time, so that their loads overlap. As a rule there are none.
  __device__ __forceinline__ void count(const CountStream<In, Fp8>& args,
                                        OctetCastCounts<In>& counts) {
#pragma unroll 1
    while (bits_ != 0) {
      const int64_t i = next(), j = bits_ != 0 ? next() : -1;
      const auto* codes = reinterpret_cast<const uint2*>(args.codes);
      const uint2 codes_of_i = __ldg(codes + i), codes_of_j = j < 0 ? uint2{} : __ldg(codes + j);
      const Octet<In> octet_i = load_octet(args.x + 8 * i);
      Octet<In> octet_j{};  // zeros with codes of zero count as nothing
      if (j >= 0) octet_j = load_octet(args.x + 8 * j);
      counts.add(octet_i, codes_of_i);
      counts.add(octet_j, codes_of_j);
    }
    counts.fold();
  }

 private:
  __device__ __forceinline__ int64_t next() {
    const int bit = __ffs(static_cast<int>(bits_)) - 1;
    bits_ &= bits_ - 1;
    return 2 * (first_ + bit / 2 * CodeWalk::kThreads) + bit % 2;
  }

  int64_t first_ = 0;  // first pack of the batch
  uint32_t bits_ = 0;  // two for each of its packs
};

template <class In, class Fp8>
__global__ void __launch_bounds__(CodeWalk::kThreads, CodeWalk::kBlocksPerMultiprocessor)
    cast_counts_kernel(const CountStream<In, Fp8> args) {
  follow_previous_kernel();
  if (args.out.is_idle()) return;
  const auto& walk = args.walk;
  const float scale_inverse = args.scales[0];
  OctetCastCounts<In> counts(overflow_limit(Fp8::kMax, scale_inverse));
  OpenOctets<In, Fp8> open;
  walk.template stream<uint4>(
      [&](int64_t pack, uint4& codes) {
        codes = __ldg(reinterpret_cast<const uint4*>(args.codes) + pack);
      },
      [] {}, [&](const uint4& codes, int k, int64_t pack) { open.add(codes, k, pack); },
      [&] { open.count(args, counts); });
  walk.for_rest([&](int64_t i) { counts.add(static_cast<float>(args.x[i]), args.codes[i]); });
  constexpr unsigned kAll = 0xffffffffu;
  const double fields[] = {static_cast<double>(__reduce_add_sync(kAll, counts.underflows())),
                           static_cast<double>(__reduce_add_sync(kAll, counts.overflows()))};
  merge_grid<CodeWalk::kWarps, 2>(fields, args.out, [&](const double* total, CastMoments& row) {
    add_cast(row, walk.count, scale_inverse, total[0], total[1], kNaN);
  });
}

}  // namespace

void cast_counts(const CastMomentsArgs& args, Stream stream) {
  const TensorView& x = args.x;
  dispatch_high_precision(x.dtype, "cast_moments", [&](auto in) {
    dispatch_fp8(args.format, "cast_moments", [&](auto out) {
      using In = typename decltype(in)::type;
      using Fp8 = typename decltype(out)::type;
      const bool wide = is_aligned(x.data, 16) && is_aligned(args.codes.data, 16);
      const CodeWalk walk(x.numel(), wide, x.device);
      launch_dependent(
          cast_counts_kernel<In, Fp8>, walk.blocks, walk.kThreads, 0, stream_of(stream),
          CountStream<In, Fp8>{x.ptr<In>(), args.codes.ptr<uint8_t>(), args.scales.ptr<float>(),
                               walk, row_sink_of<CastMoments>(args.out)});
    });
  });
}

}  // namespace te::cuda
