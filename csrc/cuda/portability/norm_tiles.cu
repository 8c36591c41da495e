// Two of the twenty kernels of norm_tiles.cu, which compile in seconds for each architecture.
#include "cuda/device/norm_tiles.cuh"

namespace te::cuda::norm_tiles {

template __global__ void tile_kernel<BFloat16, NormKind::LayerNorm, 32, true>(
    const __grid_constant__ Problem);
template __global__ void tile_kernel<float, NormKind::RMSNorm, 64, false>(
    const __grid_constant__ Problem);

}  // namespace te::cuda::norm_tiles
