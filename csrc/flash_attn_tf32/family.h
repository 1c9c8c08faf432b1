// What fa2_cute's family sees of its float32 kernel.
#pragma once

#include "kernel_family.h"

namespace fa101::tf32 {

std::string supports(const Problem&, const DeviceInfo&);
Tile tile(const Problem&, const DeviceInfo&);
void launch(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);

// One translation unit each, for the head_dims of tile_config.h.
void run_hdim64(const Plan&, const Problem&, const Tensors&, Stream);
void run_hdim128(const Plan&, const Problem&, const Tensors&, Stream);
void run_hdim256(const Plan&, const Problem&, const Tensors&, Stream);

}  // namespace fa101::tf32
