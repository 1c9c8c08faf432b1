// The pieces every rung shares, checked on the CPU by brute force.
#include "common/mask.h"
#include "common/online_softmax.h"
#include "kernel_family.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

using namespace fa101;

TEST_CASE("key blocks: none missed, none visited in vain, none unchecked") {
    for (int seqlen_k : {0, 1, 15, 16, 17, 40}) {
        for (int mask_right : {-20, -3, -1, 0, 1, 7, 40}) {
            for (int block_m : {1, 8, 16}) {
                for (int block_n : {1, 16}) {
                    const Mask mask{seqlen_k, mask_right};
                    for (int m = 0; m < 48; m += block_m) {
                        const int end = mask.n_block_end(m + block_m, block_n);
                        const int full = mask.n_block_full(m, block_n);
                        CHECK(full <= end);
                        for (int n = 0; n * block_n < 64; ++n) {
                            bool any = false, all = true;
                            for (int i = m; i < m + block_m; ++i) {
                                for (int j = n * block_n; j < (n + 1) * block_n; ++j) {
                                    const bool visible = j <= i + mask_right && j < seqlen_k;
                                    CHECK(visible == (j < mask.key_end(i)));
                                    any |= visible;
                                    all &= visible;
                                }
                            }
                            CHECK(any == (n < end));
                            CHECK(all == (n < full));
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("key ends beyond 32 bits are clamped, not wrapped") {
    const int64_t huge = std::numeric_limits<int32_t>::max() - 4096;
    CHECK(Mask{huge, huge}.key_end(huge) == huge);
    CHECK(Mask{huge, -huge}.key_end(huge - 1) == 0);
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
    CHECK(inverse_row_sum(0.0f, /*sees_a_key=*/false) == 0.0f);            // O = 0
    CHECK(std::isnan(0.0f * inverse_row_sum(0.0f, /*sees_a_key=*/true)));  // as 0 / 0
    CHECK(log_sum_exp(-inf, 0.0f) == -inf);
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
