// The caller's bias and boolean mask as one query head sees them: element (query, key) of either.
// They are read where they are used, an element at a time: of a block of logits each is needed
// once.
#pragma once

#include <fa101/params.h>

#include "common/host_device.h"
#include "common/online_softmax.h"

#include <cmath>
#include <cstdint>

namespace fa101 {

// A bias for base-2 logits. What is finite stays finite: models hide keys by the lowest finite
// float, and log2(e) times that is -inf, which would hide them from rows that see no other key,
// too. So what overflows is taken as it is, large enough.
FA101_HOST_DEVICE float base2_bias(float bias) {
    const float scaled = bias * kLog2e;
    return fabsf(scaled) == INFINITY ? bias : scaled;
}

struct BiasMask {
    const void* bias;     // null: none
    const uint8_t* mask;  // null: none
    int64_t bias_row_stride, bias_key_stride;
    int64_t mask_row_stride, mask_key_stride;
    int bias_bytes;  // of an element

    FA101_HOST_DEVICE BiasMask(const Problem& p, const Tensors& t, int64_t batch, int64_t head)
        : bias(t.bias_ptr),
          mask(t.mask_ptr),
          bias_row_stride(t.bias_row_stride),
          bias_key_stride(t.bias_key_stride),
          mask_row_stride(t.mask_row_stride),
          mask_key_stride(t.mask_key_stride),
          bias_bytes(p.dtype_bias == DType::kFloat32 ? 4 : 2) {
        if (bias != nullptr) {
            bias = static_cast<const char*>(bias) +
                   (batch * t.bias_batch_stride + head * t.bias_head_stride) * bias_bytes;
        }
        if (mask != nullptr) mask += batch * t.mask_batch_stride + head * t.mask_head_stride;
    }

    FA101_HOST_DEVICE bool hides(int64_t query, int64_t key) const {
        return mask != nullptr && !mask[query * mask_row_stride + key * mask_key_stride];
    }

    // The element to add to the logit, of Problem::dtype_bias; only where there is a bias.
    FA101_HOST_DEVICE const void* bias_at(int64_t query, int64_t key) const {
        const int64_t element = query * bias_row_stride + key * bias_key_stride;
        return static_cast<const char*>(bias) + element * bias_bytes;
    }
};

}  // namespace fa101
