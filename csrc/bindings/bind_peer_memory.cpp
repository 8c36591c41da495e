// Bindings of peer_memory: streams and addresses are integers, as torch gives them.
#include "bindings/bindings.h"
#include "bindings/tensor_bridge.h"
#include "ops/peer_memory.h"

namespace te::bindings {
namespace {

void* at(uintptr_t address) { return reinterpret_cast<void*>(address); }

Device cuda_device(int index) { return {DeviceType::CUDA, index}; }

}  // namespace

void bind_peer_memory(pybind11::module_& m) {
  using pybind11::arg;
  m.def(
      "peer_send",
      [](const TensorView& x, uintptr_t to, uintptr_t free, uintptr_t arrived, uintptr_t stream) {
        peer_send({.x = x, .to = at(to), .free = at(free), .arrived = at(arrived)}, {at(stream)});
      },
      arg("x"), arg("to"), arg("free"), arg("arrived"), arg("stream"));
  m.def(
      "peer_receive",
      [](int device, uintptr_t arrived, uintptr_t stream) {
        peer_receive(cuda_device(device), at(arrived), {at(stream)});
      },
      arg("device"), arg("arrived"), arg("stream"));
  m.def(
      "peer_release",
      [](int device, uintptr_t free, uintptr_t stream) {
        peer_release(cuda_device(device), at(free), {at(stream)});
      },
      arg("device"), arg("free"), arg("stream"));
}

}  // namespace te::bindings
