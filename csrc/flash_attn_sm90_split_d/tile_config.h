// Sizes of the compiled kernels, and which of them answers a problem. Changes speed, never results.
// Plain C++: the planner and the launcher both read it. The budgets behind it are in kernel.cuh.
#pragma once

#include <fa101/params.h>

#include <cstdint>

namespace fa101::sm90_split_d {

// head_dim of the compiled tiles; TMA pads smaller ones with zeros.
constexpr int kHeadDims[] = {384, 512, 768, 1024};

constexpr int kBlockM = 64;   // queries of a block: the rows of one wgmma
constexpr int kBlockN = 128;  // keys of one step

// A cluster is two blocks that load each slice of K once for both. Up to 512 they have 64 queries
// each, of the same head; above, where O needs the registers of two multiprocessors, the same 64
// queries and half of O's columns each.
constexpr bool splits_columns(int head_dim) { return head_dim > 512; }

inline int cluster_size(const Problem& p, int head_dim) {
    return splits_columns(head_dim) || p.seqlen_q > kBlockM ? 2 : 1;
}

// Slices of 8 KB in each group's ring: what Q and P leave of 224 KB, an even number, so that a slot
// always has the same block of the cluster to fill it.
constexpr int num_slots(int head_dim) {
    const int q_kb = head_dim / 8, p_kb = 32;
    const int slots = (224 - q_kb - p_kb) / 16;
    return slots >= 8 ? 8 : slots & ~1;
}

// Slices that may still be multiplied when the next one is issued. Those of P V are what the tensor
// cores have to do during the softmax; the other slots are what is under way from memory.
constexpr int lag(int head_dim) { return num_slots(head_dim) / 2 - 1; }

}  // namespace fa101::sm90_split_d
