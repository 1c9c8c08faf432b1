// What split_d's family sees of its float32 kernel.
#pragma once

#include "flash_decode/family.h"
#include "kernel_family.h"

namespace fa101::split_d_tf32 {

using flash_decode::KeyRange;
using flash_decode::Partials;

std::string supports(const Problem&, const DeviceInfo&);
Tile tile(const Problem&, const DeviceInfo&);
Splits splits(const Problem&, const DeviceInfo&);
void run(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);

// One translation unit each, for the head_dims of tile_config.h.
void run_hdim384(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim512(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim768(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim1024(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);

}  // namespace fa101::split_d_tf32
