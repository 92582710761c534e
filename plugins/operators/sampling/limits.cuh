// What filters keep of a row's tokens, in the words of both kernels: filter.cu finds it, and kernel.cu applies it.
#pragma once
#include "../../cuda/device.cuh"

namespace redraft {

// Tokens of a larger key are kept, and of this key those of ids up to `last`.
struct Limit {
    uint32_t key;
    int last;

    REDRAFT_DEVICE bool keeps(uint32_t other, int token) const {
        return other > key || (other == key && token <= last);
    }
};

// Floats in the order of integers, -0 and 0 as one.
REDRAFT_DEVICE uint32_t logit_key(float logit) {
    const uint32_t bits = as_bits(logit == 0 ? 0.0f : logit);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

REDRAFT_DEVICE float weight_of(float logit, float top, float inverse_temperature) {
    return expf((logit - top) * inverse_temperature);
}

// Weights are from 0 to 1, so their bits ascend and the two highest bits are free: all others are the key. A weight that
// is no number, as an infinite logit's, has the key of 0.
REDRAFT_DEVICE uint32_t weight_key(float weight) { return weight < 2 ? as_bits(weight) << 2 : 0; }

struct Limits {
    Limit top_k, top_p;  // by keys of logits and of weights

    REDRAFT_DEVICE bool keeps(float logit, float weight, int token) const {
        return top_k.keeps(logit_key(logit), token) && top_p.keeps(weight_key(weight), token);
    }
};

}  // namespace redraft
