// Tensors that one GPU puts into memory of another GPU of this host, which both have mapped.
//
// Copy engines move them, and streams wait for flags by memory operations: neither takes a
// multiprocessor, so a GEMM that runs meanwhile takes its usual time. A sender has room for one
// tensor at a receiver. Two flags say whose turn it is, 32-bit words that are 0 or 1:
//   free     in memory of the sender: the receiver has read what was there before
//   arrived  in memory of the receiver: the tensor is there
// Who waits for a flag clears it. All of this may be captured into CUDA graphs.
#pragma once

#include "core/tensor_view.h"

namespace te {

struct PeerSendArgs {
  TensorView x;  // on CUDA; rows of one distance, each of which is contiguous
  void* to;      // x.bytes() in memory of the receiver, of rows without gaps
  void* free;
  void* arrived;
};

// Waits for `free`, copies, and sets `arrived`.
void peer_send(const PeerSendArgs& args, Stream stream);

// Waits for `arrived`: what follows on the stream may read the tensor.
void peer_receive(Device device, void* arrived, Stream stream);

// Sets `free` once the stream has come here.
void peer_release(Device device, void* free, Stream stream);

namespace cuda {
void peer_send(const PeerSendArgs& args, int64_t row_bytes, int64_t pitch, Stream stream);
void peer_receive(Device device, void* arrived, Stream stream);
void peer_release(Device device, void* free, Stream stream);
}  // namespace cuda

}  // namespace te
