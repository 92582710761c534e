#pragma once

#include "../cpu/kernels.h"
#include "../cpu/pool.h"
#include "../cpu/simd.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

static void embedding_row(const void* context, int64_t begin, int64_t end, int) {
    const EmbeddingArgs& a = *static_cast<const EmbeddingArgs*>(context);
    for (int64_t r = begin; r < end; ++r) {
        const int64_t id = a.ids[r], panel = id / kPanel, column = id % kPanel;
        float* out = a.out + r * a.in_features;
        if (a.dtype == DType::fp32) {
            const float* w = static_cast<const float*>(a.weight) + panel * a.in_features * kPanel + column;
            for (int64_t k = 0; k < a.in_features; ++k) out[k] = w[k * kPanel];
            continue;
        }
        const int64_t start = panel * ((a.in_features + 1) / 2) * kPanel * 2 + column * 2;
        if (a.dtype == DType::bf16) {
            const uint16_t* w = static_cast<const uint16_t*>(a.weight) + start;
            for (int64_t k = 0; k < a.in_features; ++k) {
                const uint32_t bits = static_cast<uint32_t>(w[(k / 2) * kPanel * 2 + k % 2]) << 16;
                __builtin_memcpy(out + k, &bits, sizeof(bits));
            }
        } else {
            const int8_t* w = static_cast<const int8_t*>(a.weight) + start;
            for (int64_t k = 0; k < a.in_features; ++k)
                out[k] = static_cast<float>(w[(k / 2) * kPanel * 2 + k % 2]) * a.scale[id];
        }
    }
}

static void embedding(const EmbeddingArgs& a) {
    PoolLock lock;
    const Phase phase = {embedding_row, a.rows};
    run_phases(&phase, 1, &a);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
