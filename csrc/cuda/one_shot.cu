// One-shot collectives through peer memory (ops/one_shot.h). A write to another GPU does not wait
// for it, a read would. So each rank writes its data to the memory of the other ranks, and reads
// only from its own memory. In a block some threads send, some combine what has arrived, and one
// warp sets flags on the other GPUs to tell what has been sent. All this is done in several rounds,
// with a flag value for each.
#include "ops/one_shot.h"

#include <algorithm>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/pack_io.cuh"
#include "cuda/device/system_flags.cuh"
#include "cuda/stream_order.h"

namespace te::cuda {
namespace {

constexpr int kGroup = 256;  // threads that send, and as many that receive
constexpr int kWarp = 32;
constexpr int kThreads = 2 * kGroup + kWarp;
constexpr int kInFlight = 4;  // packs that a thread loads before it uses the first
constexpr int kMostRounds = 4;
constexpr int kPollsPerLook = 1 << 10;
constexpr int64_t kNanosecondsPerMillisecond = 1'000'000;

struct Call {
  OneShotPiece piece;
  int64_t packs;  // packs of a part
  int rank;

  __device__ __forceinline__ uint32_t* calls(int of) const {
    return reinterpret_cast<uint32_t*>(piece.group.addresses[of]) + blockIdx.x;
  }
  // The flag by which `sender` tells `receiver` how many rounds of which call it has sent for this
  // block (flag_of).
  __device__ __forceinline__ uint32_t* arrived(int receiver, int sender) const {
    return calls(receiver) + kOneShotBlocks * (1 + sender);
  }
  // Where `sender` writes its data for `receiver`. Calls use two slots in turn.
  __device__ __forceinline__ char* slot(int receiver, int sender, uint32_t call) const {
    return reinterpret_cast<char*>(piece.group.addresses[receiver]) + one_shot_header(piece.ranks) +
           piece.slot_bytes * (call % 2) + piece.place(sender, receiver);
  }
  // The other ranks; each rank begins with the one after it.
  __device__ __forceinline__ int other(int step) const { return (rank + step) % piece.ranks; }
};

// A range of packs of a part.
struct Span {
  int64_t first, last;

  // Calls `load(k, pack)` for some packs, then `use(k, pack)`. A group of threads divides the
  // range.
  template <class Load, class Use>
  __device__ __forceinline__ void each_pack(const Load& load, const Use& use) const {
    for (int64_t begin = first + threadIdx.x % kGroup; begin < last; begin += kInFlight * kGroup) {
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (begin + k * kGroup < last) load(k, begin + k * kGroup);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (begin + k * kGroup < last) use(k, begin + k * kGroup);
    }
  }
};

// The packs of a part that a block handles, in one or several rounds.
struct Rounds {
  int64_t first, last, each;
  int count;

  __device__ explicit Rounds(int64_t packs) {
    const int64_t of_block = (packs + kOneShotBlocks - 1) / kOneShotBlocks;
    first = min(packs, blockIdx.x * of_block);
    last = min(packs, first + of_block);
    each = max((of_block + kMostRounds - 1) / kMostRounds, int64_t{kInFlight} * kGroup);
    count = static_cast<int>((last - first + each - 1) / each);
  }
  __device__ __forceinline__ Span span(int round) const {
    const int64_t begin = first + round * each;
    return {begin, min(last, begin + each)};
  }
};

// Named barriers of a block: one for each round and kind, with numbers after that of __syncthreads
// (0). All lanes of a warp call them together.
template <int kKind, int kMembers>
struct RoundBarrier {
  static __device__ __forceinline__ void arrive(int round) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(number(round)), "n"(kMembers) : "memory");
  }
  static __device__ __forceinline__ void wait(int round) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(number(round)), "n"(kMembers) : "memory");
  }

 private:
  static __device__ __forceinline__ int number(int round) {
    return 1 + kKind * kMostRounds + round;
  }
};
using Sent = RoundBarrier<0, kGroup + kWarp>;
using Read = RoundBarrier<1, 2 * kGroup>;  // x may be overwritten: out may be the same memory

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ void wait_for(const uint32_t* flag, uint32_t call, int64_t timeout) {
  const int64_t deadline = nanoseconds() + timeout;
  for (int polls = 1; static_cast<int32_t>(load_acquire(flag) - call) < 0; ++polls)
    if (polls % kPollsPerLook == 0 && nanoseconds() > deadline) __trap();
}

