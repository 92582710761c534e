#pragma once

#include "../linear_topk/topk.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

struct TokenInfoJob {
    const TokenInfoTopKArgs& a;
    TopK topk;
};

// 16 numbers from `at` on, of which the first n count.
template <class T, class F>
static inline f32x16 load_some(const T* at, int64_t n, F load_all) {
    if (n >= 16) return load_all(at);
    T first[16] = {};
    __builtin_memcpy(first, at, n * sizeof(T));
    return load_all(first);
}

// 16 numbers of a table from its number `at` on, of which the first n count.
static inline f32x16 load_info(const TokenInfoTopKArgs& a, int64_t at, int64_t n) {
    switch (a.dtype) {
        case DType::int8: return load_some(static_cast<const int8_t*>(a.table) + at, n, load_int8);
        case DType::bf16:
            return load_some(static_cast<const uint16_t*>(a.table) + at, n, [](const uint16_t* p) { return load(p); });
        default: return load_first(static_cast<const float*>(a.table) + at, n);
    }
}

static void token_info_chunk(const void* context, int64_t begin, int64_t end, int thread) {
    const TokenInfoJob& job = *static_cast<const TokenInfoJob*>(context);
    const TokenInfoTopKArgs& a = job.a;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t r = item / job.topk.chunks, chunk = item % job.topk.chunks, first = chunk * kChunk;
        const float* raw = a.logits + (a.sequences[r] * a.levels + a.level) * a.columns + first;
        const int64_t entry = a.row_of ? a.row_of[a.tokens[r]] : r, left = a.columns - first;
        const f32x16 scale = set1(a.scales ? a.scales[entry] : 1.0f);
        const auto value = [&](const float*, int64_t i, int64_t n) {
            const f32x16 v = load_first(raw + i, n);
            const int64_t informed = a.kept - first - i;
            if (!a.table || informed <= 0) return v;
            return fma(load_info(a, entry * a.kept + first + i, informed), scale, v);
        };
        job.topk.reduce(chunk, r, static_cast<float*>(thread_scratch(thread)), kPanel,
                        left < kChunk ? (left + 15) / 16 * 16 : kChunk, thread, value);
    }
}

static void token_info_merge(const void* context, int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) static_cast<const TokenInfoJob*>(context)->topk.merge(r);
}

static void token_info_topk(const TokenInfoTopKArgs& a) {
    PoolLock lock;
    TokenInfoJob job{a, TopK(a.rows, a.columns, a.k, a.ids, a.values, a.indices, kChunk * sizeof(float))};
    void* scratch = lock.shared_scratch(job.topk.shared_bytes());
    lock.reserve_thread_scratch(job.topk.lists + job.topk.lists_bytes());
    job.topk.begin(scratch);
    const Phase phases[] = {{token_info_chunk, a.rows * job.topk.chunks}, {token_info_merge, a.rows}};
    run_phases(phases, 2, &job);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
