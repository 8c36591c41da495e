#include "ops/copy.h"

#include "cuda/launch.h"
#include "cuda/rows.h"

namespace te::cuda {

void copy(const Rows& x, const Rows& out, Device device, Stream stream) {
  const DeviceGuard guard(device);
  copy_rows(x, out, stream_of(stream), "copy");
}

void zero(const Rows& out, Device device, Stream stream) {
  const DeviceGuard guard(device);
  check(
      cudaMemset2DAsync(out.data, static_cast<size_t>(out.pitch), 0, static_cast<size_t>(out.bytes),
                        static_cast<size_t>(out.count), stream_of(stream)),
      "zero");
}

}  // namespace te::cuda
