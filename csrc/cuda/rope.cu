// Rotary position embedding. A thread rotates one unit: two packs of kVector elements of a head.
// The packs are rotary_dim / 2 elements apart, so that each pair has one element in either pack;
// interleaved pairs are within a pack. A unit of elements that are not rotated is one pack. kVector
// = 1 allows any size and alignment; then the two elements of an interleaved pair are a unit.
//
// A block takes some heads at one place of the sequence, or at several places if one has few heads.
// If no sequence has a start position of its own, it takes all sequences of the batch together. Its
// threads first issue the loads of their packs, then compute the sines and cosines of those
// positions, and rotate when both are there. With one unit per thread and few registers, three
// quarters of a multiprocessor's threads are loading; more units per thread, or angles before
// loads, were slower on an H200.
#include "ops/rope.h"

#include <algorithm>

#include "core/divisor.h"
#include "core/rope_math.h"
#include "core/rope_position.h"
#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/pack_io.cuh"

namespace te::cuda {
namespace {

constexpr int kThreads = 128, kBlocksInFlight = 12;

template <class T>
struct Rope {
  const T* x;
  T* out;
  const float* freqs;
  RopePositions positions;
  RopeShape shape;
  uint32_t rows;      // heads of all tokens of a place
  uint32_t per_head;  // units of a head
  uint32_t places_of_block;
  Divisor units_of_block;  // units of a head that a block takes; blockIdx.z is the block's number
  Divisor rows_of_block;   // rows that a block takes of each of its places
  Divisor parts;           // blocks that share the same places, with different rows
  Divisor heads, rotary_dim;
  Divisor period;    // heads, of which some are rotated
  uint32_t rotated;  // heads at the start of a period that are rotated
};

// Whether a unit's two packs are half the rotated elements apart, not neighbours.
template <int kVector, bool kInterleaved>
constexpr bool kHalvesApart = kVector > 1 || !kInterleaved;

// Elements of a pack that are rotated at a time.
template <int kVector>
constexpr int kGroup = kVector >= 4 ? 4 : 1;

// The sines and cosines of a position in shared memory, in the order in which units read them. A
// group of neighbouring elements is stored for all units side by side, so that there are no bank
// conflicts.
template <int kVector, bool kInterleaved>
struct AngleTable {
  static constexpr int kWidth = kGroup<kVector>, kOfUnit = 2 * kVector;
  float* cosines;
  float* sines;
  uint32_t rotary_dim;

  // `k` counts the elements of a unit: those of its first pack, then those of its second.
  __device__ __forceinline__ uint32_t slot(uint32_t unit, uint32_t k) const {
    return (k / kWidth * (rotary_dim / kOfUnit) + unit) * kWidth + k % kWidth;
  }
  __device__ __forceinline__ void put(uint32_t element, float angle) const {
    const uint32_t half = rotary_dim / 2, i = element < half ? element : element - half;
    const uint32_t at = kHalvesApart<kVector, kInterleaved>
                            ? slot(i / kVector, i % kVector + (element < half ? 0 : kVector))
                            : slot(element / kOfUnit, element % kOfUnit);
    const SineCosine of_angle = sine_cosine(angle);
    sines[at] = of_angle.sine;
    cosines[at] = of_angle.cosine;
  }
  // Loads the values for one group of each pack.
  __device__ __forceinline__ void get(const float* from, uint32_t unit, uint32_t first,
                                      float (&to)[2 * kWidth]) const {
#pragma unroll
    for (int pack = 0; pack < 2; ++pack) {
      const auto group = load_pack<float, kWidth>(from + slot(unit, first + pack * kVector));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) to[pack * kWidth + k] = group.at[k];
    }
  }
};

// The places and rows that a block takes.
struct Share {
  int64_t first_place;
  uint32_t places, part;
};

template <class T>
__device__ __forceinline__ Share share_of_block(const Rope<T>& args) {
  const uint32_t block = args.parts.quotient(blockIdx.x);
  const int64_t first = int64_t{block} * args.places_of_block;
  const int64_t left = args.shape.sequence - first;
  return {first, static_cast<uint32_t>(min(left, int64_t{args.places_of_block})),
          blockIdx.x - block * args.parts.value()};
}

// The unit that a thread takes.
struct Unit {
  uint32_t place, row, index;  // place in the block, row of the place, unit of the head
  bool exists, rotates;
};

template <class T>
__device__ __forceinline__ Unit unit_of_thread(const Rope<T>& args, const Share& share,
                                               uint32_t pairs) {
  const uint32_t lane = args.units_of_block.quotient(threadIdx.x);
  const uint32_t units = args.units_of_block.value(), rows = args.rows_of_block.value();
  const uint32_t place = args.rows_of_block.quotient(lane);
  const uint32_t row = share.part * rows + lane - place * rows;
  const uint32_t index = blockIdx.z * units + threadIdx.x - lane * units;
  const bool exists = place < share.places && row < args.rows && index < args.per_head;
  return {place, row, index, exists, index < pairs};
}

template <int kVector, bool kInterleaved>
struct Angles {
  using Table = AngleTable<kVector, kInterleaved>;
  float* memory;
  uint32_t rotary_dim;

