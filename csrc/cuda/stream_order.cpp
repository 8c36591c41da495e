#include "cuda/stream_order.h"

#include "cuda/launch.h"

namespace te::cuda {

void follow_last_stream(int64_t& last, cudaStream_t stream, std::string_view op) {
  const auto handle = reinterpret_cast<int64_t>(stream);
  if (last == handle) return;
  cudaStreamCaptureStatus capture{};
  check(cudaStreamIsCapturing(stream, &capture), op);
  if (capture != cudaStreamCaptureStatusNone) return;
  cudaEvent_t event{};
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), op);
  check(cudaEventRecord(event, reinterpret_cast<cudaStream_t>(last)), op);
  check(cudaStreamWaitEvent(stream, event, 0), op);
  check(cudaEventDestroy(event), op);
  last = handle;
}

}  // namespace te::cuda
