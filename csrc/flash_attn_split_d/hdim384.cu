#include "flash_attn_split_d/family.h"
#include "flash_attn_split_d/launch.cuh"

namespace fa101::split_d {

void run_hdim384(const Plan& plan, const Problem& problem, const Tensors& tensors, Stream stream) {
    run_hdim<384>(plan, problem, tensors, stream);
}

}  // namespace fa101::split_d
