// What every host entry of the CUDA backend needs: checked calls, the device guard, what the device
// has.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string_view>

#include "core/tensor_view.h"
#include "cuda/policy/device_limits.h"

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

// What the device has, less what is switched off; asked for once.
const DeviceLimits& device_limits(Device device);
const DeviceLimits& current_device_limits();
inline int multiprocessors(Device device) { return device_limits(device).multiprocessors; }

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

// Lets launches of a kernel ask for all shared memory that the device has for a block.
void allow_shared_memory(const void* kernel, Device device, std::string_view op);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace te::cuda
