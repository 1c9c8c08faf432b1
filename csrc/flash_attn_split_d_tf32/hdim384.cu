#include "flash_attn_split_d_tf32/family.h"
#include "flash_attn_split_d_tf32/launch.cuh"

namespace fa101::split_d_tf32 {

void run_hdim384(const Plan& plan, const Problem& problem, const Tensors& tensors,
                 const Partials& partials, Stream stream) {
    run_hdim<384>(plan, problem, tensors, partials, stream);
}

}  // namespace fa101::split_d_tf32
