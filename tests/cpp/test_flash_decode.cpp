// The host side of the kernel that splits the keys: how many splits, and the workspace for them.
#include <fa101/plan.h>

#include "common/mask.h"
#include "flash_decode/family.h"
#include "flash_decode/splits.h"
#include "flash_decode/tile_config.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <thread>
#include <utility>
#include <vector>

using namespace fa101;
using flash_decode::KeySplits;
using flash_decode::Role;

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

int num_splits(const Problem& p) { return flash_decode::num_splits(p, h200()); }

}  // namespace

TEST_CASE("splits begin where the one before ends, and grow") {
    const KeySplits keys = KeySplits::growing(512, false);
    const std::pair<int, int64_t> begins[] = {{0, 0},       {1, 512},     {32, 16384}, {33, 17408},
                                              {48, 32768},  {49, 34816},  {64, 65536}, {65, 69632},
                                              {80, 131072}, {81, 139264}, {96, 262144}};
    for (const auto& [split, key] : begins) {
        CAPTURE(split);
        CHECK(keys.begin(split) == key);
        CHECK(keys.count(key) == std::max(split, 1));
        CHECK(keys.count(key + 1) == split + 1);
    }
    for (int chunk = 128; chunk <= flash_decode::kMaxChunk; chunk *= 2) {
        CAPTURE(chunk);
        const KeySplits splits = KeySplits::growing(chunk, false);
        for (int split = 0; split < 500; ++split) {
            const int64_t size = splits.begin(split + 1) - splits.begin(split);
            CHECK(size >= chunk);
            CHECK(size <= flash_decode::kMaxChunk);
            CHECK(size % chunk == 0);
            CHECK(8 * size <= std::max<int64_t>(splits.begin(split), 8 * chunk));
        }
        // Equal ones where the caller gives their number.
        CHECK(KeySplits{chunk}.begin(100) == 100 * chunk);
        // When decoding a first chunk of 1024 is in pieces, and the others are the same.
        const KeySplits pieces = KeySplits::growing(chunk, true);
        const int more = chunk == 1024 ? 2 : 0;
        CHECK(pieces.begin(0) == 0);
        for (int split = 0; split < 500; ++split) {
            CHECK((pieces.begin(split + 1) - pieces.begin(split)) % flash_decode::kChunkStep == 0);
            CHECK(pieces.begin(split + 1) > pieces.begin(split));
            CHECK(pieces.begin(split + 1 + more) == splits.begin(split + 1));
        }
    }
}

TEST_CASE("the split of a key") {
    for (const KeySplits& keys : {KeySplits::growing(128, true), KeySplits::growing(1024, true),
                                  KeySplits::growing(8192, false), KeySplits{384}}) {
        for (int num_splits : {1, 2, 33, 200}) {
            CAPTURE(keys.chunk);
            CAPTURE(num_splits);
            for (int split = 0; split < num_splits; ++split) {
                CHECK(keys.split_of(keys.begin(split), num_splits) == split);
                CHECK(keys.split_of(keys.begin(split + 1) - 1, num_splits) == split);
            }
            CHECK(keys.split_of(keys.begin(num_splits) + 1, num_splits) == num_splits - 1);
        }
    }
}

TEST_CASE("who merges waits for exactly the parts that are written") {
    for (const KeySplits& keys : {KeySplits::growing(128, true), KeySplits::growing(1024, true),
                                  KeySplits::growing(256, false), KeySplits{384}}) {
        for (int num_splits : {2, 3, 17, 40}) {
            const int seqlen_k = static_cast<int>(keys.begin(num_splits)) - 5;
            std::vector<int> borders = {0, seqlen_k};
            for (int split = 0; split < num_splits; ++split) {
                for (int away : {-1, 0, 1}) {
                    borders.push_back(static_cast<int>(keys.begin(split)) + away);
                }
            }
            for (int begin : borders) {
                for (int end : borders) {
                    if (begin < 0 || end < 0 || begin > seqlen_k || end > seqlen_k) continue;
                    const flash_decode::KeyRange tile_keys = {begin, end};
                    const auto parts = flash_decode::parts_of(keys, num_splits, tile_keys);
                    int whole = 0;
                    bool agree = true;
                    for (int split = 0; split < num_splits; ++split) {
                        const flash_decode::KeyRange split_keys = {
                            std::max(begin, static_cast<int>(keys.begin(split))),
                            std::min(end, static_cast<int>(keys.begin(split + 1)))};
                        const Role role = flash_decode::role_of(split, split_keys, tile_keys);
                        const bool is_awaited =
                            !parts.is_empty() && parts.first <= split && split <= parts.last;
                        agree = agree && is_awaited == (role == Role::kPart);
                        if (role == Role::kWholeResult) ++whole;
                    }
                    CAPTURE(begin);
                    CAPTURE(end);
                    CHECK(agree);
                    CHECK(whole == (parts.is_empty() ? 1 : 0));
                }
            }
        }
    }
}

