// Where row `key` of K and V lies, for one batch entry. In one piece, rows follow each other; in
// pages, the caller's table says which page of the cache holds the keys
// [page_size * i, page_size * (i + 1)), and rows follow each other inside of a page:
//
//     page_table[b] = 5 2 7      keys 0 1 .. 15 -> page 5      16 .. 31 -> page 2      32 .. -> 7
//
// Entries of keys that do not exist are never read. Others outside of [0, num_pages) count as the
// last page, so that whatever the table holds, only the cache is read.
#pragma once

#include <fa101/params.h>

#include "common/host_device.h"

#include <cstdint>

namespace fa101 {

// page_size is a power of two of at least this: 16 keys that start at a multiple share a page.
constexpr int kMinPageSize = 16;

// One batch entry's row of the page table, in 32 bits.
struct Pages {
    const int32_t* table;
    int page_size;
    uint32_t last_page;

    FA101_HOST_DEVICE Pages(const Problem& p, const Tensors& t, int64_t batch)
        : table(t.page_table_ptr + batch * t.page_table_stride),
          page_size(static_cast<int>(p.page_size)),
          last_page(static_cast<uint32_t>(t.num_pages - 1)) {}

    FA101_HOST_DEVICE int index_of(int key) const {
#if defined(__CUDA_ARCH__)
        return key >> (__ffs(page_size) - 1);  // a power of two, which the compiler does not know
#else
        return key / page_size;
#endif
    }
    // Which page holds the key, which must exist, and its row there.
    FA101_HOST_DEVICE uint32_t page_of(int key) const {
        const auto page = static_cast<uint32_t>(table[index_of(key)]);
        return page < last_page ? page : last_page;
    }
    FA101_HOST_DEVICE int row_of(int key) const { return key & (page_size - 1); }
};

// The element where the row starts, from the first of the head.
FA101_HOST_DEVICE int64_t key_offset(const Problem& p, const Tensors& t, int64_t batch, int key,
                                     int64_t batch_stride, int64_t row_stride) {
    if (p.page_size == 0) return batch * batch_stride + key * row_stride;
    const Pages pages(p, t, batch);
    return pages.page_of(key) * batch_stride + pages.row_of(key) * row_stride;
}

}  // namespace fa101
