// Programmatic dependent launch (sm_90): a kernel's blocks start while what is before it on the
// stream ends, and until wait_for_stream() they read only their parameters and write nothing to
// global memory; a prefetch may go out.
//
//      before    .. start_next() ..............|
//      kernel            | parameters  start_next()  wait_for_stream() ............|
//
// At least one block waits, though others may leave early: a kernel is complete only when all its
// blocks are, so that who waits for it has waited for all before it. The launch is
// launch_dependent() (launch.h); where that is not early, nothing is left to wait for.
#pragma once

namespace fa101 {

// The next kernel may start, when all blocks have said so or are gone, as they leave room.
__device__ __forceinline__ void start_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// What is before this kernel on the stream is done, and what it wrote is seen.
__device__ __forceinline__ void wait_for_stream() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

}  // namespace fa101
