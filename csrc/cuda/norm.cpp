#include "cuda/norm.h"

#include "cuda/launch.h"

namespace te::cuda {

void norm_forward(const NormForwardArgs& args, Stream stream) {
  const DeviceGuard guard(args.x.device);
  const cudaStream_t queue = stream_of(stream);
  if (!norm_forward_rows(args, queue) && !norm_forward_tiles(args, queue))
    norm_forward_any(args, queue);
}

void norm_backward(const NormBackwardArgs& args, Stream stream) {
  const DeviceGuard guard(args.x.device);
  const cudaStream_t queue = stream_of(stream);
  if (!norm_backward_rows(args, queue)) norm_backward_any(args, queue);
}

}  // namespace te::cuda
