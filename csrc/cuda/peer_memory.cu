#include "ops/peer_memory.h"

#include <cuda.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/device/dependent_launch.cuh"
#include "cuda/device/system_flags.cuh"
#include "cuda/dynlib.h"
#include "cuda/rows.h"
#include "cuda/stream_order.h"

namespace te::cuda {
namespace {

using MemoryOperation = CUstreamBatchMemOpParams;

// The stream memory operations of the driver API; the runtime API has none.
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

// Writes a flag after all earlier work of the stream, with a fence that takes some microseconds.
MemoryOperation write(void* flag, uint32_t value) {
  MemoryOperation operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = address(flag);
  operation.writeValue.value = value;
  operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return operation;
}

void run(cudaStream_t stream, std::vector<MemoryOperation> operations) {
  const CUresult status =
      driver().run(stream, static_cast<unsigned>(operations.size()), operations.data(), 0);
  require(status == CUDA_SUCCESS, Kind::Runtime, "peer_memory", "CUDA driver error ",
          static_cast<int>(status));
}

cudaEvent_t event_of(int64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }

// Returns the stream of sends, after letting it wait for the caller's stream.
cudaStream_t send_stream(const PeerEvents& events, Stream stream, std::string_view op) {
  const auto sends = reinterpret_cast<cudaStream_t>(events.send_stream);
  check(cudaEventRecord(event_of(events.computed), stream_of(stream)), op);
  check(cudaStreamWaitEvent(sends, event_of(events.computed), 0), op);
  return sends;
}

constexpr int kReleased = 32;  // most slots that one kernel releases

struct Released {
  uint32_t* arrived[kReleased];
  uint32_t* free[kReleased];
};

// Releases slots. Kernels that follow wait less for a kernel than for memory operations, whose
// fences come one after the other.
__global__ void release_kernel(const __grid_constant__ Released slots) {
  follow_previous_kernel();
  *slots.arrived[threadIdx.x] = 0;
  store_release(slots.free[threadIdx.x], 1);
}

}  // namespace

void peer_send(const Rows& rows, const PeerSlots& slots, int64_t pitch, const PeerEvents& events,
               Device device, Stream stream) {
  const DeviceGuard guard(device);
  const cudaStream_t sends = send_stream(events, stream, "peer_send");
  std::vector<MemoryOperation> turns;
  for (const PeerSlot& slot : slots) turns.push_back(wait_for(slot.free));
  for (const PeerSlot& slot : slots) turns.push_back(write(slot.free, 0));
  run(sends, std::move(turns));
  for (const PeerSlot& slot : slots) {
    copy_rows(rows, placed(rows, slot.data, pitch), sends, "peer_send");
    run(sends, {write(slot.arrived, 1)});
  }
  check(cudaEventRecord(event_of(events.sent), sends), "peer_send");
}

void peer_receive(const PeerSlots& slots, int64_t& last_stream, Device device, Stream stream) {
  const DeviceGuard guard(device);
  follow_last_stream(last_stream, stream_of(stream), "peer_receive");
  std::vector<MemoryOperation> waits;
  for (const PeerSlot& slot : slots) waits.push_back(wait_for(slot.arrived));
  run(stream_of(stream), std::move(waits));
}

void peer_copy(const Rows& out, const PeerSlot& slot, const PeerEvents& events, Device device,
               Stream stream) {
  const DeviceGuard guard(device);
  const cudaStream_t sends = send_stream(events, stream, "peer_copy");
  copy_rows(without_gaps(out, slot.data), out, sends, "peer_copy");
  check(cudaEventRecord(event_of(events.sent), sends), "peer_copy");
}

void peer_release(const PeerSlots& slots, Device device, Stream stream) {
  const DeviceGuard guard(device);
  for (size_t first = 0; first < slots.size(); first += kReleased) {
    const size_t count = std::min<size_t>(kReleased, slots.size() - first);
    Released released{};
    for (size_t i = 0; i < count; ++i) {
      released.arrived[i] = static_cast<uint32_t*>(slots[first + i].arrived);
      released.free[i] = static_cast<uint32_t*>(slots[first + i].free);
    }
    launch_dependent(release_kernel, 1, static_cast<unsigned>(count), 0, stream_of(stream),
                     released);
  }
}

void peer_finish(int64_t sent, Device device, Stream stream) {
  const DeviceGuard guard(device);
  check(cudaStreamWaitEvent(stream_of(stream), event_of(sent), 0), "peer_finish");
}

}  // namespace te::cuda
