// What the planner and the registry see of the tensor-core kernel.
#pragma once

#include "kernel_family.h"

namespace fa101::fa2_cute {

std::string supports(const Problem&, const DeviceInfo&);
Tile tile(const Problem&, const DeviceInfo&);
int64_t workspace(const Plan&, const Problem&);
void launch(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);

// What a kernel of its own serves; bounds and lengths cost the plain one nothing.
inline bool has_extras(const Problem& p) { return p.softcap > 0 || p.has_bias || p.has_mask; }

// One translation unit each, for the head_dims of tile_config.h.
void run_hdim64(const Plan&, const Problem&, const Tensors&, Stream);
void run_hdim96(const Plan&, const Problem&, const Tensors&, Stream);
void run_hdim128(const Plan&, const Problem&, const Tensors&, Stream);
void run_hdim192(const Plan&, const Problem&, const Tensors&, Stream);
void run_hdim256(const Plan&, const Problem&, const Tensors&, Stream);

}  // namespace fa101::fa2_cute
