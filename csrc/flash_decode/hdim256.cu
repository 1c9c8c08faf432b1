#include "flash_decode/family.h"
#include "flash_decode/launch.cuh"

namespace fa101::flash_decode {

void run_hdim256(const Plan& plan, const Problem& problem, const Tensors& tensors,
                 const Partials& partials, const AppendParams& new_keys, Stream stream) {
    run_hdim<256>(plan, problem, tensors, partials, new_keys, stream);
}

}  // namespace fa101::flash_decode
