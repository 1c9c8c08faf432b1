// The pieces every rung shares, checked on the CPU by brute force.
#include "common/divider.h"
#include "common/float8.h"
#include "common/mask.h"
#include "common/online_softmax.h"
#include "kernel_family.h"
#include "testing/element.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

using namespace fa101;

TEST_CASE("division by a multiplication") {
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
    for (int64_t d : {1, 2, 3, 5, 7, 8, 12, 96, 127, 128, 129, 641, 1 << 20, (1 << 30) - 1, 1 << 30,
                      (1 << 30) + 1, std::numeric_limits<int32_t>::max()}) {
        const Divider divider = Divider::by(d);
        CAPTURE(d);
        // Around multiples of d, small and large ones.
        for (int64_t k : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{1000}, kMax / d / 2,
                          kMax / d - 1, kMax / d}) {
            for (int64_t n : {k * d - 1, k * d, k * d + 1, k * d + d - 1, kMax - k}) {
                if (n < 0 || n > kMax) continue;
                CHECK(divider.quotient(static_cast<int>(n)) == n / d);
                CHECK(divider.remainder(static_cast<int>(n)) == n % d);
            }
        }
    }
    for (int64_t d = 1; d < 300; ++d) {
        const Divider divider = Divider::by(d);
        for (int n = 0; n < 1000; ++n) CHECK(divider.quotient(n) == n / d);
    }
}

