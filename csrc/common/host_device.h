// One spelling for functions that the CPU tests and the GPU kernels share.
#pragma once

#if defined(__CUDACC__)
#define FA101_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FA101_HOST_DEVICE inline
#endif
