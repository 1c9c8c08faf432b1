#include "flash_attn_sm90/family.h"
#include "flash_attn_sm90/launch.cuh"

namespace fa101::sm90 {

void run_hdim192(const Plan& plan, const Problem& problem, const Tensors& tensors, void* workspace,
                 Stream stream) {
    if (problem.head_dim_v <= 128) {
        return run_hdim<192, 128>(plan, problem, tensors, workspace, stream);
    }
    run_hdim<192>(plan, problem, tensors, workspace, stream);
}

}  // namespace fa101::sm90
