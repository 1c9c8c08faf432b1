#include "flash_attn_sm90/family.h"
#include "flash_attn_sm90/launch.cuh"

namespace fa101::sm90 {

void run_hdim96(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
                Stream stream) {
    run_hdim<96>(plan, problem, tensors, workspace, stream);
}

}  // namespace fa101::sm90
