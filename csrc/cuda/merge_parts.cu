// Merges parts into out (ops/merge_parts.h). A group of lanes of one warp takes a row, one pack of
// V elements of each tensor at a time. A pack has 16 bytes of the wider dtype, or one element if
// sizes, strides or alignment allow no more. Each lane computes the weights of the row for itself,
// and the first one writes the log-sum-exp of the row.
//
// A thread loads its packs before it knows the weights. So rows of weight 0 are read in vain, but
// no row waits for two loads one after the other.
#include "ops/merge_parts.h"

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

// The strides of rows, as in `RowPlaces`, but of 32 bits, so that a thread multiplies by each in
// one instruction.
struct Places {
  uint32_t a = 0, b = 0, head = 0;

  Places() = default;
  explicit Places(const RowPlaces& rows)
      : a(narrow(rows.a)), b(narrow(rows.b)), head(narrow(rows.head)) {}
  __device__ __forceinline__ int64_t at(uint32_t i, uint32_t j, uint32_t h) const {
    return static_cast<int64_t>(uint64_t{i} * a + uint64_t{j} * b + uint64_t{h} * head);
  }

 private:
  static uint32_t narrow(int64_t stride) {
    require(stride >> 32 == 0, Kind::Unsupported, "merge_parts",
            "expected strides of fewer than 2^32 elements, got ", stride);
    return static_cast<uint32_t>(stride);
  }
};

// The rows of one part, addressed by their place in out. For a part that begins at a later token,
// `offset` is negative, and corrects for the tokens before it.
template <class Part>
struct PartRows {
  const Part* data = nullptr;
  const float* sums = nullptr;
  Places rows, sum_places;
  int64_t offset = 0, sum_offset = 0;
  uint32_t begin = 0, tokens = 0;
};

template <class Out, class Part>
struct MergeParts {
  Out* out;
  float* sums;  // null: the parts are added without weights
  Places out_rows, sum_places;
  PartRows<Part> parts[kMostParts];  // unused ones have no tokens
  int token_axis;
  bool fresh;
  Divisor b, heads;
  uint32_t rows;
  uint32_t packs;  // packs of a row
  uint32_t group;  // log2 of the lanes of a row
};

// The packs of a row that a lane takes: `first`, and others `step` apart.
struct Lane {
  uint32_t first, step, packs;

  __device__ __forceinline__ uint32_t pack(int i) const { return first + i * step; }
  __device__ __forceinline__ bool has(int i) const { return pack(i) < packs; }
};

// A row in out and in the parts that have its token. The first weight is that of out.
template <class Out, class Part, int kParts>
struct Row {
  Out* out;
  const Part* parts[kParts];
  float weights[1 + kParts];
};

// The packs of a row that a lane has loaded, in the bits of memory: converted to fp32 at once, they
// would need twice the registers.
template <class Out, class Part, int V, int kParts>
struct Packs {
  AccessOf<Out, V> own[kInFlight];
  AccessOf<Part, V> parts[kInFlight][kParts];

  __device__ __forceinline__ void load(const Row<Out, Part, kParts>& row, const Lane& lane,
                                       bool fresh) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (!lane.has(i)) continue;
      if (!fresh) own[i] = load_bits_here<Out, V>(row.out + lane.pack(i) * V);
#pragma unroll
      for (int k = 0; k < kParts; ++k)
        if (row.parts[k]) parts[i][k] = load_bits_here<Part, V>(row.parts[k] + lane.pack(i) * V);
    }
  }
  // Stores `start` plus the weighted sum of the packs.
  __device__ __forceinline__ void store(const Row<Out, Part, kParts>& row, const Lane& lane,
                                        float start) const {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (!lane.has(i)) continue;
      float values[V];
#pragma unroll
      for (int e = 0; e < V; ++e) values[e] = start;
      add<Out>(own[i], row.weights[0], values);
#pragma unroll
      for (int k = 0; k < kParts; ++k) add<Part>(parts[i][k], row.weights[1 + k], values);
      store_pack_global(row.out + lane.pack(i) * V, narrow<Out, V>(values));
    }
  }

 private:
  template <class T>
  static __device__ __forceinline__ void add(const AccessOf<T, V>& bits, float weight,
                                             float (&values)[V]) {
    if (weight == 0.0f) return;
    float more[V];
    widen(*reinterpret_cast<const Pack<T, V>*>(&bits), more);
#pragma unroll
    for (int e = 0; e < V; ++e) values[e] = fmaf(weight, more[e], values[e]);
  }
};

template <class Out, class Part, int V, int kParts>
__global__ void __launch_bounds__(kThreads)
    merge_parts_kernel(const __grid_constant__ MergeParts<Out, Part> args) {
  follow_previous_kernel();
  const uint32_t lanes = 1u << args.group;
  const uint32_t number = blockIdx.x * (kThreads >> args.group) + (threadIdx.x >> args.group);
  const bool exists = number < args.rows, weighted = args.sums != nullptr;
  const uint32_t outer = args.heads.quotient(number), i = args.b.quotient(outer);
  const uint32_t head = number - outer * args.heads.value(), j = outer - i * args.b.value();
  const uint32_t token = args.token_axis == 0 ? i : j;
  const float none = weighted ? kNoKey : 0.0f;
  Row<Out, Part, kParts> row{.out = args.out + args.out_rows.at(i, j, head)};
  float* const sum = args.sums + args.sum_places.at(i, j, head);
  row.weights[0] = !exists || args.fresh ? none : weighted ? *sum : 1.0f;
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    const PartRows<Part>& part = args.parts[k];
    row.parts[k] = nullptr;
    row.weights[1 + k] = none;
    if (!exists || token - part.begin >= part.tokens) continue;  // earlier tokens wrap around
    row.parts[k] = part.data + (part.rows.at(i, j, head) + part.offset);
    row.weights[1 + k] =
        weighted ? part.sums[part.sum_places.at(i, j, head) + part.sum_offset] : 1.0f;
  }
  Lane lane{threadIdx.x & (lanes - 1), lanes, exists ? args.packs : 0};
  const bool writes_sum = exists && weighted && lane.first == 0;
  Packs<Out, Part, V, kParts> packs;
  packs.load(row, lane, args.fresh);
  if (weighted) {
    const float merged = shares_of(row.weights);
    __syncwarp();  // all lanes of a row have read the log-sum-exp that is written now
    if (writes_sum) *sum = merged;
  }
  bool any = false;
