// The host side of the kernel that splits the keys: how many splits, and the workspace for them.
#include <fa101/plan.h>

#include "common/mask.h"
#include "common/nonce.h"
#include "flash_decode/family.h"
#include "flash_decode/splits.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

using namespace fa101;
using flash_decode::KeyRange;
using flash_decode::KeySplits;

namespace {

DeviceInfo h200() {
    DeviceInfo info;
    info.type = DeviceType::kCuda;
    info.arch = 90;
    info.num_sms = 132;
    info.smem_per_block = 227 * 1024;
    return info;
}

Problem decode(int64_t batch, int64_t num_heads, int64_t num_heads_kv, int64_t seqlen_k,
               int64_t head_dim = 128, DType dtype = DType::kBFloat16) {
    Problem p;
    p.batch = batch, p.num_heads = num_heads, p.num_heads_kv = num_heads_kv;
    p.seqlen_q = 1, p.seqlen_k = seqlen_k;
    p.head_dim = p.head_dim_v = head_dim;
    p.device = DeviceType::kCuda;
    p.dtype_q = p.dtype_kv = p.dtype_o = dtype;
    p.aligned16 = true;
    return p;
}

int num_splits(const Problem& p) { return flash_decode::splits(p, h200()).count; }

}  // namespace

TEST_CASE("the splits of a tile are its keys, once and in order, equal to within a step") {
    std::mt19937 random(1);
    for (int step : {16, 32, 64}) {
        for (const KeySplits& keys : {KeySplits{}, KeySplits{1000, 1000, {}}, KeySplits{7, 7, {}},
                                      KeySplits{33, 16, Divider::by(128 / step)},
                                      KeySplits{5, 1, Divider::by(128 / step), 5 * 2048 / step}}) {
            for (int i = 0; i < 1000; ++i) {
                const int size = 1 + static_cast<int>(random() % (i % 2 == 0 ? 300 : 100000));
                const int begin = i % 3 == 0 ? 0 : static_cast<int>(random() % 5000);
                const KeyRange tile = {begin, begin + size};
                const int count = keys.count(tile, step), steps = tile.num_steps(step);
                const KeyRange first = keys_of_split(tile, 0, count, step);
                const KeyRange last = keys_of_split(tile, count - 1, count, step);
                bool fits = first.begin == tile.begin && last.end == tile.end;
                for (int split = 0; split < count; ++split) {
                    const KeyRange here = keys_of_split(tile, split, count, step);
                    const KeyRange next = keys_of_split(tile, split + 1, count, step);
                    const int here_steps = here.num_steps(step);
                    fits = fits && !here.is_empty() && here_steps >= steps / count &&
                           here_steps <= ceil_div(steps, count);
                    if (split + 1 == count) break;
                    fits = fits && here.end == next.begin && next.begin % step == 0;
                }
                for (int more : {0, 1, 30}) {  // who merges waits for none of these
                    fits = fits && keys_of_split(tile, count + more, count, step).is_empty();
                }
                CAPTURE(step);
                CAPTURE(keys.per_wave);
                CAPTURE(tile.begin);
                CAPTURE(tile.end);
                CHECK(fits);
            }
            for (const KeyRange none : {KeyRange{0, 0}, {77, 77}, {100, 3}}) {
                CHECK(keys.count(none, step) == 1);  // which writes zeros
                CHECK(keys_of_split(none, 0, 1, step).is_empty());
                CHECK(keys_of_split(none, 1, 1, step).is_empty());
            }
        }
    }
}

TEST_CASE("how many splits") {
    const KeySplits one_wave = {33, 33, Divider::by(16)};
    const KeySplits waves = {16, 16, Divider::by(16), 16 * 2048 / 16};
    const KeySplits few_short = {33, 16, Divider::by(8)};
    const auto count = [](const KeySplits& keys, int seqlen_k) {
        return keys.count({0, seqlen_k}, 16);
    };
    for (const KeySplits& keys : {one_wave, waves}) {
        CHECK(count(keys, 1) == 1);
        CHECK(count(keys, 496) == 1);
        CHECK(count(keys, 512) == 2);
        CHECK(count(keys, 4095) == 16);
    }
    CHECK(count(one_wave, 8192) == 32);
    CHECK(count(one_wave, 8448) == 33);
    CHECK(count(one_wave, 1 << 30) == 33);
    CHECK(count(waves, 32768) == 16);
    CHECK(count(waves, 32769) == 32);
    CHECK(count(waves, 100000) == 64);
    CHECK(count(few_short, 240) == 1);
    CHECK(count(few_short, 1024) == 8);  // of 128 keys
    CHECK(count(few_short, 2048) == 16);
    CHECK(count(few_short, 4096 + 240) == 16);
    CHECK(count(few_short, 4096 + 256) == 17);  // of 256
    CHECK(count(few_short, 8192) == 32);
    CHECK(count(few_short, 1 << 30) == 33);
    CHECK(one_wave.count({8, 16 * 16 + 8}, 16) == 1);  // 17 steps
    CHECK(one_wave.count({65536, 65536 + 512}, 16) == 2);
}

