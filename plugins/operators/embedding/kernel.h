#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"
#include "../linear/blocks.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// Row `id` of weights that are packed as [panel][group of features][32][feature of the group].
template <DType DTYPE, class T, class F>
static inline void unpack_row(const EmbeddingArgs& a, int64_t id, float* out, F value) {
    constexpr int64_t group = feature_group(DTYPE);
    const int64_t groups = (a.in_features + group - 1) / group;
    const T* w = static_cast<const T*>(a.weight) + (id / kPanel * groups * kPanel + id % kPanel) * group;
    for (int64_t k = 0; k < a.in_features; ++k) out[k] = value(w[k / group * kPanel * group + k % group]);
}

static inline float float_of_bf16(uint16_t w) {
    const uint32_t bits = static_cast<uint32_t>(w) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

// Row `id` of weights in blocks, each number as the format's own arithmetic has it.
static inline void dequantize_row(const EmbeddingArgs& a, int64_t id, float* out) {
    int64_t first = 0;  // half-panel of the row's segment
    const BlockSegment* segment = a.segments;
    for (; id >= segment->rows; ++segment) {
        id -= segment->rows;
        first += half_panels(segment->rows);
    }
    const HalfPanel at =
        find_half_panel(a.segments, a.segment_count, a.weight, a.in_features, first + id / kHalfPanel);
    with_form(segment->form, [&]<BlockForm F>() {
        block_row<F>(at.data, id % kHalfPanel, span_groups(*segment), a.in_features, out);
    });
}

static void embedding_row(const void* context, int64_t begin, int64_t end, int) {
    const EmbeddingArgs& a = *static_cast<const EmbeddingArgs*>(context);
    for (int64_t r = begin; r < end; ++r) {
        const int64_t id = a.ids[r] < a.out_features ? a.ids[r] : a.out_features - 1;
        float* out = a.out + r * a.in_features;
        if (a.dtype == DType::blocks)
            dequantize_row(a, id, out);
        else if (a.dtype == DType::bf16)
            unpack_row<DType::bf16, uint16_t>(a, id, out, float_of_bf16);
        else
            unpack_row<DType::fp32, float>(a, id, out, [](float w) { return w; });
        if (!a.residual && a.factor == 1.0f) continue;
        for (int64_t i = 0; i < a.in_features; i += 16) {
            const int64_t n = a.in_features - i;
            const f32x16 v = mul(load_first(out + i, n), set1(a.factor));
            store_first(out + i, a.residual ? add(v, load_first(a.residual + r * a.in_features + i, n)) : v, n);
        }
    }
}

static void embedding(const EmbeddingArgs& a) {
    PoolLock lock;
    const Phase phase = {embedding_row, a.rows};
    run_phases(&phase, 1, &a);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
