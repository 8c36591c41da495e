// One-shot collectives: a rank writes what others get directly to their memory, which all ranks of
// a host map, waits until they have written to its own, and combines what it finds there. That is
// one kernel on the caller's stream, so calls may be recorded, and captured into CUDA graphs.
//
// The memory of a rank holds, in this order,
//   calls    uint32 [kOneShotBlocks]: how many calls there have been
//   arrived  uint32 [ranks, kOneShotBlocks]: how far another rank has come: the last call whose
//            data it has written, or that and how much of it
//   two slots for data, used in turn: room for a part from each other rank
// A block of a kernel deals with the same bytes of all parts on all ranks, and waits for that block
// of the other ranks alone. Two slots are enough: who begins call n + 2 has seen all ranks in call
// n + 1, and they had read what they got in call n.
#pragma once

#include "core/hd.h"
#include "core/tensor_view.h"

namespace te {

constexpr int kOneShotBlocks = 64;
constexpr int kOneShotMostRanks = 8;

enum class Combine : int { Concatenate, Sum, Max };

// What a rank knows of its group: a tensor of int64 on the CPU, which persists.
struct OneShotGroup {
  int64_t rank;
  int64_t timeout;      // in milliseconds: how long to wait for another rank
  int64_t lock_file;    // on the CPU: rank r locks byte r as long as it lives; -1 if there is none
  int64_t last_stream;  // on CUDA: of the last call, so that the next one follows it
  int64_t addresses[kOneShotMostRanks];  // of the memory of each rank, as mapped here
};

constexpr int kOneShotLastStream = 3;   // the number of that field
constexpr int kOneShotGroupFields = 4;  // before the addresses

struct OneShotArgs {
  TensorView x;       // contiguous; with `scatters` one part for each rank, along the first axis
  TensorView out;     // one part of x; with Concatenate a part from each rank. May be x itself.
  TensorView memory;  // uint8, of this rank
  TensorView group;   // int64 [kOneShotGroupFields + ranks], see OneShotGroup
  bool scatters;      // rank r gets part r of x; else all of x
  Combine combine;    // Concatenate: any dtype. Else fp32/fp16/bf16, combined in fp32, rounded once
};

// On the CPU it returns when all ranks have come. Fails there if another rank ended, or did not
// come in time; on CUDA the kernel traps if one did not come in time.
void one_shot(const OneShotArgs& args, Stream stream);

// Bytes of a rank's memory before its slots.
TE_HD constexpr int64_t one_shot_header(int ranks) {
  const int64_t bytes = int64_t{4} * kOneShotBlocks * (1 + ranks);
  return (bytes + 511) / 512 * 512;
}

// Some bytes of every part, as many as a slot has room for.
struct OneShotPiece {
  OneShotGroup group;
  int ranks;
  DType dtype;
  Combine combine;
  const char* x;
  char* out;
  int64_t bytes;       // of each part, in this piece
  int64_t x_stride;    // from the part of one rank to that of the next; 0 if all get the same
  int64_t out_stride;  // likewise
  int64_t slot_bytes;
  int64_t room;  // for a part, in a slot

  // Where `sender` writes in the memory of `receiver`, from the first byte of a slot on.
  TE_HD int64_t place(int sender, int receiver) const {
    const int distance = (sender - receiver + ranks) % ranks;
    return (distance - 1) * room;
  }
};

namespace cpu {
void one_shot(const OneShotPiece& piece);
}
namespace cuda {
// `last_stream` is that of the group.
void one_shot(const OneShotPiece& piece, Device device, int64_t& last_stream, Stream stream);
}  // namespace cuda

}  // namespace te