TEST_CASE("splits depend on a tile's own keys, not on the capacity or on other lengths") {
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        for (int64_t asked : {0, 1, 3, 100}) {
            for (const auto& [batch, heads] : {std::pair{1, 8}, {1, 1}, {3, 8}, {5, 30}, {64, 8}}) {
                const auto keys_of = [&, batch = batch, heads = heads](int64_t capacity) {
                    Problem p = decode(batch, 4 * heads, heads, capacity, 128, dtype);
                    p.num_splits = asked;
                    p.has_seqlens_k = true;
                    Plan plan = fa101::plan(p, h200(), "fa2_cute", "split_kv");
                    const KeySplits keys = flash_decode::make_partials(plan, p, 16, nullptr).keys;
                    CHECK(keys.count({0, static_cast<int>(capacity)}, 16) == plan.num_splits);
                    return keys;
                };
                const KeySplits large = keys_of(1 << 22);
                for (int capacity : {1, 255, 512, 5000, 8192, 40000, 100000, 1 << 20}) {
                    const KeySplits keys = keys_of(capacity);
                    bool same = true;
                    for (int begin = 0; begin < capacity; begin += capacity / 7 + 1) {
                        for (int end = begin; end <= capacity; end += capacity / 100 + 1) {
                            same = same &&
                                   keys.count({begin, end}, 16) == large.count({begin, end}, 16);
                        }
                    }
                    CAPTURE(asked);
                    CAPTURE(batch);
                    CAPTURE(heads);
                    CAPTURE(capacity);
                    CHECK(same);
                }
            }
        }
    }
}

TEST_CASE("one sequence is one wave of blocks, a large batch has nothing to merge") {
    CHECK(num_splits(decode(1, 32, 8, 1024)) == 8);   // not less than 128 keys
    CHECK(num_splits(decode(1, 32, 8, 4096)) == 16);  // nor than 256 in a second block of an SM
    CHECK(num_splits(decode(1, 32, 8, 8192)) == 32);
    CHECK(num_splits(decode(4, 32, 8, 1024)) == 4);
    for (int64_t seqlen_k : {8448, 65536, 131072, 1 << 20}) {
        CHECK(num_splits(decode(1, 32, 8, seqlen_k)) == 33);  // 264 blocks, two a multiprocessor
        CHECK(num_splits(decode(1, 8, 8, seqlen_k, 128, DType::kFloat32)) == 33);
    }
    CHECK(num_splits(decode(1, 32, 1, 1 << 20)) == 132);
    for (int64_t num_heads : {8, 32}) {
        CHECK(num_splits(decode(2, num_heads, 8, 8192)) == 16);
        CHECK(num_splits(decode(4, num_heads, 8, 8192)) == 8);
        CHECK(num_splits(decode(8, num_heads, 8, 8192)) == 4);
        CHECK(num_splits(decode(32, num_heads, 8, 8192)) == 1);
    }
    CHECK(num_splits(decode(8, 32, 8, 65536)) == 32);  // pieces of 2048: others may be short
    CHECK(num_splits(decode(16, 32, 8, 8192)) == 1);   // a block alone on its SM reads as fast
    CHECK(num_splits(decode(64, 32, 8, 8192)) == 1);
    CHECK(num_splits(decode(64, 32, 8, 65536)) == 8);
    CHECK(num_splits(decode(16, 32, 32, 4096)) == 1);
    CHECK(num_splits(decode(0, 32, 8, 8192)) == 1);
    CHECK(num_splits(decode(1, 32, 8, 0)) == 1);
}

TEST_CASE("where one wave would be half empty, several are") {
    CHECK(num_splits(decode(150, 4, 1, 8192)) == 7);  // 1050 blocks, eight for each of 132 SMs
    CHECK(num_splits(decode(100, 4, 1, 8192)) == 9);  // seven for each of 132 SMs
    CHECK(num_splits(decode(260, 4, 1, 8192)) == 1);
    Problem prefill = decode(1, 16, 2, 8192, 64);
    prefill.seqlen_q = 8192;  // the parts would be larger than K and V
    CHECK(num_splits(prefill) == 1);
}

