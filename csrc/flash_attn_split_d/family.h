// What the planner and the registry see of split_d, the strategy of fa2_cute for large head_dims.
#pragma once

#include "flash_decode/family.h"
#include "kernel_family.h"

namespace fa101::split_d {

using flash_decode::KeyRange;
using flash_decode::Partials;

std::string supports(const Problem&, const DeviceInfo&);
Tile tile(const Problem&, const DeviceInfo&);
Splits splits(const Problem&, const DeviceInfo&);
int64_t workspace(const Plan&, const Problem&);
void launch(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);

// One translation unit each, for the head_dims of tile_config.h.
void run_hdim320(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim384(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim512(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim640(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim768(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim1024(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);

}  // namespace fa101::split_d
