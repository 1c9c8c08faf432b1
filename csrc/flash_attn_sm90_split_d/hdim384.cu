#include "flash_attn_sm90_split_d/family.h"
#include "flash_attn_sm90_split_d/launch.cuh"

namespace fa101::sm90_split_d {

void run_hdim384(const Problem& problem, const Tensors& tensors, Stream stream) {
    run_hdim<384>(problem, tensors, stream);
}

}  // namespace fa101::sm90_split_d
