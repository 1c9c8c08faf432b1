#include "flash_attn/family.h"
#include "flash_attn/launch.cuh"

namespace fa101::fa2_cute {

void run_hdim96(const Plan& plan, const Problem& problem, const Tensors& tensors, Stream stream) {
    run_hdim<96>(plan, problem, tensors, stream);
}

}  // namespace fa101::fa2_cute
