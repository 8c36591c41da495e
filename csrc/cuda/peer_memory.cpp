#include "ops/peer_memory.h"

#include <cuda.h>

#include "cuda/dynlib.h"
#include "cuda/launch.h"
#include "cuda/stream_order.h"

namespace te::cuda {
namespace {

// The driver's memory operations of streams; the runtime has none.
struct Driver {
  DynamicLibrary library{"CUDA", "libcuda.so.1"};
  CUresult (*wait)(CUstream, CUdeviceptr, cuuint32_t,
                   unsigned) = library.find("cuStreamWaitValue32_v2");
  CUresult (*write)(CUstream, CUdeviceptr, cuuint32_t,
                    unsigned) = library.find("cuStreamWriteValue32_v2");
};

const Driver& driver() {
  static const auto* driver = new Driver;
  return *driver;
}

void check(CUresult status) {
  require(status == CUDA_SUCCESS, Kind::Runtime, "peer_memory", "CUDA driver error ",
          static_cast<int>(status));
}

CUdeviceptr address(void* flag) { return reinterpret_cast<CUdeviceptr>(flag); }

void set(cudaStream_t stream, void* flag) {
  check(driver().write(stream, address(flag), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
}

void wait_and_clear(cudaStream_t stream, void* flag) {
  check(driver().wait(stream, address(flag), 1, CU_STREAM_WAIT_VALUE_EQ));
  check(driver().write(stream, address(flag), 0, CU_STREAM_WRITE_VALUE_DEFAULT));
}

cudaEvent_t event_of(int64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }

}  // namespace

void peer_send(const Rows& rows, const PeerSlot& slot, const PeerEvents& events, Device device,
               Stream stream) {
  const DeviceGuard guard(device);
  const auto sends = reinterpret_cast<cudaStream_t>(events.send_stream);
  check(cudaEventRecord(event_of(events.computed), stream_of(stream)), "peer_send");
  check(cudaStreamWaitEvent(sends, event_of(events.computed), 0), "peer_send");
  wait_and_clear(sends, slot.free);
  const auto bytes = static_cast<size_t>(rows.bytes), pitch = static_cast<size_t>(rows.pitch);
  const auto count = static_cast<size_t>(rows.count);
  check(rows.count == 1 ? cudaMemcpyAsync(slot.data, rows.data, bytes, cudaMemcpyDefault, sends)
                        : cudaMemcpy2DAsync(slot.data, bytes, rows.data, pitch, bytes, count,
                                            cudaMemcpyDefault, sends),
        "peer_send");
  set(sends, slot.arrived);
  check(cudaEventRecord(event_of(events.sent), sends), "peer_send");
}

void peer_receive(void* arrived, int64_t& last_stream, Device device, Stream stream) {
  const DeviceGuard guard(device);
  follow_last_stream(last_stream, stream_of(stream), "peer_receive");
  wait_and_clear(stream_of(stream), arrived);
}

void peer_release(void* free, Device device, Stream stream) {
  const DeviceGuard guard(device);
  set(stream_of(stream), free);
}

void peer_finish(int64_t sent, Device device, Stream stream) {
  const DeviceGuard guard(device);
  check(cudaStreamWaitEvent(stream_of(stream), event_of(sent), 0), "peer_finish");
}

}  // namespace te::cuda
