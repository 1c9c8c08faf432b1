// The CPU ladder, in order.
#pragma once

#include "cpu/simd.h"
#include "kernel_family.h"

namespace fa101 {

extern const KernelFamily kCpuNaiveFamily;
extern const KernelFamily kCpuFa1Family;
extern const KernelFamily kCpuFa2Family;

// What the families launch, at a SIMD level of the caller's choice.
void run_cpu_naive(const SimdKernels& simd, const Plan& plan, const Problem& problem,
                   const Tensors& tensors, void* workspace);
void run_cpu_fa1(const SimdKernels& simd, const Plan& plan, const Problem& problem,
                 const Tensors& tensors, void* workspace);
void run_cpu_fa2(const SimdKernels& simd, const Plan& plan, const Problem& problem,
                 const Tensors& tensors, void* workspace);

}  // namespace fa101
