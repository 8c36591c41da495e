// TE_HD marks the functors that both backends call, so that one text is the meaning on CPU and GPU.
#pragma once

#if defined(__CUDACC__)
#define TE_HD __host__ __device__ __forceinline__
#else
#define TE_HD inline
#endif
