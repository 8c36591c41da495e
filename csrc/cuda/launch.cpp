#include "cuda/launch.h"

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

bool built_with_cuda() { return true; }

void relax_captures() {
  auto mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "relax_captures");
}

}  // namespace te::cuda
