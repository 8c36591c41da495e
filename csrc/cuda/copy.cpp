#include "ops/copy.h"

#include "cuda/launch.h"

namespace te::cuda {

void copy(const TensorView& x, const Rows& out, Stream stream) {
  const DeviceGuard guard(x.device);
  const auto bytes = static_cast<size_t>(out.bytes), pitch = static_cast<size_t>(out.pitch);
  const auto count = static_cast<size_t>(out.count);
  check(out.count == 1
            ? cudaMemcpyAsync(out.data, x.data, bytes, cudaMemcpyDefault, stream_of(stream))
            : cudaMemcpy2DAsync(out.data, pitch, x.data, bytes, bytes, count, cudaMemcpyDefault,
                                stream_of(stream)),
        "copy");
}

}  // namespace te::cuda