TEST_CASE("as many splits as asked for, or as steps") {
    for (int64_t seqlen_k : {1, 16, 17, 1000, 8192, 100000}) {
        for (int64_t asked :
             {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{1000}, int64_t{1} << 40}) {
            Problem p = decode(1, 32, 8, seqlen_k);
            p.num_splits = asked;
            CAPTURE(seqlen_k);
            CAPTURE(asked);
            CHECK(num_splits(p) == std::min<int64_t>(asked, ceil_div<int64_t>(seqlen_k, 16)));
            p.seqlen_q = 5;  // steps of 64
            CHECK(num_splits(p) == std::min<int64_t>(asked, ceil_div<int64_t>(seqlen_k, 64)));
        }
    }
}

TEST_CASE("the tile follows the rows of a group") {
    Problem p = decode(1, 32, 8, 8192);
    CHECK(flash_decode::tile(p, h200()).block_m == 16);
    p.seqlen_q = 4;
    CHECK(flash_decode::tile(p, h200()).block_m == 16);
    p.seqlen_q = 5;
    CHECK(flash_decode::tile(p, h200()).block_m == 64);
}

TEST_CASE("every tile fits into the shared memory of the smallest GPU") {
    DeviceInfo rtx4090 = h200();
    rtx4090.arch = 89, rtx4090.num_sms = 128, rtx4090.smem_per_block = 99 * 1024;
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        for (int64_t head_dim : {1, 64, 96, 100, 128, 192, 256}) {
            for (int64_t seqlen_q : {1, 100}) {
                Problem p = decode(2, 8, 8, 1000, head_dim, dtype);
                p.seqlen_q = seqlen_q;
                CHECK(flash_decode::supports(p, rtx4090) == "");
                if (dtype == DType::kFloat32) continue;
                p.dtype_kv = DType::kFloat8E4M3;
                CHECK(flash_decode::supports(p, rtx4090) == "");
                CHECK(flash_decode::tile(p, rtx4090).head_dim >= head_dim);
            }
        }
        CHECK(flash_decode::supports(decode(2, 8, 8, 1000, 257, dtype), rtx4090) != "");
    }
}

TEST_CASE("the workspace holds lse, O and a flag of every part") {
    Problem p = decode(1, 32, 8, 8448, 127);
    const Plan plan = fa101::plan(p, h200(), "fa2_cute", "split_kv");
    CHECK(plan.num_splits == 33);
    CHECK(plan.workspace_bytes == 32 * 33 * (4 + 4 * 128 + 8));
    p.dtype_q = p.dtype_kv = p.dtype_o = DType::kFloat32;  // merged by a second kernel
    CHECK(fa101::plan(p, h200(), "fa2_cute", "split_kv").workspace_bytes ==
          32 * 33 * (4 + 4 * 128));
    CHECK(fa101::plan(decode(64, 32, 8, 8192), h200(), "fa2_cute", "split_kv").workspace_bytes ==
          0);
}

TEST_CASE("a block merges one row where they are few and their parts many, else one a warp") {
    for (int64_t head_dim : {64, 128, 256}) {
        const int batch = flash_decode::merge_batch(static_cast<int>(head_dim));
        for (int rows : {1, 64, 65, 4096}) {
            for (int num_splits : {2, batch, batch + 1, 100}) {
                const Problem p = decode(1, rows, 1, 8192, head_dim);
                Plan plan;
                plan.tile = flash_decode::tile(p, h200());
                plan.num_splits = num_splits;
                const bool is_shared = rows <= 64 && num_splits > batch;
                CHECK(flash_decode::rows_per_merge(plan, p) ==
                      (is_shared ? 1 : plan.tile.num_warps));
            }
        }
    }
}

TEST_CASE("no two launches have the same nonce, from whatever threads") {
    std::vector<std::vector<uint64_t>> drawn(4);
    std::vector<std::thread> threads;
    for (auto& nonces : drawn) {
        threads.emplace_back([&nonces] {
            for (int i = 0; i < 10000; ++i) nonces.push_back(next_nonce());
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::set<uint64_t> all;
    for (const auto& nonces : drawn) all.insert(nonces.begin(), nonces.end());
    CHECK(all.size() == 40000);
    CHECK(all.count(0) == 0);
    // They differ in about half of their bits, as what counters leave in memory does not.
    int64_t bits = 0;
    for (size_t i = 1; i < drawn[0].size(); ++i) {
        for (uint64_t x = drawn[0][i] ^ drawn[0][i - 1]; x != 0; x &= x - 1) ++bits;
    }
    CHECK(bits > 30 * 9999);
    CHECK(bits < 34 * 9999);
}
