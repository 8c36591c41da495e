// What every host function of the CUDA backend needs: checked calls, a device guard, and the limits
// of the device.
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

// The limits of a device, without what is switched off. The driver is asked once per device.
const DeviceLimits& device_limits(Device device);
const DeviceLimits& current_device_limits();
inline int multiprocessors(Device device) { return device_limits(device).multiprocessors; }

// Runs something once per device, such as setting a kernel's attributes. Two threads may both run
// it, so it must do no harm to repeat it.
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
  std::array<std::atomic<bool>, kMaxDevices> done_{};
};

// Keeps what the driver answers for each device and number below kNumbers, such as how many
// clusters of that size a kernel runs at once. Two threads may both ask. An answer of 0 is not
// kept.
template <size_t kNumbers>
class AskedOncePerDevice {
 public:
  template <class Ask>
  int operator()(Device device, int number, Ask&& ask) {
    auto& of_device = known_.at(static_cast<size_t>(device.index));
    auto& known = of_device.at(static_cast<size_t>(number));
    int answer = known;
    if (answer == 0) known = answer = ask();
    return answer;
  }

 private:
  std::array<std::array<std::atomic<int>, kNumbers>, kMaxDevices> known_{};
};

// Lets launches of a kernel ask for all shared memory that the device has for a block.
void allow_shared_memory(const void* kernel, Device device, std::string_view op);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace te::cuda