template <class T, int V>
__device__ __forceinline__ void copy(const Span& span, const char* from, char* to) {
  const auto* source = reinterpret_cast<const T*>(from);
  auto* const target = reinterpret_cast<T*>(to);
  Pack<T, V> packs[kInFlight];
  span.each_pack([&](int k, int64_t i) { packs[k] = load_pack_here<T, V>(source + i * V); },
                 [&](int k, int64_t i) { store_pack_global(target + i * V, packs[k]); });
}

template <Combine kHow, class T, int V>
__device__ __forceinline__ void add(const Pack<T, V>& pack, float (&values)[V]) {
  float more[V];
  widen(pack, more);
#pragma unroll
  for (int j = 0; j < V; ++j)
    values[j] = kHow == Combine::Sum ? values[j] + more[j] : fmaxf(values[j], more[j]);
}

// Combines parts in the order of ranks, so that all ranks get the same bits. The parts of the first
// two ranks are loaded at once.
template <class T, int V, Combine kHow>
__device__ __forceinline__ void combine(const Span& span, const Call& at, uint32_t call) {
  auto* const out = reinterpret_cast<T*>(at.piece.out);
  const auto part = [&](int rank) {
    const char* from =
        rank == at.rank ? at.piece.x + at.piece.x_stride * rank : at.slot(at.rank, rank, call);
    return reinterpret_cast<const T*>(from);
  };
  Pack<T, V> first[kInFlight], second[kInFlight];
  const auto load = [&](int k, int64_t i) {
    first[k] = load_pack_here<T, V>(part(0) + i * V);
    second[k] = load_pack_here<T, V>(part(1) + i * V);
  };
  span.each_pack(load, [&](int k, int64_t i) {
    float values[V];
    widen(first[k], values);
    add<kHow>(second[k], values);
    for (int rank = 2; rank < at.piece.ranks; ++rank)
      add<kHow>(load_pack_here<T, V>(part(rank) + i * V), values);
    store_pack_global(out + i * V, narrow<T, V>(values));
  });
}

// The value of a flag once `rounds` rounds of a call have arrived.
__device__ __forceinline__ uint32_t flag_of(uint32_t call, int rounds) {
  return call * kMostRounds + rounds;
}

template <class T, int V>
__device__ __forceinline__ void send(const Call& at, const Rounds& rounds, uint32_t call) {
  for (int round = 0; round < rounds.count; ++round) {
    for (int step = 1; step < at.piece.ranks; ++step) {
      const int to = at.other(step);
      copy<T, V>(rounds.span(round), at.piece.x + at.piece.x_stride * to,
                 at.slot(to, at.rank, call));
    }
    Sent::arrive(round);
    Read::arrive(round);
  }
}

// Sets the flags of the other ranks. A separate warp does this, because the fence takes as long as
// a write to another GPU; the senders go on meanwhile.
__device__ __forceinline__ void tell_others(const Call& at, const Rounds& rounds, uint32_t call) {
  const int step = 1 + threadIdx.x % kWarp;
  for (int round = 0; round < rounds.count; ++round) {
    Sent::wait(round);
    if (step < at.piece.ranks) {
      __threadfence_system();
      store_release(at.arrived(at.other(step), at.rank), flag_of(call, round + 1));
    }
  }
}

