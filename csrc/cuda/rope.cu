// A block takes some neighbouring places of a sequence. Its threads make the sines and cosines of
// those places once; then each turns the same elements of several tokens: those of one place in all
// sequences of the batch, where no sequence has a start of its own.
//
// A unit of work is two packs of kVector elements, half the turned elements apart. Where pairs are
// interleaved they are within a pack. With kVector = 1 any size and alignment goes; then the two
// elements of an interleaved pair are a unit.
#include "ops/rope.h"

#include <algorithm>

#include "core/rope_math.h"
#include "core/rope_position.h"
#include "cuda/device/pack_io.cuh"
#include "cuda/launch.h"

namespace te::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensInFlight = 4;  // tokens of a unit whose loads are issued before any is used

template <class T>
struct Rope {
  const T* x;
  T* out;
  const float* freqs;
  RopePositions positions;
  RopeShape shape;
  int tokens_of_place;  // 1, or the batch
  int tokens_of_item;   // that a thread turns at a time, at most kTokensInFlight
  int places_of_block;
};

// Whether a unit's two packs are half the turned elements apart, not neighbours.
template <int kVector, bool kInterleaved>
constexpr bool kHalvesApart = kVector > 1 || !kInterleaved;

// The sines and cosines of a position in shared memory, in the order in which units read them:
// groups of four neighbours (or single ones) of all units side by side, so that no banks conflict.
template <int kVector, bool kInterleaved>
struct AngleTable {
  static constexpr int kWidth = kVector >= 4 ? 4 : 1, kOfUnit = 2 * kVector;
  float* cosines;
  float* sines;
  int turned;

  __device__ __forceinline__ int slot(int unit, int k) const {
    return (k / kWidth * (turned / kOfUnit) + unit) * kWidth + k % kWidth;
  }
  __device__ __forceinline__ void put(int element, float angle) const {
    const int half = turned / 2, i = element < half ? element : element - half;
    const int at = kHalvesApart<kVector, kInterleaved>
                       ? slot(i / kVector, i % kVector + (element < half ? 0 : kVector))
                       : slot(element / kOfUnit, element % kOfUnit);
    sincosf(angle, &sines[at], &cosines[at]);
  }
  __device__ __forceinline__ void get(const float* from, int unit, float (&to)[kOfUnit]) const {
#pragma unroll
    for (int k = 0; k < kOfUnit; k += kWidth) {
      const auto group = load_pack<float, kWidth>(from + slot(unit, k));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) to[k + j] = group.at[j];
    }
  }
};

// Where a unit's two packs are in a head, or the one of a unit that only passes through.
struct Place {
  int head, unit, a, b;  // the unit counts within its head
  bool passes;
};

template <int kVector, bool kInterleaved>
__device__ __forceinline__ Place place_of(int unit, int turned, int size) {
  const int pairs = turned / (2 * kVector), per_head = pairs + (size - turned) / kVector;
  const int head = unit / per_head, i = unit % per_head;
  if (i >= pairs) return {head, i, turned + (i - pairs) * kVector, 0, true};
  if (kHalvesApart<kVector, kInterleaved>)
    return {head, i, i * kVector, turned / 2 + i * kVector, false};
  return {head, i, 2 * i * kVector, (2 * i + 1) * kVector, false};
}

// Elements of a unit count through its first pack, then its second.
template <int kVector, bool kInterleaved, bool kBackward>
__device__ __forceinline__ void turn_unit(float (&v)[2 * kVector],
                                          const float (&cosine)[2 * kVector],
                                          const float (&sine)[2 * kVector]) {
#pragma unroll
  for (int p = 0; p < kVector; ++p) {
    const int a = kInterleaved ? 2 * p : p, b = kInterleaved ? a + 1 : p + kVector;
    const RopePair y = turn<kBackward>({v[a], v[b]}, {cosine[a], sine[a], cosine[b], sine[b]});
    v[a] = y.a;
    v[b] = y.b;
  }
}