TEST_CASE("key blocks: none missed, hardly one visited in vain, none unchecked") {
    for (int seqlen_k : {0, 1, 15, 16, 17, 40}) {
        for (int mask_right : {-20, -3, -1, 0, 1, 7, 40}) {
            for (int width : {0, 1, 5, 17, 100}) {  // mask_left = mask_right - width
                for (int block_m : {1, 8, 16}) {
                    for (int block_n : {1, 16}) {
                        const Mask mask{seqlen_k, mask_right - width, mask_right};
                        for (int m = 0; m < 48; m += block_m) {
                            const int m_end = m + block_m;
                            const int begin = mask.n_block_begin(m, block_n);
                            const int end = mask.n_block_end(m_end, block_n);
                            const int full_begin = mask.n_block_full_begin(m_end, block_n);
                            const int full_end = mask.n_block_full_end(m, block_n);
                            for (int n = 0; n * block_n < 64; ++n) {
                                const TileMask tile = mask.tile(m, block_m).from_key(n * block_n);
                                bool any = false, all = true;
                                for (int i = m; i < m_end; ++i) {
                                    for (int j = n * block_n; j < (n + 1) * block_n; ++j) {
                                        const bool visible = j <= i + mask_right &&
                                                             j >= i + mask_right - width &&
                                                             j < seqlen_k;
                                        CHECK(visible == mask.sees_key(i, j));
                                        const int in_block = j - n * block_n;
                                        CHECK(visible == (in_block >= tile.key_begin(i - m) &&
                                                          in_block < tile.key_end(i - m)));
                                        any |= visible;
                                        all &= visible;
                                    }
                                }
                                const bool visited = begin <= n && n < end;
                                CHECK((!any || visited));
                                CHECK(all == (full_begin <= n && n < full_end));
                                CHECK((!all || visited));
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("bounds beyond 32 bits are clamped, not wrapped") {
    const int64_t huge = std::numeric_limits<int32_t>::max() - 4096;
    const int64_t none = Problem::kUnbounded;
    CHECK(Mask{huge, -none, huge}.key_end(huge) == huge);
    CHECK(Mask{huge, -none, -huge}.key_end(huge - 1) == 0);
    CHECK(Mask{huge, -none, none}.key_begin(huge) == 0);
    CHECK(Mask{huge, huge, none}.key_begin(huge) == huge);
    CHECK(Mask{huge, -none, none}.tile(0, 128).key_end(127) == huge);
    CHECK(Mask{huge, -none, none}.tile(0, 128).key_begin(127) == 0);
}

TEST_CASE("seqlens_k shortens the keys and moves a bottom-right diagonal") {
    Problem p;
    p.seqlen_q = 3, p.seqlen_k = 10;
    p.mask_left = 7 - 4, p.mask_right = 7;  // bottom right, four keys to the left
    const int32_t lengths[] = {5, 0, 99, -1};
    Tensors t;
    t.seqlens_k_ptr = lengths;
    t.seqlens_k_stride = 1;
    p.has_seqlens_k = p.diagonal_follows_seqlens_k = true;
    const Mask five = mask_of(p, t, 0);
    CHECK(five.seqlen_k == 5);
    CHECK(five.key_end(2) == 5);    // the last query sees the last key
    CHECK(five.key_begin(2) == 0);  // and four more
    CHECK(five.key_end(0) == 3);
    CHECK(mask_of(p, t, 1).key_end(2) == 0);
    CHECK(mask_of(p, t, 2).seqlen_k == 10);
    CHECK(mask_of(p, t, 3).seqlen_k == 0);
    p.diagonal_follows_seqlens_k = false;
    CHECK(mask_of(p, t, 0).key_end(0) == 5);
}

TEST_CASE("the online softmax state gives softmax, whatever the order of blocks") {
    const float inf = std::numeric_limits<float>::infinity();
    const std::vector<float> logits = {-inf, -inf, 3.0f, -80.0f, 90.0f, 89.5f, -inf, 1.0f};
    for (size_t block : {1u, 2u, 3u, 8u}) {
        float row_max = -inf, row_sum = 0;
        for (size_t begin = 0; begin < logits.size(); begin += block) {
            const size_t end = std::min(begin + block, logits.size());
            float new_max = row_max;
            for (size_t j = begin; j < end; ++j) new_max = std::max(new_max, logits[j]);
            const float safe = safe_row_max(new_max);
            row_sum *= std::exp2(row_max - safe);
            for (size_t j = begin; j < end; ++j) row_sum += std::exp2(logits[j] - safe);
            row_max = new_max;
        }
        CHECK(row_max == 90.0f);
        CHECK(row_sum == doctest::Approx(1 + std::exp2(-0.5)));
        CHECK(log_sum_exp(row_max, row_sum) ==
              doctest::Approx(std::log(std::exp2(90.0) + std::exp2(89.5))));
    }
}

TEST_CASE("rows without a finite logit") {
    const float inf = std::numeric_limits<float>::infinity();
    CHECK(inverse_row_sum(0.0f) == 0.0f);  // O = 0 instead of 0 / 0
    CHECK(std::isnan(inverse_row_sum(std::numeric_limits<float>::quiet_NaN())));
    CHECK(log_sum_exp(-inf, 0.0f) == -inf);
}

TEST_CASE("fp8: every code comes back, others go to the nearest, ties to even") {
    using testing::bits_to_float;
    int wrong = 0;
    const auto check = [&](float x) {
        wrong += float_to_e4m3(x) != testing::float_to_e4m3(x);
        wrong += float_to_e4m3(-x) != testing::float_to_e4m3(-x);
    };
    for (int code = 0; code < 256; ++code) {
        const float x = testing::e4m3_to_float(static_cast<uint8_t>(code));
        CHECK(float_to_e4m3(x) == code);
        const float next = testing::e4m3_to_float(static_cast<uint8_t>(code + 1));
        for (float around : {x, (x + next) / 2}) {
            const uint32_t bits = testing::float_to_bits(around);
            for (uint32_t other : {bits - 1, bits, bits + 1}) check(bits_to_float(other));
        }
    }
    for (uint32_t bits = 0; bits < 0x7f800000u; bits += 0x3fff1u) check(bits_to_float(bits));
    CHECK(wrong == 0);
    const float inf = std::numeric_limits<float>::infinity();
    CHECK(float_to_e4m3(1e30f) == 0x7e);
    CHECK(float_to_e4m3(-inf) == 0xfe);
    CHECK(float_to_e4m3(std::numeric_limits<float>::quiet_NaN()) % 128 == 0x7f);
}

TEST_CASE("code for an architecture serves its own major version, PTX all later ones") {
    CHECK(archs_serve("75-real;80-real;90-real;80-virtual", 75));
    CHECK(archs_serve("80-real", 86));
    CHECK(archs_serve("80-real;80-virtual", 120));
    CHECK(archs_serve("90a-real", 90));
    CHECK_FALSE(archs_serve("90a-real", 100));
    CHECK_FALSE(archs_serve("86-real", 80));
    CHECK_FALSE(archs_serve("80-real;90-real", 75));
    CHECK_FALSE(archs_serve("80-real", 90));
    CHECK_FALSE(archs_serve("", 90));
}
