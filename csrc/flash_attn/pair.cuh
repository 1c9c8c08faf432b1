// Two warps that share the rows of their queries: what they tell each other, through shared memory.
#pragma once

#include <cute/tensor.hpp>

namespace fa101 {

// The barrier of one pair; number 0 is that of the whole block.
CUTE_DEVICE void pair_sync(int pair) {
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
}

// The same, and whether `condition` holds for any of its threads.
CUTE_DEVICE bool pair_any(int pair, bool condition) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.s32 p, %1, 0;\n"
        "bar.red.or.pred q, %2, 64, p;\n"
        "selp.s32 %0, 1, 0, q;\n"
        "}\n"
        : "=r"(any)
        : "r"(static_cast<int>(condition)), "r"(pair + 1)
        : "memory");
    return any != 0;
}

// Gives the other warp this one's number for each of its rows and returns with the other's.
// row_values (2 warps, rows of the tile); coord(r, 0) is the place of the thread's row r.
template <int kRows, class RowValues, class Coord>
CUTE_DEVICE void pair_exchange(int warp, float const (&mine)[kRows], float (&theirs)[kRows],
                               RowValues& row_values, Coord const& coord) {
    using namespace cute;
    if (get<1>(coord(0, 0)) % 8 == 0) {  // of the four lanes of a row the first
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) row_values[warp % 2][get<0>(coord(r, 0))] = mine[r];
    }
    pair_sync(warp / 2);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) theirs[r] = row_values[(warp + 1) % 2][get<0>(coord(r, 0))];
}

}  // namespace fa101
