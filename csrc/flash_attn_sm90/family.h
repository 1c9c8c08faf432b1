// What the planner and the registry see of the Hopper kernel.
#pragma once

#include "kernel_family.h"

namespace fa101::sm90 {

std::string supports(const Problem&, const DeviceInfo&);
Tile tile(const Problem&, const DeviceInfo&);
int64_t workspace(const Plan&, const Problem&);
void launch(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);

// The same tiles with their keys split.
std::string supports_splits(const Problem&, const DeviceInfo&);
Tile tile_of_splits(const Problem&, const DeviceInfo&);
Splits splits(const Problem&, const DeviceInfo&);
int64_t workspace_of_splits(const Plan&, const Problem&);
void launch_splits(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);

// One translation unit each, for the head_dims of tile_config.h.
void run_hdim64(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);
void run_hdim96(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);
void run_hdim128(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);
void run_hdim192(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);
void run_hdim256(const Plan&, const Problem&, const Tensors&, void* workspace, Stream);

}  // namespace fa101::sm90
