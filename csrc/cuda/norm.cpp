#include "cuda/norm.h"

#include "cuda/launch.h"
#include "ops/transpose.h"

namespace te::cuda {
namespace {

// Several results of rows that are too wide for the kernel of tiles, on a device with little shared
// memory or no clusters. One pass writes the codes by rows, another one y if it is asked for, and
// the codes are transposed. Both passes compute the same statistics, and each result is rounded
// once.
bool norm_forward_by_parts(const NormForwardArgs& args, Stream stream) {
  if (!args.quantized.rowwise) return false;
  const cudaStream_t queue = stream_of(stream);
  NormForwardArgs codes = args;
  codes.y = {};
  codes.quantized.columnwise = {};
  if (!norm_forward_rows(codes, queue)) return false;
  if (args.y) {
    NormForwardArgs plain = args;
    plain.quantized = {};
    if (!norm_forward_rows(plain, queue)) return false;
  }
  if (args.quantized.columnwise)
    cuda::transpose({.x = args.quantized.rowwise,
                     .out = args.quantized.columnwise,
                     .scales = {},
                     .out_scales = {}},
                    stream);
  return true;
}

}  // namespace

void norm_forward(const NormForwardArgs& args, Stream stream) {
  const DeviceGuard guard(args.x.device);
  const cudaStream_t queue = stream_of(stream);
  const bool by_rows = norm_forward_rows(args, queue);
  const bool by_tiles = !by_rows && norm_forward_tiles(args, queue);
  if (!by_rows && !by_tiles && !norm_forward_by_parts(args, stream)) norm_forward_any(args, queue);
  if (args.moments && !(by_tiles && norm_tiles_take_moments(args.x)))
    cuda::moments({args.y, args.moments}, stream);
}

bool norm_takes_moments(const TensorView& x, const TensorView& gamma, const TensorView& beta) {
  for (const TensorView* t : {&x, &gamma, &beta})
    if (!is_aligned(t->data, 16)) return false;
  return norm_tiles_take_moments(x);
}

void norm_backward(const NormBackwardArgs& args, Stream stream) {
  const DeviceGuard guard(args.x.device);
  const cudaStream_t queue = stream_of(stream);
  if (!norm_backward_narrow(args, queue) && !norm_backward_rows(args, queue))
    norm_backward_any(args, queue);
}

}  // namespace te::cuda
