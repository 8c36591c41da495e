// Tensors that one rank puts into memory of another rank of its host, which both have mapped.
//
// On CUDA copy engines move them, and streams wait for flags by memory operations: neither takes a
// multiprocessor, so a GEMM that runs meanwhile takes its usual time. On the CPU calls wait
// themselves. A sender has two slots at each receiver, in a ring of more than two ranks four. Two
// flags for each say whose turn it is, 32-bit words that are 0 or 1:
//   free     in memory of the sender: the receiver has read what was there before
//   arrived  in memory of the receiver: the tensor is there
// The sender clears `free` before it sends, and the receiver clears `arrived` before it sets
// `free`. The memory of a rank holds, in this order,
//   the slots, each with room for a tensor of each rank that sends to it, the nearest one first
//   free     [slots, ranks], 8 bytes each
//   arrived  [slots, ranks], 8 bytes each
// Calls may be recorded, and captured into CUDA graphs.
#pragma once

#include <vector>

#include "core/awaited_rank.h"
#include "core/tensor_view.h"
#include "ops/rows.h"

namespace te {

constexpr int kPeerSlots = 2;
constexpr int kRingSlots = 4;
constexpr int kPeerFlagBytes = 8;
constexpr int kAllOthers = -1;  // in place of a rank

// What a rank knows of its group: a tensor of int64 on the CPU, which persists. It has these
// fields, then the address of the memory of each rank, as mapped here.
enum class PeerField : int {
  Rank,
  Timeout,     // on the CPU: how long to wait for another rank, in milliseconds
  LockFile,    // on the CPU: rank r locks byte r as long as it lives; -1 if there is none
  LastStream,  // on CUDA: that has received last
  SendStream,  // on CUDA: a stream for sends alone
  Computed,    // on CUDA: an event, recorded when a tensor to send has been computed
  Sent,        // on CUDA: an event for each slot, recorded when its tensor has been sent
  Room = static_cast<int>(Sent) + kRingSlots,  // of a slot, in bytes
  Ring,  // 1: a rank sends to the next and the previous one alone; 0: to all others
  Addresses,
};

// Where to put a tensor, or to find it.
struct PeerTransfer {
  TensorView memory;  // uint8, of this rank
  TensorView group;   // int64, see PeerField
  int rank;           // the other one; or kAllOthers, except in a ring
  int slot;
};

// Waits for `free`, copies `x`, and sets `arrived`. On CUDA a stream of its own does, once the
// caller's stream has come here. `x` has rows of one distance, each of which is contiguous; they
// lie in the slot without gaps. All others get the same tensor, one after the other, beginning with
// the next rank.
void peer_send(const TensorView& x, const PeerTransfer& to, Stream stream);

// Sends `x`, which lies in a slot of this rank's own memory, to the same place in the memory of all
// others: each rank has a part of a tensor that lies across the slot. See peer_send.
void peer_spread(const TensorView& x, const TensorView& memory, const TensorView& group, int slot,
                 Stream stream);

// Waits for `arrived`: what follows on the stream may read the tensor.
void peer_receive(const PeerTransfer& from, Stream stream);

// Sums what all other ranks have sent to a slot. It waits for them, and releases the slot.
struct PeerSum {
  TensorView own;     // [..., cols], fp32/fp16/bf16, contiguous; what is sent is alike
  TensorView bias;    // [cols], the same dtype; may be absent
  TensorView out;     // like own: the sum, see ops/sum_parts.h
  TensorView memory;  // see PeerTransfer
  TensorView group;
  int slot;
};
void peer_sum(const PeerSum& sum, Stream stream);

// Copies what has arrived to `out`, which is contiguous. On CUDA the stream of sends does, once the
// caller's stream has come here; peer_finish waits for it.
void peer_copy(const TensorView& out, const PeerTransfer& from, Stream stream);

// Lets the sender write there again, once the stream has come here.
void peer_release(const PeerTransfer& from, Stream stream);

// Waits until the last tensor sent by way of `to.slot` has left, or its last copy is there.
void peer_finish(const PeerTransfer& to, Stream stream);

// How many slots a sender has.
int peer_slots(int ranks, bool ring);

// Bytes of the memory of each rank.
int64_t peer_memory_bytes(int ranks, int64_t room, bool ring);

// The offset in this rank's memory of what it has received.
int64_t peer_slot_offset(const PeerTransfer& from);

// A slot with its flags, as mapped here, and the rank at its other end.
struct PeerSlot {
  char* data;
  void* free;
  void* arrived;
  AwaitedRank other;
};
using PeerSlots = std::vector<PeerSlot>;

namespace cpu {
// `pitch`: of the rows at the receivers.
void peer_send(const Rows& rows, const PeerSlots& slots, int64_t pitch);
void peer_receive(const PeerSlots& slots);
void peer_copy(const Rows& out, const PeerSlot& slot);
void peer_release(const PeerSlots& slots);
}  // namespace cpu

namespace cuda {
struct PeerEvents {
  int64_t send_stream;
  int64_t computed;
  int64_t sent;
};
void peer_send(const Rows& rows, const PeerSlots& slots, int64_t pitch, const PeerEvents& events,
               Device device, Stream stream);
void peer_receive(const PeerSlots& slots, int64_t& last_stream, Device device, Stream stream);
void peer_copy(const Rows& out, const PeerSlot& slot, const PeerEvents& events, Device device,
               Stream stream);
void peer_release(const PeerSlots& slots, Device device, Stream stream);
void peer_finish(int64_t sent, Device device, Stream stream);
}  // namespace cuda

}  // namespace te
