// What split_kv's family sees of its float32 kernel.
#pragma once

#include "flash_decode/family.h"
#include "kernel_family.h"

namespace fa101::decode_tf32 {

using flash_decode::KeyRange;
using flash_decode::Partials;

std::string supports(const Problem&, const DeviceInfo&);
Tile tile(const Problem&, const DeviceInfo&);
Splits splits(const Problem&, const DeviceInfo&);
void run(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);

// One translation unit each, for the head_dims of tile_config.h.
void run_hdim64(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim128(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);
void run_hdim256(const Plan&, const Problem&, const Tensors&, const Partials&, Stream);

}  // namespace fa101::decode_tf32
