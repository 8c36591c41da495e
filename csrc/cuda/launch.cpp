#include "cuda/launch.h"

#include <array>
#include <atomic>

#include "cuda/runtime.h"

namespace te::cuda {

void check(cudaError_t status, std::string_view op) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();  // clears the non-sticky error, so that the next call is judged on its own
  fail(Kind::Runtime, op, "CUDA error ", cudaGetErrorName(status), ": ",
       cudaGetErrorString(status));
}

DeviceGuard::DeviceGuard(Device device) {
  int current = 0;
  check(cudaGetDevice(&current), "device guard");
  if (current == device.index) return;
  check(cudaSetDevice(device.index), "device guard");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

int multiprocessors(Device device) {
  constexpr size_t kMaxDevices = 64;
  static std::array<std::atomic<int>, kMaxDevices> cache{};
  auto& slot = cache.at(static_cast<size_t>(device.index));
  if (int known = slot; known != 0) return known;
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index),
        "multiprocessors");
  slot = count;
  return count;
}

bool built_with_cuda() { return true; }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

}  // namespace te::cuda
