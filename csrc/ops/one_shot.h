// One-shot collectives (all-gather, reduce-scatter, all-reduce, all-to-all) for small tensors,
// among ranks of one host that have mapped each other's memory. A rank writes data directly to the
// memory of the other ranks, waits until they have written to its own memory, and combines what has
// arrived. This is one kernel on the caller's stream, so calls may be recorded, and captured into
// CUDA graphs.
//
// The memory of a rank holds, in this order,
//   calls    uint32 [kOneShotBlocks]: the number of calls so far
//   arrived  uint32 [ranks, kOneShotBlocks]: the progress of each other rank: the number of the
//            last call whose data it has written here (on CUDA also that of rounds in this call)
//   two slots for data, used in turn, each with room for a part from each other rank
// Block b of the kernel handles the same bytes of every part on all ranks, so it waits only for
// block b of the other ranks. Two slots are enough: a rank that begins call n + 2 has received data
// of call n + 1 from all ranks, and these had read their slot of call n before they sent it.
#pragma once

#include "core/hd.h"
#include "core/tensor_view.h"

namespace te {

constexpr int kOneShotBlocks = 64;
constexpr int kOneShotMostRanks = 8;

enum class Combine : int { Concatenate, Sum, Max };

// The description of a group at one of its ranks, stored in a persistent int64 tensor on the CPU.
struct OneShotGroup {
  int64_t rank;
  int64_t timeout;      // in milliseconds: how long to wait for another rank
  int64_t lock_file;    // on the CPU: rank r has byte r locked while it lives; -1: no such file
  int64_t last_stream;  // on CUDA: the stream of the last call, which the next call waits for
  int64_t addresses[kOneShotMostRanks];  // of the memory of each rank, as mapped here
};

constexpr int kOneShotLastStream = 3;   // the index of last_stream
constexpr int kOneShotGroupFields = 4;  // the number of fields before the addresses

struct OneShotArgs {
  TensorView x;       // contiguous; with `scatters`, one part for each rank along the first axis
  TensorView out;     // like a part of x; with Concatenate, a part from each rank. May be x itself.
  TensorView memory;  // uint8, of this rank
  TensorView group;   // int64 [kOneShotGroupFields + ranks], see OneShotGroup
  bool scatters;      // rank r gets part r of x; else every rank gets all of x
  Combine combine;    // Concatenate: any dtype. Else fp32/fp16/bf16, combined in fp32, rounded once
};

// On the CPU, returns when the data of all ranks has arrived, and throws if another rank has ended
// or its data does not arrive in time. On CUDA, the kernel traps if data does not arrive in time.
void one_shot(const OneShotArgs& args, Stream stream);

// Bytes of a rank's memory before its slots.
TE_HD constexpr int64_t one_shot_header(int ranks) {
  const int64_t bytes = int64_t{4} * kOneShotBlocks * (1 + ranks);
  return (bytes + 511) / 512 * 512;
}

// A piece of a call: some bytes of every part, at most as many as a slot has room for. Larger parts
// take several pieces, one after the other.
struct OneShotPiece {
  OneShotGroup group;
  int ranks;
  DType dtype;
  Combine combine;
  const char* x;
  char* out;
  int64_t bytes;       // of each part, in this piece
  int64_t x_stride;    // bytes from the part for one rank to that for the next; 0: all get the same
  int64_t out_stride;  // bytes from the part of one rank to that of the next; 0: they are combined
  int64_t slot_bytes;
  int64_t room;  // bytes for one part in a slot

  // The offset in a slot of `receiver` at which `sender` writes.
  TE_HD int64_t place(int sender, int receiver) const {
    const int distance = (sender - receiver + ranks) % ranks;
    return (distance - 1) * room;
  }
};

namespace cpu {
void one_shot(const OneShotPiece& piece);
}
namespace cuda {
// `last_stream` is the field of the group, which the call updates.
void one_shot(const OneShotPiece& piece, Device device, int64_t& last_stream, Stream stream);
}  // namespace cuda

}  // namespace te