template <class T, int kVector>
__device__ __forceinline__ void widen_two(const Pack<T, kVector>& a, const Pack<T, kVector>& b,
                                          float (&v)[2 * kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    v[k] = static_cast<float>(a.at[k]);
    v[kVector + k] = static_cast<float>(b.at[k]);
  }
}

template <class T, int kVector>
__device__ __forceinline__ void store_half(T* to, const float (&v)[2 * kVector], int first) {
  float half[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) half[k] = v[first + k];
  store_pack(to, narrow<T, kVector>(half));
}

// Turns the packs of some tokens from `first` on; all are loaded before any is used.
template <class T, int kVector, bool kInterleaved, bool kBackward>
__device__ __forceinline__ void turn_tokens(const Rope<T>& args, const T* x, T* out, Place at,
                                            int first,
                                            const AngleTable<kVector, kInterleaved>& angles) {
  const int64_t x_batch = args.shape.x_batch, out_batch = args.shape.out_batch;
  const auto has = [&](int t) {
    return t < args.tokens_of_item && first + t < args.tokens_of_place;
  };
  Pack<T, kVector> a[kTokensInFlight], b[kTokensInFlight];
#pragma unroll
  for (int t = 0; t < kTokensInFlight; ++t)
    if (has(t)) {
      a[t] = load_pack<T, kVector>(x + (first + t) * x_batch + at.a);
      b[t] = load_pack<T, kVector>(x + (first + t) * x_batch + at.b);
    }
  float cosine[2 * kVector], sine[2 * kVector];
  angles.get(angles.cosines, at.unit, cosine);
  angles.get(angles.sines, at.unit, sine);
#pragma unroll
  for (int t = 0; t < kTokensInFlight; ++t)
    if (has(t)) {
      float v[2 * kVector];
      widen_two<T, kVector>(a[t], b[t], v);
      turn_unit<kVector, kInterleaved, kBackward>(v, cosine, sine);
      T* to = out + (first + t) * out_batch;
      store_half<T, kVector>(to + at.a, v, 0);
      store_half<T, kVector>(to + at.b, v, kVector);
    }
}

template <class T, int kVector, bool kInterleaved, bool kBackward>
__global__ void __launch_bounds__(kThreads) rope_kernel(const Rope<T> args) {
  extern __shared__ __align__(16) float memory[];
  const RopeShape& shape = args.shape;
  const int turned = static_cast<int>(shape.turned), size = static_cast<int>(shape.size);
  const int64_t first_place = int64_t{blockIdx.x} * args.places_of_block, b = blockIdx.y;
  const int places =
      static_cast<int>(min(int64_t{args.places_of_block}, shape.sequence - first_place));
  const auto angles_of = [&](int place) {
    float* const own = memory + 2 * place * turned;
    return AngleTable<kVector, kInterleaved>{own, own + turned, turned};
  };
  for (int i = static_cast<int>(threadIdx.x); i < places * turned; i += kThreads) {
    const int place = i / turned, element = i % turned;
    angles_of(place).put(element,
                         args.freqs[args.positions.of(first_place + place, b) * turned + element]);
  }
  __syncthreads();

  const T* x = args.x + first_place * shape.x_sequence + b * shape.x_batch;
  T* out = args.out + first_place * shape.out_sequence + b * shape.out_batch;
  const int per_head = turned / (2 * kVector) + (size - turned) / kVector;
  const int units = static_cast<int>(shape.heads) * per_head;
  const int groups = (args.tokens_of_place - 1) / args.tokens_of_item + 1;
  for (int item = static_cast<int>(threadIdx.x); item < places * groups * units; item += kThreads) {
    const Place at = place_of<kVector, kInterleaved>(item % units, turned, size);
    const int first = item / units % groups * args.tokens_of_item, place = item / units / groups;
    const T* from = x + place * shape.x_sequence + at.head * shape.x_head;
    T* to = out + place * shape.out_sequence + at.head * shape.size;
    if (!at.passes) {
      turn_tokens<T, kVector, kInterleaved, kBackward>(args, from, to, at, first, angles_of(place));
      continue;
    }
    for (int t = first; t < min(first + args.tokens_of_item, args.tokens_of_place); ++t)
      store_pack(to + t * shape.out_batch + at.a,
                 load_pack<T, kVector>(from + t * shape.x_batch + at.a));
  }
}

