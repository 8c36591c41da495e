// A group of lanes of one warp takes a row, a pack of kVector elements of both tensors at a time;
// a pack of the wider dtype is 16 bytes, or one element where size, strides or alignment allow no
// more. Each lane finds the row's share for itself, and the first one writes the row's sum.
//
// A thread asks for its packs before it knows the share: a row of share 0 is read in vain, but no
// row waits for two reads one after the other.
#include "ops/merge_attention.h"

#include <algorithm>
#include <bit>

#include "core/divisor.h"
#include "core/merge_math.h"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/pack_io.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int kInFlight = 2;  // packs of each tensor that a lane loads before it uses the first

template <class Out, class Part>
inline constexpr int kWide = 16 / static_cast<int>(std::max(sizeof(Out), sizeof(Part)));

template <class Out, class Part>
struct MergeAttention {
  Out* out;
  const Part* part;
  float* sums;
  const float* part_sums;
  RowPlaces out_rows, part_rows, sum_places, part_sum_places;
  Divisor b, heads;
  uint32_t rows;
  uint32_t packs;  // of a row
  uint32_t group;  // log2 of the lanes that a row has
};

// Where a lane's packs are in a row: `first`, and others `step` apart.
struct Lane {
  uint32_t first, step, packs;

  __device__ __forceinline__ uint32_t pack(int k) const { return first + k * step; }
  __device__ __forceinline__ bool has(int k) const { return pack(k) < packs; }
};

template <class Out, class Part, int kVector>
struct PacksInFlight {
  Pack<Out, kVector> out[kInFlight];
  Pack<Part, kVector> part[kInFlight];

  __device__ __forceinline__ void load(const Out* out_row, const Part* part_row, const Lane& lane) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (!lane.has(k)) continue;
      out[k] = load_pack_here<Out, kVector>(out_row + lane.pack(k) * kVector);
      part[k] = load_pack_here<Part, kVector>(part_row + lane.pack(k) * kVector);
    }
  }
  __device__ __forceinline__ void store(Out* out_row, const Lane& lane, float share) const {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (!lane.has(k)) continue;
      float values[kVector], parts[kVector];
      widen(out[k], values);
      widen(part[k], parts);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = merged(values[i], parts[i], share);
      store_pack_global(out_row + lane.pack(k) * kVector, narrow<Out, kVector>(values));
    }
  }
};

template <class Out, class Part, int kVector>
__global__ void __launch_bounds__(kThreads)
    merge_attention_kernel(const __grid_constant__ MergeAttention<Out, Part> args) {
  follow_previous_kernel();
  const uint32_t lanes = 1u << args.group;
  const uint32_t row = blockIdx.x * (kThreads >> args.group) + (threadIdx.x >> args.group);
  const bool exists = row < args.rows;
  const uint32_t token = args.heads.quotient(row), i = args.b.quotient(token);
  const uint32_t head = row - token * args.heads.value(), j = token - i * args.b.value();
  float* const place = args.sums + args.sum_places.at(i, j, head);
  const float sum = exists ? *place : 0.0f;
  const float part_sum = exists ? args.part_sums[args.part_sum_places.at(i, j, head)] : 0.0f;

  Out* const out = args.out + args.out_rows.at(i, j, head);
  const Part* const part = args.part + args.part_rows.at(i, j, head);
  Lane lane{threadIdx.x & (lanes - 1), lanes, exists ? args.packs : 0};
  const bool writes_sum = exists && lane.first == 0;
  PacksInFlight<Out, Part, kVector> packs;
  packs.load(out, part, lane);
  const float share = share_of_part(sum, part_sum);
  __syncwarp();  // all lanes of a row have read the sum that is written now
  if (writes_sum) *place = log_of_sum(sum, part_sum);
  if (share == 0.0f) return;
  while (true) {
    packs.store(out, lane, share);
    lane.first += kInFlight * lanes;
    if (!lane.has(0)) return;
    packs.load(out, part, lane);
  }
}

template <class Out, class Part, int kVector>
void launch(const MergeAttentionArgs& how, cudaStream_t stream) {
  const int64_t rows = how.log_sum_exp.numel(), packs = how.out.size(3) / kVector;
  require(rows < (int64_t{1} << 31) && packs < (1 << 28), Kind::Unsupported, "merge_attention",
          "expected fewer than 2^31 rows of fewer than 2^28 elements, got ", how.out);
  const auto by = [](int64_t value) { return Divisor(static_cast<uint32_t>(value)); };
  const auto lanes =
      std::min<uint32_t>(std::bit_ceil(static_cast<uint32_t>(ceil_div(packs, kInFlight))), kWarp);
  const int64_t rows_of_block = kThreads / lanes;
  launch_dependent(
      merge_attention_kernel<Out, Part, kVector>,
      static_cast<unsigned>(ceil_div(rows, rows_of_block)), kThreads, 0, stream,
      MergeAttention<Out, Part>{.out = how.out.ptr<Out>(),
                                .part = how.part.ptr<Part>(),
                                .sums = how.log_sum_exp.ptr<float>(),
                                .part_sums = how.part_log_sum_exp.ptr<float>(),
                                .out_rows = RowPlaces(how.out),
                                .part_rows = RowPlaces(how.part),
                                .sum_places = RowPlaces(how.log_sum_exp),
                                .part_sum_places = RowPlaces(how.part_log_sum_exp),
                                .b = by(how.out.size(1)),
                                .heads = by(how.out.size(2)),
                                .rows = static_cast<uint32_t>(rows),
                                .packs = static_cast<uint32_t>(packs),
                                .group = static_cast<uint32_t>(std::countr_zero(lanes))});
}

template <class T, int kVector>
bool has_packs(const TensorView& t) {
  const RowPlaces rows(t);
  const auto whole = [](int64_t count) { return count % kVector == 0; };
  return whole(t.size(3)) && whole(rows.a) && whole(rows.b) && whole(rows.head) &&
         is_aligned(t.data, kVector * sizeof(T));
}

template <class Out, class Part>
void run(const MergeAttentionArgs& how, cudaStream_t stream) {
  constexpr int V = kWide<Out, Part>;
  if (has_packs<Out, V>(how.out) && has_packs<Part, V>(how.part))
    return launch<Out, Part, V>(how, stream);
  launch<Out, Part, 1>(how, stream);
}

}  // namespace

void merge_attention(const MergeAttentionArgs& args, Stream stream) {
  const DeviceGuard guard(args.out.device);
  dispatch_high_precision(args.part.dtype, "merge_attention", [&](auto tag) {
    using Part = typename decltype(tag)::type;
    if (args.out.dtype == DType::Float32) return run<float, Part>(args, stream_of(stream));
    run<Part, Part>(args, stream_of(stream));
  });
}

}  // namespace te::cuda