#pragma unroll
  for (int k = 0; k <= kParts; ++k) any = any || row.weights[k] != 0.0f;
  if (!any && !args.fresh) return;
  const float start = any ? -0.0f : 0.0f;  // -0.0 changes no bit of the first summand
  while (lane.has(0)) {
    packs.store(row, lane, start);
    lane.first += kInFlight * lanes;
    packs.load(row, lane, args.fresh);
  }
}

// The rows of part k, addressed by their place in out.
template <class Part>
PartRows<Part> rows_of(const MergePartsArgs& how, size_t k) {
  const TensorView& part = how.parts[k];
  const int64_t begin = how.begins[k];
  const auto before = [&](const RowPlaces& places) {
    return -begin * (how.token_axis == 0 ? places.a : places.b);
  };
  PartRows<Part> found;
  found.data = part.ptr<Part>();
  found.rows = Places(RowPlaces(part));
  found.offset = before(RowPlaces(part));
  found.begin = static_cast<uint32_t>(begin);
  found.tokens = static_cast<uint32_t>(part.size(how.token_axis));
  if (how.log_sum_exp) {
    const TensorView& sums = how.part_log_sum_exps[k];
    found.sums = sums.ptr<float>();
    found.sum_places = Places(RowPlaces(sums));
    found.sum_offset = before(RowPlaces(sums));
  }
  return found;
}

template <class Out, class Part, int V, int kParts>
void launch(const MergePartsArgs& how, cudaStream_t stream) {
  const int64_t rows = how.out.rows(), packs = how.out.size(3) / V;
  require(rows < (int64_t{1} << 31) && packs < (1 << 28), Kind::Unsupported, "merge_parts",
          "expected fewer than 2^31 rows of fewer than 2^28 elements, got ", how.out);
  const auto by = [](int64_t value) { return Divisor(static_cast<uint32_t>(value)); };
  const int64_t turns = ceil_div(packs, kInFlight);
  const auto lanes =
      std::min<uint32_t>(std::bit_ceil(static_cast<uint32_t>(std::max<int64_t>(turns, 1))), kWarp);
  MergeParts<Out, Part> args{
      .out = how.out.ptr<Out>(),
      .sums = how.log_sum_exp ? how.log_sum_exp.ptr<float>() : nullptr,
      .out_rows = Places(RowPlaces(how.out)),
      .sum_places = how.log_sum_exp ? Places(RowPlaces(how.log_sum_exp)) : Places(),
      .parts = {},
      .token_axis = how.token_axis,
      .fresh = how.fresh,
      .b = by(how.out.size(1)),
      .heads = by(how.out.size(2)),
      .rows = static_cast<uint32_t>(rows),
      .packs = static_cast<uint32_t>(packs),
      .group = static_cast<uint32_t>(std::countr_zero(lanes))};
  for (size_t k = 0; k < how.parts.size(); ++k) args.parts[k] = rows_of<Part>(how, k);
  launch_dependent(merge_parts_kernel<Out, Part, V, kParts>,
                   static_cast<unsigned>(ceil_div(rows, int64_t{kThreads} / lanes)), kThreads, 0,
                   stream, args);
}

template <class T, int V>
bool has_packs(const TensorView& t) {
  const RowPlaces rows(t);
  const auto whole = [](int64_t count) { return count % V == 0; };
  return whole(t.size(3)) && whole(rows.a) && whole(rows.b) && whole(rows.head) &&
         is_aligned(t.data, V * sizeof(T));
}

template <class Out, class Part>
void run(const MergePartsArgs& how, cudaStream_t stream) {
  constexpr int V = kWide<Out, Part>;
  bool wide = has_packs<Out, V>(how.out);
  for (const TensorView& part : how.parts) wide = wide && has_packs<Part, V>(part);
  const auto start = [&](auto parts) {
    constexpr int kParts = decltype(parts)::value;
    return wide ? launch<Out, Part, V, kParts>(how, stream)
                : launch<Out, Part, 1, kParts>(how, stream);
  };
  // Most rings have two ranks, and a kernel for two parts needs fewer registers than one for four.
  how.parts.size() <= 2 ? start(std::integral_constant<int, 2>{})
                        : start(std::integral_constant<int, kMostParts>{});
}

}  // namespace

void merge_parts(const MergePartsArgs& args, Stream stream) {
  const DeviceGuard guard(args.out.device);
  dispatch_high_precision(args.parts.front().dtype, "merge_parts", [&](auto tag) {
    using Part = typename decltype(tag)::type;
    if (args.out.dtype == DType::Float32) return run<float, Part>(args, stream_of(stream));
    run<Part, Part>(args, stream_of(stream));
  });
}

}  // namespace te::cuda
