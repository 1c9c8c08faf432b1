// Panels (see kernel_traits.h) between global and shared memory and registers.
#pragma once

#include "cute/copy.cuh"
#include "flash_attn_split_d/kernel_traits.h"

#include <cute/config.hpp>

#include <cstdint>

namespace fa101::split_d {

// Byte offset of a 16-byte piece (8 columns) within a panel.
CUTE_DEVICE int piece_offset(int row, int piece) {
    return row * kPanelRowBytes + ((piece ^ (row % 8)) << 4);
}

// What lane l adds to an address to read a 16 x 16 piece by ldmatrix.x4: row l % 16, column half
// l / 16. Step j of a panel, 16 columns each, is this ^ (j << 5).
CUTE_DEVICE int ldmatrix_offset(int lane) { return piece_offset(lane % 16, lane / 16); }

CUTE_DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

CUTE_DEVICE void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// 16 bytes, or zeros where not `inside`; there nothing is read.
CUTE_DEVICE void copy_async(uint32_t smem, const void* gmem, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

// Calls visit(row, column, byte offset) for the pieces of the panels [first, last) of a tile of
// kRows rows that are this thread's: 8 neighbouring threads share a row of a panel.
template <int kRows, int kNThreads, class Visit>
CUTE_DEVICE void for_own_pieces(int first, int last, Visit&& visit) {
    constexpr int kRowsAtOnce = kNThreads / 8 < kRows ? kNThreads / 8 : kRows;
    constexpr int kPanelsAtOnce = kNThreads / 8 / kRowsAtOnce;
    const int thread = reread_thread_index<kNThreads>();
    const int row = thread / 8 % kRowsAtOnce, piece = thread % 8;
    CUTE_NO_UNROLL
    for (int panel = first + thread / (8 * kRowsAtOnce); panel < last; panel += kPanelsAtOnce) {
        const int offset = panel * (kRows * kPanelRowBytes) + piece_offset(row, piece);
        CUTE_UNROLL
        for (int r = 0; r < kRows; r += kRowsAtOnce) {
            visit(row + r, panel * kPanel + piece * 8, offset + r * kPanelRowBytes);
        }
    }
}

// Global to shared; rows from num_rows and columns from num_cols on become zeros and are not read.
// Where 16-byte accesses are legal it is asynchronous.
template <int kRows, int kNThreads, class Element>
CUTE_DEVICE void load_panels(unsigned char* smem, const Element* gmem, int64_t row_stride,
                             int num_rows, int num_cols, int first, int last, bool aligned16) {
    asm volatile("" : "+l"(row_stride));  // its multiples shall not be kept in registers
    if (aligned16) {
        const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
        for_own_pieces<kRows, kNThreads>(first, last, [&](int row, int col, int offset) {
            copy_async(address + offset, gmem + row * row_stride + col,
                       row < num_rows && col < num_cols);
        });
    } else {
        for_own_pieces<kRows, kNThreads>(first, last, [&](int row, int col, int offset) {
            const Element* src = gmem + row * row_stride + col;
            const int count = row < num_rows ? num_cols - col : 0;
            CUTE_NO_UNROLL
            for (int j = 0; j < 8; ++j) {
                auto* dst = reinterpret_cast<Element*>(smem + offset) + j;
                *dst = j < count ? src[j] : Element(0);
            }
        });
    }
}

// The way back.
template <int kRows, int kNThreads, class Element>
CUTE_DEVICE void store_panels(const unsigned char* smem, Element* gmem, int64_t row_stride,
                              int num_rows, int num_cols, bool aligned16) {
    const int num_panels = (num_cols + kPanel - 1) / kPanel;
    for_own_pieces<kRows, kNThreads>(0, num_panels, [&](int row, int col, int offset) {
        if (row >= num_rows || col >= num_cols) return;
        Element* dst = gmem + row * row_stride + col;
        if (aligned16) {
            *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<const uint4*>(smem + offset);
        } else {
            const auto* src = reinterpret_cast<const Element*>(smem + offset);
            CUTE_NO_UNROLL
            for (int j = 0; j < 8 && col + j < num_cols; ++j) dst[j] = src[j];
        }
    });
}

}  // namespace fa101::split_d