template <class T, int V, Combine kHow>
__device__ __forceinline__ void receive(const Call& at, const Rounds& rounds, uint32_t call) {
  const OneShotPiece& piece = at.piece;
  const int thread = threadIdx.x - kGroup;
  const auto place = [&](int rank) { return piece.out + piece.out_stride * rank; };
  for (int round = 0; round < rounds.count; ++round) {
    const Span span = rounds.span(round);
    if constexpr (kHow == Combine::Concatenate)  // while the others' data arrives
      copy<T, V>(span, piece.x + piece.x_stride * at.rank, place(at.rank));
    if (thread < piece.ranks - 1)
      wait_for(at.arrived(at.rank, at.other(thread + 1)), flag_of(call, round + 1),
               piece.group.timeout * kNanosecondsPerMillisecond);
    Read::wait(round);
    if (round + 1 == rounds.count) admit_next_kernel();
    if constexpr (kHow == Combine::Concatenate) {
      for (int step = 1; step < piece.ranks; ++step)
        copy<T, V>(span, at.slot(at.rank, at.other(step), call), place(at.other(step)));
    } else {
      combine<T, V, kHow>(span, at, call);
    }
  }
}

template <class T, int V, Combine kHow>
__global__ void __launch_bounds__(kThreads) one_shot_kernel(const __grid_constant__ Call at) {
  await_previous_kernel();
  uint32_t* const calls = at.calls(at.rank);
  const uint32_t call = *calls + 1;
  const Rounds rounds(at.packs);
  if (threadIdx.x < kGroup)
    send<T, V>(at, rounds, call);
  else if (threadIdx.x < 2 * kGroup)
    receive<T, V, kHow>(at, rounds, call);
  else
    tell_others(at, rounds, call);
  __syncthreads();
  if (threadIdx.x == 0) *calls = call;
}

template <class T, Combine kHow>
void launch(const OneShotPiece& piece, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const auto whole = [](int64_t bytes) { return bytes % 16 == 0; };
  const bool wide = whole(piece.bytes) && whole(piece.x_stride) && whole(piece.out_stride) &&
                    is_aligned(piece.x, 16) && is_aligned(piece.out, 16);
  const Call call{.piece = piece,
                  .packs = piece.bytes / (wide ? 16 : static_cast<int64_t>(sizeof(T))),
                  .rank = static_cast<int>(piece.group.rank)};
  launch_dependent(wide ? one_shot_kernel<T, kWide, kHow> : one_shot_kernel<T, 1, kHow>,
                   kOneShotBlocks, kThreads, 0, stream, call);
}

template <Combine kHow>
void combine(const OneShotPiece& piece, cudaStream_t stream) {
  dispatch_high_precision(piece.dtype, "one_shot", [&](auto tag) {
    launch<typename decltype(tag)::type, kHow>(piece, stream);
  });
}

// Concatenates bytes, as the widest elements that their number and addresses allow.
void concatenate(const OneShotPiece& piece, cudaStream_t stream) {
  const auto places = static_cast<uint64_t>(piece.bytes | piece.x_stride | piece.out_stride) |
                      reinterpret_cast<uintptr_t>(piece.x) | reinterpret_cast<uintptr_t>(piece.out);
  if (places % 4 == 0) return launch<float, Combine::Concatenate>(piece, stream);
  if (places % 2 == 0) return launch<uint16_t, Combine::Concatenate>(piece, stream);
  launch<uint8_t, Combine::Concatenate>(piece, stream);
}

}  // namespace

void one_shot(const OneShotPiece& piece, Device device, int64_t& last_stream, Stream stream) {
  const DeviceGuard guard(device);
  const cudaStream_t handle = stream_of(stream);
  // Calls use two slots in turn, so they must run one after the other.
  follow_last_stream(last_stream, handle, "one_shot");
  switch (piece.combine) {
    case Combine::Concatenate: return concatenate(piece, handle);
    case Combine::Sum: return combine<Combine::Sum>(piece, handle);
    case Combine::Max: return combine<Combine::Max>(piece, handle);
  }
}

}  // namespace te::cuda
