#pragma once

#include "../../cpu/kernels.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// Copies what the levels before hold; returns the place behind it.
template <class T>
static inline T* copy_levels(T* to, const T* from, int64_t count) {
    if (count) __builtin_memcpy(to, from, count * sizeof(T));
    return to + count;
}

// The candidate that follows `last` in descending order, ties by the lower one; last = -1: the first of all.
static inline int64_t next_best(const float* sums, int64_t count, int64_t last) {
    int64_t best = -1;
    for (int64_t c = 0; c < count; ++c) {
        const bool taken = last >= 0 && (sums[c] > sums[last] || (sums[c] == sums[last] && c <= last));
        if (!taken && (best < 0 || sums[c] > sums[best])) best = c;
    }
    return best;
}

// A few hundred numbers: not worth waking other threads for.
static void beam_step(const BeamStepArgs& a) {
    const int64_t nodes = a.levels ? a.width : 1, level = a.width * a.k, before = a.levels * level;
    for (int64_t b = 0; b < a.sequences; ++b) {
        const int32_t* expanded = a.chosen + b * a.width;
        const int64_t start = b * (before + level), parents_before = a.levels * a.width;
        int32_t* candidates = copy_levels(a.next_candidates + start, a.candidates + b * before, before);
        float* sums = copy_levels(a.next_log_probs + start, a.log_probs + b * before, before);
        int32_t* parents = copy_levels(a.next_parents + b * (parents_before + a.width), a.parents + b * parents_before,
                                       parents_before);
        for (int64_t w = 0; w < a.width; ++w) {
            parents[w] = a.levels ? expanded[w] : 0;
            const float total = a.levels ? sums[parents[w] - level] : 0.0f;
            for (int64_t i = 0; i < a.k; ++i) {
                const int64_t from = (b * nodes + w) * a.k + i, to = w * a.k + i;
                candidates[to] = w < nodes ? a.ids[from] : 0;
                sums[to] = w < nodes ? total + a.values[from] : -__builtin_inff();
            }
        }
        int64_t best = -1;
        for (int64_t w = 0; w < a.width; ++w) {
            best = next_best(sums, nodes * a.k, best);
            const int64_t to = b * a.width + w;
            a.next_chosen[to] = static_cast<int32_t>(best);
            a.tokens[to] = candidates[best];
            a.origins[to] = static_cast<int32_t>(b * nodes + best / a.k);
        }
    }
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
