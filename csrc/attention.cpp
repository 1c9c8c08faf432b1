// The simple entry: check, plan, find workspace, run.
#include <fa101/attention.h>
#include <fa101/memory.h>

namespace fa101 {

void attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
               const TensorView* lse, const Options& options, Stream stream) {
    const Params params = make_params(q, k, v, o, lse, options);
    const Plan p = plan(params.problem, device_info(q.device), options.kernel, options.strategy);
    const Buffer workspace(q.device, params.problem.is_empty() ? 0 : p.workspace_bytes, stream);
    run(p, params.problem, params.tensors, workspace.data(), stream);
}

}  // namespace fa101