TEST_CASE("the keys of a split do not depend on how many keys there are") {
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        for (const auto& [batch, num_heads_kv] : {std::pair{1, 8}, {3, 8}, {16, 32}, {64, 8}}) {
            CAPTURE(batch);
            CAPTURE(num_heads_kv);
            const auto problem = [&, batch = batch, num_heads_kv = num_heads_kv](int64_t seqlen_k) {
                return decode(batch, 32, num_heads_kv, seqlen_k, 128, dtype);
            };
            int chunk = flash_decode::kMaxChunk;
            while (KeySplits::growing(chunk, true).count(1 << 22) < num_splits(problem(1 << 22))) {
                chunk /= 2;
            }
            CHECK(chunk >= flash_decode::kMinChunk);
            for (int64_t seqlen_k : {0, 1, 255, 256, 257, 4096, 8192, 8193, 100000, 1 << 20}) {
                CAPTURE(seqlen_k);
                Problem p = problem(seqlen_k);
                const KeySplits keys = KeySplits::growing(chunk, true);
                const int splits = keys.count(seqlen_k);
                CHECK(num_splits(p) == splits);
                p.has_seqlens_k = true;
                CHECK(num_splits(p) == splits);
                Plan plan;
                plan.num_splits = splits;
                if (splits == 1) continue;
                const KeySplits told = flash_decode::key_splits(plan, p);
                for (int split = 0; split < splits; ++split) {
                    CHECK(told.begin(split) == keys.begin(split));
                }
                CHECK(told.begin(splits) >= seqlen_k);
            }
        }
    }
}

TEST_CASE("a small batch fills the GPU, a large one has nothing to merge") {
    CHECK(num_splits(decode(1, 32, 8, 8192)) == 32);  // 256 blocks, two a multiprocessor
    CHECK(num_splits(decode(4, 32, 8, 8192)) == 10);
    CHECK(num_splits(decode(8, 32, 8, 8192)) == 4);
    CHECK(num_splits(decode(64, 32, 8, 8192)) == 1);
    CHECK(num_splits(decode(16, 32, 32, 4096)) == 1);
    CHECK(num_splits(decode(0, 32, 8, 8192)) == 1);
    CHECK(num_splits(decode(1, 32, 8, 0)) == 1);
    CHECK(num_splits(decode(1, 8, 8, 8192, 128, DType::kFloat32)) == 32);
}

TEST_CASE("as many splits as asked for, of whole steps") {
    for (int64_t seqlen_k : {1, 128, 129, 1000, 8192, 100000}) {
        for (int64_t asked : {1, 2, 3, 7, 64, 1000}) {
            Problem p = decode(1, 32, 8, seqlen_k);
            p.num_splits = asked;
            const int splits = num_splits(p);
            CAPTURE(seqlen_k);
            CAPTURE(asked);
            CHECK(splits <= asked);
            CHECK(splits <= ceil_div<int64_t>(seqlen_k, flash_decode::kChunkStep));
            if (seqlen_k == asked * flash_decode::kChunkStep) CHECK(splits == asked);
        }
    }
    Problem p = decode(1, 32, 8, 8192);
    p.num_splits = 7;  // of 1280 keys, not 1170.3
    CHECK(num_splits(p) == 7);
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
    Problem p = decode(1, 32, 8, 8192 + 1, 127);
    const Plan plan = fa101::plan(p, h200(), "fa2_cute", "split_kv");
    CHECK(plan.num_splits == 33);
    CHECK(plan.workspace_bytes == 32 * 33 * (4 + 4 * 128 + 8));
    p.dtype_q = p.dtype_kv = p.dtype_o = DType::kFloat32;  // merged by a second kernel
    CHECK(fa101::plan(p, h200(), "fa2_cute", "split_kv").workspace_bytes ==
          32 * 33 * (4 + 4 * 128));
    CHECK(fa101::plan(decode(64, 32, 8, 8192), h200(), "fa2_cute", "split_kv").workspace_bytes ==
          0);
}

TEST_CASE("a block merges one row where they are few, else one a warp") {
    for (const auto& [rows, expected] : {std::pair{1, 1}, {8, 1}, {9, 4}, {4096, 4}}) {
        const Problem p = decode(1, rows, 1, 8192);
        Plan plan;
        plan.tile = flash_decode::tile(p, h200());
        CHECK(flash_decode::rows_per_merge(plan, p) == expected);
    }
}

TEST_CASE("no two launches have the same nonce, from whatever threads") {
    std::vector<std::vector<uint64_t>> drawn(4);
    std::vector<std::thread> threads;
    for (auto& nonces : drawn) {
        threads.emplace_back([&nonces] {
            for (int i = 0; i < 10000; ++i) nonces.push_back(flash_decode::next_nonce());
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
