// Bindings of peer_memory and copy, and the numbers by which Python lays out peer memory.
#include "bindings/bindings.h"
#include "bindings/recording.h"
#include "bindings/tensor_bridge.h"
#include "ops/copy.h"
#include "ops/peer_memory.h"

namespace te::bindings {
namespace {

Stream stream_of(const TensorView& x) { return bridge::current_stream(x.device); }

void send(const TensorView& x, const TensorView& memory, const TensorView& group, int rank,
          int slot) {
  peer_send(x, {memory, group, rank, slot}, stream_of(x));
}

void spread(const TensorView& x, const TensorView& memory, const TensorView& group, int slot) {
  peer_spread(x, memory, group, slot, stream_of(x));
}

void receive(const TensorView& memory, const TensorView& group, int rank, int slot) {
  peer_receive({memory, group, rank, slot}, stream_of(memory));
}

void sum(const TensorView& own, const TensorView& bias, const TensorView& out,
         const TensorView& memory, const TensorView& group, int slot) {
  peer_sum({.own = own, .bias = bias, .out = out, .memory = memory, .group = group, .slot = slot},
           stream_of(own));
}

void copy_received(const TensorView& out, const TensorView& memory, const TensorView& group,
                   int rank, int slot) {
  peer_copy(out, {memory, group, rank, slot}, stream_of(out));
}

void release(const TensorView& memory, const TensorView& group, int rank, int slot) {
  peer_release({memory, group, rank, slot}, stream_of(memory));
}

// `x` is the tensor that was sent or copied. It is an argument so that a recording keeps its memory
// until this call.
void finish(const TensorView& x, const TensorView& memory, const TensorView& group, int slot) {
  peer_finish({memory, group, kAllOthers, slot}, stream_of(x));
}

void copy_into(const TensorView& x, const TensorView& out) { copy(x, out, stream_of(x)); }

void zero_out(const TensorView& out) { zero(out, stream_of(out)); }

}  // namespace

void bind_peer_memory(pybind11::module_& m) {
  using pybind11::arg;
  const auto memory = arg("memory"), group = arg("group"), rank = arg("rank"), slot = arg("slot");
  m.def("peer_send", recordable<&send>, arg("x"), memory, group, rank, slot);
  m.def("peer_spread", recordable<&spread>, arg("x"), memory, group, slot);
  m.def("peer_receive", recordable<&receive>, memory, group, rank, slot);
  m.def("peer_sum", recordable<&sum>, arg("own"), arg("bias"), arg("out"), memory, group, slot);
  m.def("peer_copy", recordable<&copy_received>, arg("out"), memory, group, rank, slot);
  m.def("peer_release", recordable<&release>, memory, group, rank, slot);
  m.def("peer_finish", recordable<&finish>, arg("x"), memory, group, slot);
  m.def("peer_slots", &peer_slots, arg("ranks"), arg("ring"));
  m.def("peer_memory_bytes", &peer_memory_bytes, arg("ranks"), arg("room"), arg("ring"));
  m.def(
      "peer_slot_offset",
      [](const TensorView& group, int rank, int slot) {
        return peer_slot_offset({{}, group, rank, slot});
      },
      group, rank, slot);
  m.def("copy", recordable<&copy_into>, arg("x"), arg("out"));
  m.def("zero", recordable<&zero_out>, arg("out"));
}

}  // namespace te::bindings
