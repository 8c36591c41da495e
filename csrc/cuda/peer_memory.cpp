#include "ops/peer_memory.h"

#include <cuda.h>

#include "cuda/dynlib.h"
#include "cuda/launch.h"

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

void set(CUstream stream, void* flag) {
  check(driver().write(stream, address(flag), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
}

void wait_and_clear(CUstream stream, void* flag) {
  check(driver().wait(stream, address(flag), 1, CU_STREAM_WAIT_VALUE_EQ));
  check(driver().write(stream, address(flag), 0, CU_STREAM_WRITE_VALUE_DEFAULT));
}

CUstream of(Stream stream) { return static_cast<CUstream>(stream.handle); }

}  // namespace

void peer_send(const PeerSendArgs& args, int64_t row_bytes, int64_t pitch, Stream stream) {
  const DeviceGuard guard(args.x.device);
  wait_and_clear(of(stream), args.free);
  const int64_t bytes = args.x.bytes();
  if (row_bytes == bytes) {
    check(cudaMemcpyAsync(args.to, args.x.data, static_cast<size_t>(bytes), cudaMemcpyDefault,
                          of(stream)),
          "peer_send");
  } else {
    check(cudaMemcpy2DAsync(args.to, static_cast<size_t>(row_bytes), args.x.data,
                            static_cast<size_t>(pitch), static_cast<size_t>(row_bytes),
                            static_cast<size_t>(bytes / row_bytes), cudaMemcpyDefault, of(stream)),
          "peer_send");
  }
  set(of(stream), args.arrived);
}

void peer_receive(Device device, void* arrived, Stream stream) {
  const DeviceGuard guard(device);
  wait_and_clear(of(stream), arrived);
}

void peer_release(Device device, void* free, Stream stream) {
  const DeviceGuard guard(device);
  set(of(stream), free);
}

}  // namespace te::cuda