  __device__ __forceinline__ Table of_place(uint32_t place) const {
    float* const own = memory + 2 * place * rotary_dim;
    return {own, own + rotary_dim, rotary_dim};
  }
  template <class T>
  __device__ __forceinline__ void make(const Rope<T>& args, const Share& share) const {
    for (uint32_t i = threadIdx.x; i < share.places * rotary_dim; i += kThreads) {
      const uint32_t place = args.rotary_dim.quotient(i), element = i - place * rotary_dim;
      const int64_t position = args.positions.of(share.first_place + place, blockIdx.y);
      of_place(place).put(element, args.freqs[position * rotary_dim + element]);
    }
  }
};

// Converts one group of each pack to fp32.
template <class T, int N>
__device__ __forceinline__ void widen_two(const Pack<T, N>& a, const Pack<T, N>& b,
                                          float (&v)[2 * N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    v[k] = static_cast<float>(a.at[k]);
    v[N + k] = static_cast<float>(b.at[k]);
  }
}

template <class T, int N>
__device__ __forceinline__ Pack<T, N> narrow_half(const float (&v)[2 * N], int first) {
  float half[N];
#pragma unroll
  for (int k = 0; k < N; ++k) half[k] = v[first + k];
  return narrow<T, N>(half);
}

// Rotates two packs in place, group by group, so that few registers hold angles.
template <class T, int kVector, bool kInterleaved, bool kBackward>
__device__ __forceinline__ void rotate_packs(Pack<T, kVector>& a, Pack<T, kVector>& b,
                                             const AngleTable<kVector, kInterleaved>& table,
                                             uint32_t unit) {
  constexpr int N = kGroup<kVector>;
#pragma unroll
  for (int first = 0; first < kVector; first += N) {
    auto& from_a = reinterpret_cast<Pack<T, N>&>(a.at[first]);
    auto& from_b = reinterpret_cast<Pack<T, N>&>(b.at[first]);
    stay_packed(from_a);
    stay_packed(from_b);
    float cosine[2 * N], sine[2 * N], v[2 * N];
    table.get(table.cosines, unit, first, cosine);
    table.get(table.sines, unit, first, sine);
    widen_two<T, N>(from_a, from_b, v);
#pragma unroll
    for (int p = 0; p < N; ++p) {
      const int i = kInterleaved ? 2 * p : p, j = kInterleaved ? i + 1 : p + N;
      const RopePair y = rotate<kBackward>({v[i], v[j]}, {cosine[i], sine[i], cosine[j], sine[j]});
      v[i] = y.a;
      v[j] = y.b;
    }
    from_a = narrow_half<T, N>(v, 0);
    from_b = narrow_half<T, N>(v, N);
    stay_packed(from_a);
    stay_packed(from_b);
  }
}

template <class T, int kVector, bool kInterleaved, bool kBackward>
__global__ void __launch_bounds__(kThreads, blocks_sharing(kBlocksInFlight, 7, kThreads))
    rope_kernel(const __grid_constant__ Rope<T> args) {
  follow_previous_kernel();
  extern __shared__ __align__(16) float memory[];
  const RopeShape& shape = args.shape;
  const auto rotary_dim = static_cast<uint32_t>(shape.rotary_dim);
  const uint32_t pairs = rotary_dim / (2 * kVector);
  const Share share = share_of_block(args);
  const Unit unit = unit_of_thread(args, share, pairs);

  constexpr bool kApart = kHalvesApart<kVector, kInterleaved>;
  const uint32_t at = unit.rotates ? unit.index * (kApart ? kVector : 2)
                                   : rotary_dim + (unit.index - pairs) * kVector;
  const uint32_t gap = !unit.rotates ? 0 : kApart ? rotary_dim / 2 : 1;
  const int64_t place = share.first_place + unit.place;
  const uint32_t token = args.heads.quotient(unit.row);
  const uint32_t head = unit.row - token * args.heads.value();
  const int64_t batch = int64_t{blockIdx.y} + token;
  Pack<T, kVector> a, b;
  if (unit.exists) {
    const T* const from =
        args.x + place * shape.x_sequence + batch * shape.x_batch + head * shape.x_head + at;
    a = load_pack_here<T, kVector>(from);
    b = load_pack_here<T, kVector>(from + gap);
  }
  const Angles<kVector, kInterleaved> angles{memory, rotary_dim};
  angles.make(args, share);
  __syncthreads();
  if (!unit.exists) return;

  T* const to = args.out + place * shape.out_sequence + batch * shape.out_batch +
                head * static_cast<uint32_t>(shape.size) + at;
  if (unit.rotates) {
    if (head - args.period.quotient(head) * args.period.value() < args.rotated)
      rotate_packs<T, kVector, kInterleaved, kBackward>(a, b, angles.of_place(unit.place),
                                                        unit.index);
    store_pack_global<T, kVector>(to + gap, b);
  }
  store_pack_global<T, kVector>(to, a);
}

// Tokens of a place that one block may take: those of all sequences, if they share their positions.
int64_t tokens_of_place(const RopeArgs& how, const RopeShape& shape) {
  return how.starts || how.cu_seqlens ? 1 : shape.batch;
}

// Divides the work among blocks. Rows are divided evenly among as few blocks as can hold them, and
// a block with threads to spare takes more places.
template <class T, int kVector>
Rope<T> share_out(const RopeArgs& how, const RopeShape& shape) {
  constexpr int64_t kAnglesOfBlock = 4096;  // their sines and cosines fit in 32 KiB
  const int64_t rotary_dim = std::max<int64_t>(1, shape.rotary_dim);
  const int64_t rows = shape.heads * tokens_of_place(how, shape);
  const int64_t per_head =
      shape.rotary_dim / (2 * kVector) + (shape.size - shape.rotary_dim) / kVector;
  const int64_t units = std::min<int64_t>(per_head, kThreads), lanes = kThreads / units;
  const int64_t parts = ceil_div(rows, lanes), rows_of_block = ceil_div(rows, parts);
  const int64_t places =
      std::min({lanes / rows_of_block, kAnglesOfBlock / rotary_dim, shape.sequence});
  const auto by = [](int64_t value) { return Divisor(static_cast<uint32_t>(value)); };
  return {how.x.ptr<T>(),
          how.out.ptr<T>(),
          how.freqs.ptr<float>(),
          {how.starts.ptr<int32_t>(), how.cu_seqlens.ptr<int32_t>(),
           how.cu_seqlens ? how.cu_seqlens.numel() - 1 : shape.batch, shape.positions},
          shape,
          static_cast<uint32_t>(rows),
          static_cast<uint32_t>(per_head),
          static_cast<uint32_t>(places),
          by(units),
          by(rows_of_block),
          by(parts),
          by(shape.heads),
          by(rotary_dim),
          by(how.period),
          static_cast<uint32_t>(how.rotated)};
}

template <class T, int kVector>
void launch(const RopeArgs& how, const RopeShape& shape, cudaStream_t stream) {
  const Rope<T> args = share_out<T, kVector>(how, shape);
  const dim3 grid(
      static_cast<unsigned>(ceil_div(shape.sequence, args.places_of_block) * args.parts.value()),
      static_cast<unsigned>(shape.batch / tokens_of_place(how, shape)),
      static_cast<unsigned>(ceil_div(args.per_head, args.units_of_block.value())));
  const size_t memory =
      2 * sizeof(float) * static_cast<size_t>(shape.rotary_dim) * args.places_of_block;
  dispatch_bool(how.interleaved, [&](auto interleaved) {
    dispatch_bool(how.backward, [&](auto backward) {
      launch_dependent(rope_kernel<T, kVector, interleaved(), backward()>, grid, kThreads, memory,
                       stream, args);
    });
  });
}

template <class T, int kVector>
bool can_go_wide(const RopeArgs& how, const RopeShape& s) {
  const auto whole = [](int64_t count) { return count % kVector == 0; };
  return s.rotary_dim % (2 * kVector) == 0 && whole(s.size) && whole(s.x_sequence) &&
         whole(s.x_batch) && whole(s.x_head) && is_aligned(how.x.data, 16) &&
         is_aligned(how.out.data, 16);
}

template <class T>
void run(const RopeArgs& how, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const RopeShape shape(how);
  const int64_t tokens = tokens_of_place(how, shape);
  require(shape.batch / tokens <= 65535, Kind::Unsupported, "rope",
          "expected at most 65535 sequences with start positions, got ", shape.batch);
  require(shape.rotary_dim <= 4096 && shape.heads * shape.size * tokens < (1 << 30) &&
              shape.size <= (1 << 22),
          Kind::Unsupported, "rope",
          "expected at most 4096 rotated elements, 2^22 elements of a head and 2^30 of a position,"
          " got ",
          shape.rotary_dim, ", ", shape.size, " and ", shape.heads * shape.size * tokens);
  if (can_go_wide<T, kWide>(how, shape)) {
    launch<T, kWide>(how, shape, stream);
  } else {
    launch<T, 1>(how, shape, stream);
  }
}

}  // namespace

void rope(const RopeArgs& args, Stream on) {
  const DeviceGuard guard(args.x.device);
  dispatch_high_precision(args.x.dtype, "rope", [&](auto tag) {
    run<typename decltype(tag)::type>(args, stream_of(on));
  });
}

}  // namespace te::cuda
