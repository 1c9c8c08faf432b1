// Where the keys of a tile of rows are split: into equal pieces of those that the tile sees. How
// many pieces follows from how many keys that are, and from what fills the GPU: of 8 key/value
// heads of one long sequence 33 each are a wave of blocks for an H200's 264 slots, which start and
// end together. Nothing depends on the cache's capacity or on what other sequences hold, so neither
// changes a bit.
//
//      steps of the tile     |....|....|....|....|....|....|....|....|....|....|....|
//      keys that it sees        [                                            )
//      three pieces             [  split 0      | split 1      | split 2     )
#pragma once

#include "common/divider.h"
#include "common/host_device.h"
#include "common/mask.h"

#include <limits>

namespace fa101::flash_decode {

// Keys [begin, end); crossed when there are none.
struct KeyRange {
    int begin, end;
    FA101_HOST_DEVICE bool is_empty() const { return begin >= end; }
    // Blocks of `step` keys, at multiples of it, that hold them.
    FA101_HOST_DEVICE int num_steps(int step) const {
        return is_empty() ? 0 : ceil_div(end, step) - begin / step;
    }
};

struct KeySplits {
    int per_wave = 1;   // splits that fill a wave of blocks, or a few whole ones
    int one_each = 1;   // of these, as many as may be short
    Divider min_steps;  // of a short split; of others twice as many
    int wave_steps = std::numeric_limits<int>::max();  // of a wave; more keys are more waves

    // The splits of a tile's keys; one where it sees none, for somebody must write the zeros. The
    // block of one split has the whole result, else each has a part. Who merges waits for the
    // parts, so both sides must ask the same.
    FA101_HOST_DEVICE int count(KeyRange tile_keys, int step) const {
        const int steps = tile_keys.num_steps(step);
        if (steps > wave_steps) return per_wave * ceil_div(steps, wave_steps);
        const int most = min_steps.quotient(steps);
        return clamp_to(most / 2, clamp_to(most, 1, one_each), per_wave);
    }
};

// The keys of one of `count` splits, whole steps but for the ends; none from split `count` on.
FA101_HOST_DEVICE KeyRange keys_of_split(KeyRange tile_keys, int split, int count, int step) {
    const int steps = tile_keys.num_steps(step);
    const int size = steps / count, longer = steps - count * size;  // the first have one more
    const int first = tile_keys.begin / step + split * size + (split < longer ? split : longer);
    const int begin = step * first, end = begin + step * (size + (split < longer));
    return {begin > tile_keys.begin ? begin : tile_keys.begin,
            end < tile_keys.end ? end : tile_keys.end};
}

}  // namespace fa101::flash_decode
