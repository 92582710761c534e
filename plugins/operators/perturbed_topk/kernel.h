#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"
#include "../../cpu/token_noise.h"
#include "../beam_step/kernel.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// Scratch of one node, each of `m` rounded up to whole vectors.
struct PerturbedNode {
    float *scores, *weights;

    PerturbedNode(int thread, int64_t padded) : scores(static_cast<float*>(thread_scratch(thread))), weights(scores + padded) {}
};

// How many of a node's tokens top-k and top-p leave, given their values, which descend, and their weights.
static int64_t left_over(const float* values, const float* weights, int64_t m, int32_t top_k, float top_p) {
    const int64_t limit = top_k > 0 && top_k < m ? top_k : m;
    int64_t left = 0;
    if (top_p < 1) {
        float total = 0, kept = 0;
        for (int64_t i = 0; i < limit; ++i) total += weights[i];
        for (; left < limit && kept < top_p * total; ++left) kept += weights[left];
    } else {
        left = limit;
    }
    while (left > 0 && !(values[left - 1] > -__builtin_inff())) --left;
    return left;
}

// Writes exp(scale * (x - top)) of m numbers, zeros up to whole vectors.
static void exponentials(const float* x, int64_t m, float top, float scale, float* to) {
    for (int64_t i = 0; i < m; i += 16) {
        const f32x16 v = exp(mul(set1(scale), sub(load_first(x + i, m - i), set1(top))));
        store(to + i, zero());
        store_first(to + i, v, m - i < 16 ? m - i : 16);
    }
}

// One node of a sequence that is not greedy.
static void perturbed_node(const PerturbedTopKArgs& a, int64_t row, int64_t sequence, PerturbedNode scratch) {
    const float* values = a.values + row * a.m;
    const int32_t* ids = a.ids + row * a.m;
    const float inverse = 1 / a.temperature[sequence], sharpness = a.sharpness[sequence];
    exponentials(values, a.m, values[0], inverse, scratch.weights);
    const int64_t left = left_over(values, scratch.weights, a.m, a.top_k[sequence], a.top_p[sequence]);

    const uint32_t low = static_cast<uint32_t>(a.seeds[2 * sequence]), high = static_cast<uint32_t>(a.seeds[2 * sequence + 1]);
    const uint64_t seed = uint64_t{high} << 32 | low;
    const uint32_t position = static_cast<uint32_t>(a.positions[sequence]) + static_cast<uint32_t>(a.level);
    TokenNoise(seed, position).of_tokens(ids, left, scratch.weights);
    float best = -__builtin_inff();
    for (int64_t i = 0; i < left; ++i) {
        const float score = sharpness * ((values[i] - values[0]) * inverse - __builtin_logf(scratch.weights[i]));
        scratch.scores[i] = score;
        best = score > best ? score : best;
    }
    exponentials(scratch.scores, left, best, 1, scratch.weights);
    float total = 0;
    for (int64_t i = 0; i < left; ++i) total += scratch.weights[i];
    const float log_total = best + __builtin_logf(total);

    int64_t place = -1;
    for (int64_t i = 0; i < a.k; ++i) {
        place = i < left ? next_best(scratch.scores, left, place) : i;
        a.next_values[row * a.k + i] = i < left ? scratch.scores[place] - log_total : -__builtin_inff();
        a.next_ids[row * a.k + i] = ids[place];
    }
}

static void perturbed_rows(const void* context, int64_t begin, int64_t end, int thread) {
    const PerturbedTopKArgs& a = *static_cast<const PerturbedTopKArgs*>(context);
    const int64_t nodes = a.rows / a.sequences;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t sequence = row / nodes;
        if (a.temperature[sequence] > 0) {
            perturbed_node(a, row, sequence, PerturbedNode(thread, (a.m + 15) / 16 * 16));
            continue;
        }
        __builtin_memcpy(a.next_values + row * a.k, a.values + row * a.m, a.k * sizeof(float));
        __builtin_memcpy(a.next_ids + row * a.k, a.ids + row * a.m, a.k * sizeof(int32_t));
    }
}

static void perturbed_topk(const PerturbedTopKArgs& a) {
    PoolLock lock;
    lock.reserve_thread_scratch(2 * ((a.m + 15) / 16 * 16) * sizeof(float));
    bool any = false;
    for (int64_t b = 0; b < a.sequences; ++b) any = any || a.temperature[b] > 0;
    if (!any) return perturbed_rows(&a, 0, a.rows, 0);  // copies: not worth waking other threads for
    const Phase phase{perturbed_rows, a.rows};
    run_phases(&phase, 1, &a);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
