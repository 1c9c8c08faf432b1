#include "flash_decode_tf32/family.h"
#include "flash_decode_tf32/launch.cuh"

namespace fa101::decode_tf32 {

void run_hdim64(const Plan& plan, const Problem& problem, const Tensors& tensors,
                const Partials& partials, Stream stream) {
    run_hdim<64>(plan, problem, tensors, partials, stream);
}

}  // namespace fa101::decode_tf32
