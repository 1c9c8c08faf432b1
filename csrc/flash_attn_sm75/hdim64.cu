#include "flash_attn_sm75/family.h"
#include "flash_attn_sm75/launch.cuh"

namespace fa101::sm75 {

void run_hdim64(const Problem& problem, const Tensors& tensors, Stream stream) {
    run_hdim<64>(problem, tensors, stream);
}

}  // namespace fa101::sm75
