#include "flash_attn_tf32/family.h"
#include "flash_attn_tf32/launch.cuh"

namespace fa101::tf32 {

void run_hdim256(const Plan& plan, const Problem& problem, const Tensors& tensors, Stream stream) {
    run_hdim<256>(plan, problem, tensors, stream);
}

}  // namespace fa101::tf32
