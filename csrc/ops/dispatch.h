// The choice of the backend by the device of a tensor, with which each op ends after its checks.
#pragma once

#include "core/tensor_view.h"

namespace te {

template <class OnCpu, class OnCuda>
void on_device(const TensorView& like, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  if (like.device.type == DeviceType::CPU) return on_cpu();
  on_cuda();
}

// For backends that take the same arguments.
template <auto kOnCpu, auto kOnCuda, class Args>
void on_device(const TensorView& like, const Args& args, Stream stream) {
  on_device(
      like, [&] { kOnCpu(args); }, [&] { kOnCuda(args, stream); });
}

}  // namespace te
