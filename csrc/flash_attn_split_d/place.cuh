// Which part of a tile is this thread's.
//
// Everything follows from the thread index. It is read anew where a Place is made, so that nothing
// here can be kept in registers from one phase of the loop to the next.
#pragma once

#include "cute/copy.cuh"
#include "flash_attn_split_d/copy.cuh"
#include "flash_attn_split_d/kernel_traits.h"

#include <cute/config.hpp>

#include <cstdint>

namespace fa101::split_d {

template <class Traits>
struct Place {
    static constexpr int kPanelQ = Traits::kBlockM * kPanelRowBytes;
    static constexpr int kPanelKV = Traits::kBlockN * kPanelRowBytes;
    using DimShare = typename Traits::DimShare;
    using ColumnShare = typename Traits::ColumnShare;

    int row_group, member;     // of the warp
    int key_group, dim_group;  // the member's, in Q K^T
    int lane;

    CUTE_DEVICE Place() {
        const int thread = reread_thread_index<Traits::kNThreads>();
        row_group = thread / 32 / Traits::kGroupWarps;
        member = thread / 32 % Traits::kGroupWarps;
        key_group = member / Traits::kDimGroups;
        dim_group = member % Traits::kDimGroups;
        lane = thread % 32;
    }

    // First row of row tile i. A warp counts the one whose softmax it does first, so that which
    // partial logits to keep and which to send is a matter of constant register numbers.
    CUTE_DEVICE int tile_row(int i) const { return row_group * 32 + (i ^ dim_group % 2) * 16; }
    // In a tile's fragment (see cute/fragment.cuh) a thread has two rows, this one and 8 more, and
    // two columns.
    CUTE_DEVICE int row(int i) const { return tile_row(i) + lane / 4; }

    // The softmax of row tile 0 is this warp's, for kOwnTiles of its key tiles.
    CUTE_DEVICE int part() const { return dim_group / 2; }
    CUTE_DEVICE bool owns() const {
        return Traits::kDimGroups / 2 == Traits::kOwners || part() < Traits::kOwners;
    }
    CUTE_DEVICE int key_part() const { return key_group * Traits::kOwners + part(); }
    CUTE_DEVICE int key() const {
        return key_group * Traits::kGroupKeys + part() * Traits::kOwnTiles * 8 + lane % 4 * 2;
    }

    // Where its columns of O and V are: slice of 16 columns, tile c of 8.
    CUTE_DEVICE int column_panel(int slice) const {
        return slice / ColumnShare::kSteps * ColumnShare::kPanelStride +
               ColumnShare::first_panel(member);
    }
    CUTE_DEVICE int column_piece(int c) const {
        return (ColumnShare::first_step(member) + c / 2 % ColumnShare::kSteps) * 2 + c % 2;
    }

    // What ldmatrix reads, in bytes from the start of shared memory: Q and K at the warp's first
    // step of D, V at its first columns, P.
    CUTE_DEVICE int q_offset() const { return DimShare::first_panel(dim_group) * kPanelQ + dims(); }
    CUTE_DEVICE int k_offset() const {
        return Traits::kOffsetK + DimShare::first_panel(dim_group) * kPanelKV +
               key_group * Traits::kGroupKeys * kPanelRowBytes + dims();
    }
    CUTE_DEVICE int v_offset() const {
        return Traits::kOffsetV + ColumnShare::first_panel(member) * kPanelKV +
               (ldmatrix_offset(lane) ^ (ColumnShare::first_step(member) << 5));
    }
    CUTE_DEVICE int p_offset(int i) const {
        return weights_offset() + (i ^ dim_group % 2) * 16 * Traits::kWeightsPitch +
               lane % 16 * Traits::kWeightsPitch + lane / 16 * 16;
    }

    // P of the row group, and what its warps exchange.
    CUTE_DEVICE int weights_offset() const {
        return Traits::kOffsetScratch + row_group * Traits::kTile.scratch_bytes();
    }
    CUTE_DEVICE int exchange_offset() const {
        return Traits::kStages == 2 ? weights_offset() : Traits::kOffsetExchange;
    }

  private:
    CUTE_DEVICE int dims() const {
        return ldmatrix_offset(lane) ^ (DimShare::first_step(dim_group) << 5);
    }
};

}  // namespace fa101::split_d
