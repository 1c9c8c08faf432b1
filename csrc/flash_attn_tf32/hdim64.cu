#include "flash_attn_tf32/family.h"
#include "flash_attn_tf32/launch.cuh"

namespace fa101::tf32 {

void run_hdim64(const Plan& plan, const Problem& problem, const Tensors& tensors, Stream stream) {
    run_hdim<64>(plan, problem, tensors, stream);
}

}  // namespace fa101::tf32
