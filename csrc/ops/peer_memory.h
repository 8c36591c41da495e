// Point-to-point transfers between ranks of one host: the sender copies a tensor into memory of the
// receiver, which both have mapped.
//
// On CUDA, copy engines move the data, and streams wait for flags by memory operations of the
// driver. Neither occupies a multiprocessor, so a GEMM can run at the same time. On the CPU, the
// calling thread waits. A sender has two slots at each receiver (four in a ring of more than two
// ranks). Each slot has two flags, 32-bit words that are 0 or 1, for the handshake:
//   free     in memory of the sender: the receiver has read the previous tensor
//   arrived  in memory of the receiver: the tensor has been written
// The sender clears `free` before it sends, and the receiver clears `arrived` before it sets
// `free`. The memory of a rank holds, in this order,
//   the slots, each with room for a tensor of each sender, the nearest sender first
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
constexpr int kAllOthers = -1;  // in place of a rank: all other ranks

// The description of a group at one of its ranks, stored in a persistent int64 tensor on the CPU:
// these fields, then the address of the memory of each rank, as mapped here.
enum class PeerField : int {
  Rank,
  Timeout,     // on the CPU: how long to wait for another rank, in milliseconds
  LockFile,    // on the CPU: rank r has byte r locked while it lives; -1: no such file
  LastStream,  // on CUDA: the stream that received last
  SendStream,  // on CUDA: a stream on which tensors are sent, and nothing else is computed
  Computed,    // on CUDA: an event, recorded when a tensor to send has been computed
  Sent,        // on CUDA: an event for each slot, recorded when its tensor has been sent
  Room = static_cast<int>(Sent) + kRingSlots,  // bytes of a slot for each sender
  Ring,       // 1: a rank sends only to the next and the previous one; 0: to all others
  Addresses,  // the first of the addresses
};

// The other rank of a transfer, and the slot.
struct PeerTransfer {
  TensorView memory;  // uint8, of this rank
  TensorView group;   // int64, see PeerField
  int rank;           // the other rank; or kAllOthers, except in a ring
  int slot;
};

// Waits for `free`, copies `x`, and sets `arrived`. On CUDA this happens on the stream of sends,
// after all previous work of the caller's stream. `x` consists of contiguous rows at equal
// distances, which lie in the slot without gaps. With kAllOthers, all other ranks get `x`, one
// after the other, beginning with the next rank.
void peer_send(const TensorView& x, const PeerTransfer& to, Stream stream);

// Sends `x`, which lies in a slot of this rank's own memory, to the same place in the memory of all
// other ranks, like peer_send. So a tensor of which each rank has computed a part becomes whole in
// the slot of every rank.
void peer_spread(const TensorView& x, const TensorView& memory, const TensorView& group, int slot,
                 Stream stream);

// Waits for `arrived`: later work on the stream may read the tensor.
void peer_receive(const PeerTransfer& from, Stream stream);

// Waits for the tensors of all other ranks in a slot, adds them to this rank's, and releases the
// slot.
struct PeerSum {
  TensorView own;   // [..., cols], fp32/fp16/bf16, contiguous; others send the same shape and dtype
  TensorView bias;  // [cols], the same dtype; may be absent
  TensorView out;   // like own: the sum, see ops/sum_parts.h
  TensorView memory;  // see PeerTransfer
  TensorView group;
  int slot;
};
void peer_sum(const PeerSum& sum, Stream stream);

// Copies the tensor that has arrived to `out`, which is contiguous. On CUDA this happens on the
// stream of sends, after all previous work of the caller's stream; peer_finish waits for it.
void peer_copy(const TensorView& out, const PeerTransfer& from, Stream stream);

// Lets the sender write to the slot again, after all previous work of the stream.
void peer_release(const PeerTransfer& from, Stream stream);

// Waits until the last peer_send, peer_spread or peer_copy with `to.slot` has been completed.
void peer_finish(const PeerTransfer& to, Stream stream);

// The number of slots that a sender has at each receiver.
int peer_slots(int ranks, bool ring);

// The number of bytes of the memory of each rank.
int64_t peer_memory_bytes(int ranks, int64_t room, bool ring);

// The offset, in this rank's memory, at which the tensor of `from.rank` arrives.
int64_t peer_slot_offset(const PeerTransfer& from);

// The place of one sender in a slot with its flags, as mapped here, and the other rank.
struct PeerSlot {
  char* data;
  void* free;
  void* arrived;
  AwaitedRank other;
};
using PeerSlots = std::vector<PeerSlot>;

namespace cpu {
// `pitch`: the distance of rows at the receivers, in bytes.
void peer_send(const Rows& rows, const PeerSlots& slots, int64_t pitch);
void peer_receive(const PeerSlots& slots);
void peer_copy(const Rows& out, const PeerSlot& slot);
void peer_release(const PeerSlots& slots);
}  // namespace cpu

namespace cuda {
// The handles of a stream and of two events of the group, see PeerField.
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