template <class T, int kVector>
bool can_go_wide(const Rope<T>& args) {
  const RopeShape& s = args.shape;
  const auto whole = [](int64_t count) { return count % kVector == 0; };
  return s.turned % (2 * kVector) == 0 && whole(s.size) && whole(s.x_sequence) &&
         whole(s.x_batch) && whole(s.x_head) && is_aligned(args.x, 16) && is_aligned(args.out, 16);
}

// As much for a block as repays making the angles, and as many tokens for a thread at a time as
// leave work for every thread.
template <class T>
void share_out(Rope<T>& args, int64_t packs_of_place) {
  constexpr int64_t kPacksOfBlock = 4 * kThreads, kMostPlaces = 8, kFloats = 48 * 1024 / 4;
  const int64_t fitting =
      std::min(kMostPlaces, kFloats / (2 * std::max<int64_t>(1, args.shape.turned)));
  const int64_t places =
      std::clamp<int64_t>(kPacksOfBlock / std::max<int64_t>(1, packs_of_place), 1, fitting);
  args.places_of_block = static_cast<int>(places);
  args.tokens_of_item =
      static_cast<int>(std::clamp<int64_t>(places * packs_of_place / kThreads, 1, kTokensInFlight));
}

template <class T, int kVector>
void launch(Rope<T> args, const RopeArgs& how, cudaStream_t stream) {
  const RopeShape& shape = args.shape;
  share_out(args, shape.heads * shape.size / (2 * kVector) * args.tokens_of_place);
  const dim3 grid(static_cast<unsigned>(ceil_div(shape.sequence, args.places_of_block)),
                  static_cast<unsigned>(shape.batch / args.tokens_of_place));
  const size_t memory = 2 * sizeof(float) * static_cast<size_t>(shape.turned) *
                        static_cast<size_t>(args.places_of_block);
  dispatch_bool(how.interleaved, [&](auto interleaved) {
    dispatch_bool(how.backward, [&](auto backward) {
      rope_kernel<T, kVector, interleaved(), backward()><<<grid, kThreads, memory, stream>>>(args);
    });
  });
  check_launch("rope");
}

template <class T>
void run(const RopeArgs& how, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const RopeShape shape(how);
  const int64_t sequences = how.cu_seqlens ? how.cu_seqlens.numel() - 1 : shape.batch;
  const bool shared = !how.starts && !how.cu_seqlens;
  const Rope<T> args{
      how.x.ptr<T>(),
      how.out.ptr<T>(),
      how.freqs.ptr<float>(),
      {how.starts.ptr<int32_t>(), how.cu_seqlens.ptr<int32_t>(), sequences, shape.positions},
      shape,
      shared ? static_cast<int>(shape.batch) : 1,
      1,
      1};
  require(shape.batch <= 65535 || shared, Kind::Unsupported, "rope",
          "expected at most 65535 sequences with start positions, got ", shape.batch);
  require(shape.turned <= 4096 && shape.heads * shape.size * args.tokens_of_place < (1 << 30),
          Kind::Unsupported, "rope",
          "expected at most 4096 turned elements and 2^30 elements of a position, got ",
          shape.turned, " and ", shape.heads * shape.size * args.tokens_of_place);
  if (can_go_wide<T, kWide>(args)) {
    launch<T, kWide>(args, how, stream);
  } else {
    launch<T, 1>(args, how, stream);
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
