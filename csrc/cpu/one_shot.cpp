// The CPU backend of one_shot, between processes or threads of one host: see ops/one_shot.h. The
// calling thread does all the work, so it uses only the flags of block 0.
#include "ops/one_shot.h"

#include <atomic>
#include <cmath>
#include <cstring>

#include "cpu/rank_wait.h"

namespace te::cpu {
namespace {

uint32_t* calls(const OneShotPiece& piece, int rank) {
  return reinterpret_cast<uint32_t*>(piece.group.addresses[rank]);
}

// The number of the last call whose data `sender` has written to `receiver`.
std::atomic_ref<uint32_t> arrived(const OneShotPiece& piece, int receiver, int sender) {
  return std::atomic_ref<uint32_t>(calls(piece, receiver)[kOneShotBlocks * (1 + sender)]);
}

char* slot(const OneShotPiece& piece, int receiver, uint32_t call) {
  return reinterpret_cast<char*>(piece.group.addresses[receiver]) + one_shot_header(piece.ranks) +
         piece.slot_bytes * (call % 2);
}

void wait_for(const OneShotPiece& piece, int sender, uint32_t call) {
  const auto flag = arrived(piece, static_cast<int>(piece.group.rank), sender);
  const auto there = [&] {
    return static_cast<int32_t>(flag.load(std::memory_order_acquire) - call) >= 0;
  };
  wait_for_rank({sender, piece.group.timeout, piece.group.lock_file}, "one_shot", there);
}

template <class T>
float combined(Combine how, float a, T b) {
  return how == Combine::Sum ? a + static_cast<float>(b) : std::fmax(a, static_cast<float>(b));
}

// Combines the parts in the order of ranks, so that all ranks get the same bits.
template <class T>
void combine(const OneShotPiece& piece, const char* const (&parts)[kOneShotMostRanks]) {
  auto* out = reinterpret_cast<T*>(piece.out);
  const auto part = [&](int rank) { return reinterpret_cast<const T*>(parts[rank]); };
  for (int64_t i = 0; i < piece.bytes / static_cast<int64_t>(sizeof(T)); ++i) {
    float value = static_cast<float>(part(0)[i]);
    for (int rank = 1; rank < piece.ranks; ++rank)
      value = combined(piece.combine, value, part(rank)[i]);
    out[i] = T(value);
  }
}

}  // namespace

void one_shot(const OneShotPiece& piece) {
  const int rank = static_cast<int>(piece.group.rank);
  const auto bytes = static_cast<size_t>(piece.bytes);
  const uint32_t call = calls(piece, rank)[0] + 1;
  calls(piece, rank)[0] = call;
  const char* parts[kOneShotMostRanks] = {};
  for (int other = 0; other < piece.ranks; ++other) {
    parts[other] = piece.x + piece.x_stride * other;
    if (other == rank) continue;
    std::memcpy(slot(piece, other, call) + piece.place(rank, other), parts[other], bytes);
    arrived(piece, other, rank).store(call, std::memory_order_release);
    parts[other] = slot(piece, rank, call) + piece.place(other, rank);
  }
  for (int other = 0; other < piece.ranks; ++other)
    if (other != rank) wait_for(piece, other, call);
  if (piece.combine != Combine::Concatenate)
    return dispatch_high_precision(piece.dtype, "one_shot", [&](auto tag) {
      combine<typename decltype(tag)::type>(piece, parts);
    });
  for (int other = 0; other < piece.ranks; ++other) {
    char* const to = piece.out + piece.out_stride * other;
    if (to != parts[other]) std::memcpy(to, parts[other], bytes);
  }
}

}  // namespace te::cpu
