// What every host entry of the CUDA backend needs: checked calls, the device guard, the chip's
// size.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <string_view>

#include "core/tensor_view.h"

namespace te::cuda {

// Throws Kind::Runtime naming the op and the CUDA error.
void check(cudaError_t status, std::string_view op);

// Makes the tensor's device current for the length of a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

inline cudaStream_t stream_of(Stream s) { return static_cast<cudaStream_t>(s.handle); }

// Multiprocessors of the device, asked for once.
int multiprocessors(Device device);

// Something that each device needs once, such as a kernel's attributes. Two threads may both do it.
class OncePerDevice {
 public:
  template <class Do>
  void operator()(Device device, Do&& act) {
    auto& done = done_.at(static_cast<size_t>(device.index));
    if (done) return;
    act();
    done = true;
  }

 private:
  std::array<std::atomic<bool>, 64> done_{};
};

// Raises a kernel's dynamic shared memory limit when it needs more than 48 KiB.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, size_t bytes, std::string_view op) {
  if (bytes <= 48 * 1024) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        op);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace te::cuda
