// The switch by device that ends every ops/x.cpp.
#pragma once

#include "core/tensor_view.h"

namespace te {

template <class OnCpu, class OnCuda>
void on_device(const TensorView& like, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  if (like.device.type == DeviceType::CPU) return on_cpu();
  on_cuda();
}

}  // namespace te
