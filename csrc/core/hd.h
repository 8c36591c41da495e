// TE_HD marks functions that are compiled for host and device, so that both backends share their
// arithmetic.
#pragma once

#if defined(__CUDACC__)
#define TE_HD __host__ __device__ __forceinline__
#else
#define TE_HD inline
#endif
