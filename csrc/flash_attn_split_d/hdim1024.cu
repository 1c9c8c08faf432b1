#include "flash_attn_split_d/family.h"
#include "flash_attn_split_d/launch.cuh"

namespace fa101::split_d {

void run_hdim1024(const Plan& plan, const Problem& problem, const Tensors& tensors,
                  const Partials& partials, Stream stream) {
    run_hdim<1024>(plan, problem, tensors, partials, stream);
}

}  // namespace fa101::split_d
