#include "ops/peer_memory.h"

#include <cuda.h>

#include <utility>

#include "cuda/dynlib.h"
#include "cuda/launch.h"
#include "cuda/stream_order.h"

namespace te::cuda {
namespace {

using MemoryOperation = CUstreamBatchMemOpParams;

// The driver's memory operations of streams; the runtime has none.
struct Driver {
  DynamicLibrary library{"CUDA", "libcuda.so.1"};
  CUresult (*run)(CUstream, unsigned, MemoryOperation*,
                  unsigned) = library.find("cuStreamBatchMemOp_v2");
};

const Driver& driver() {
  static const auto* driver = new Driver;
  return *driver;
}

CUdeviceptr address(void* flag) { return reinterpret_cast<CUdeviceptr>(flag); }

MemoryOperation wait_for(void* flag) {
  MemoryOperation operation{};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = address(flag);
  operation.waitValue.value = 1;
  operation.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  return operation;
}

// After all that the stream has written.
MemoryOperation write(void* flag, uint32_t value) {
  MemoryOperation operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = address(flag);
  operation.writeValue.value = value;
  operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return operation;
}

MemoryOperation set(void* flag) { return write(flag, 1); }
MemoryOperation clear(void* flag) { return write(flag, 0); }

void run(cudaStream_t stream, std::vector<MemoryOperation> operations) {
  const CUresult status =
      driver().run(stream, static_cast<unsigned>(operations.size()), operations.data(), 0);
  require(status == CUDA_SUCCESS, Kind::Runtime, "peer_memory", "CUDA driver error ",
          static_cast<int>(status));
}

cudaEvent_t event_of(int64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }

}  // namespace

void peer_send(const Rows& rows, const PeerSlot& slot, const PeerEvents& events, Device device,
               Stream stream) {
  const DeviceGuard guard(device);
  const auto sends = reinterpret_cast<cudaStream_t>(events.send_stream);
  check(cudaEventRecord(event_of(events.computed), stream_of(stream)), "peer_send");
  check(cudaStreamWaitEvent(sends, event_of(events.computed), 0), "peer_send");
  run(sends, {wait_for(slot.free), clear(slot.free)});
  const auto bytes = static_cast<size_t>(rows.bytes), pitch = static_cast<size_t>(rows.pitch);
  const auto count = static_cast<size_t>(rows.count);
  check(rows.count == 1 ? cudaMemcpyAsync(slot.data, rows.data, bytes, cudaMemcpyDefault, sends)
                        : cudaMemcpy2DAsync(slot.data, bytes, rows.data, pitch, bytes, count,
                                            cudaMemcpyDefault, sends),
        "peer_send");
  run(sends, {set(slot.arrived)});
  check(cudaEventRecord(event_of(events.sent), sends), "peer_send");
}

void peer_receive(void* arrived, int64_t& last_stream, Device device, Stream stream) {
  const DeviceGuard guard(device);
  follow_last_stream(last_stream, stream_of(stream), "peer_receive");
  run(stream_of(stream), {wait_for(arrived)});
}

void peer_release(const std::vector<PeerSlot>& slots, Device device, Stream stream) {
  const DeviceGuard guard(device);
  std::vector<MemoryOperation> operations;
  for (const PeerSlot& slot : slots) operations.push_back(clear(slot.arrived));
  for (const PeerSlot& slot : slots) operations.push_back(set(slot.free));
  run(stream_of(stream), std::move(operations));
}

void peer_finish(int64_t sent, Device device, Stream stream) {
  const DeviceGuard guard(device);
  check(cudaStreamWaitEvent(stream_of(stream), event_of(sent), 0), "peer_finish");
}

}  // namespace te::cuda
