// Two of the twenty kernels of norm_tiles.cu, which compile in seconds for each architecture.
#include "cuda/device/norm_tiles.cuh"

namespace te::cuda::norm_tiles {

extern const void* const kKernels[] = {
    reinterpret_cast<const void*>(tile_kernel<BFloat16, NormKind::LayerNorm, 32, true>),
    reinterpret_cast<const void*>(tile_kernel<float, NormKind::RMSNorm, 64, false>)};

}  // namespace te::cuda::norm_tiles
