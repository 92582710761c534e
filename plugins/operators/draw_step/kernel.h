#pragma once

#include "../beam_step/kernel.h"
#include "../../cpu/pool.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

constexpr float kNothing = -__builtin_inff();

// p of one node: log-probabilities of its tokens, whose values descend; -inf where filtered out.
static void filter_node(const float* values, int64_t support, double temperature, int32_t top_k, double top_p,
                        float* log_probs) {
    const int64_t limit = top_k > 0 && top_k < support ? top_k : support;
    const auto shifted = [&](int64_t i) { return (static_cast<double>(values[i]) - values[0]) / temperature; };
    double total = 0, kept = 0;
    int64_t left = values[0] > kNothing ? limit : 0;
    for (int64_t i = 0; i < left; ++i) total += __builtin_exp(shifted(i));
    if (top_p < 1) {
        int64_t i = 0;
        for (; i < left && kept < top_p * total; ++i) kept += __builtin_exp(shifted(i));
        left = i;
    } else {
        kept = total;
    }
    const double log_total = __builtin_log(kept);
    for (int64_t i = 0; i < support; ++i)
        log_probs[i] = i < left ? static_cast<float>(shifted(i) - log_total) : kNothing;
}

// Perturbed values of a node's children become those given that the best of them is `bound`: in a form that is stable
// far from 0, see redraft/decoding/draws.py.
static void truncate(float* perturbed, int64_t support, double bound) {
    double best = kNothing;
    for (int64_t i = 0; i < support; ++i) best = perturbed[i] > best ? perturbed[i] : best;
    for (int64_t i = 0; i < support; ++i) {
        if (!(perturbed[i] > kNothing)) continue;
        const double value = perturbed[i];
        const double excess = bound - value + __builtin_log1p(-__builtin_exp(value - best));
        const double above = excess > 0 ? excess : 0;
        perturbed[i] = static_cast<float>(bound - above - __builtin_log1p(__builtin_exp(-__builtin_fabs(excess))));
    }
}

// One sequence of a level: its part of the results, and how to write a draw.
struct DrawnLevel {
    const DrawStepArgs& a;
    int64_t sequence, nodes, size;
    const float* log_probs;  // [nodes, support]
    int64_t written = 0;

    void write(int64_t node, int64_t entry, float score, float total) {
        const int64_t place = node * a.support + entry, to = sequence * size + written;
        const int64_t behind = sequence * (a.drawn + size) + a.drawn + written++;
        const bool found = score > kNothing;
        a.next_draws[behind] = found ? static_cast<int32_t>(a.expanded * a.support + place) : -1;
        a.sequence_of[to] = static_cast<int32_t>(sequence);
        a.origins[to] = static_cast<int32_t>(sequence * nodes + (found ? node : 0));
        a.tokens[to] = found ? a.ids[sequence * nodes * a.support + place] : 0;
        if (a.rule != DrawRule::stochastic_beam) return;
        a.next_totals[to] = found ? total : kNothing;
        a.next_gumbels[to] = found ? score : kNothing;
    }

    // The `count` best of `width` scores that start at a node.
    void write_best(const float* scores, int64_t node, int64_t width, int64_t count, const float* totals = nullptr) {
        int64_t best = -1;
        bool left = true;
        for (int64_t i = 0; i < count; ++i) {
            if (left) best = next_best(scores, width, best);
            left = left && best >= 0 && scores[best] > kNothing;
            if (left)
                write(node + best / a.support, best % a.support, scores[best], totals ? totals[best] : 0.0f);
            else
                write(0, 0, kNothing, kNothing);
        }
    }
};

// scores and totals: [nodes, support], scratch.
static void draw_sequence(DrawnLevel level, float* scores, float* totals) {
    const DrawStepArgs& a = level.a;
    const int64_t b = level.sequence, support = a.support, nodes = level.nodes;
    const bool greedy = !(a.temperature[b] > 0), separate = a.rule == DrawRule::independent;
    const int64_t first_row = b * a.noise_rows + (separate ? a.drawn : a.expanded);
    const auto perturb = [&](const float* log_probs, int64_t row, float* to) {
        const float* noise = a.noise + (first_row + row) * support;
        for (int64_t i = 0; i < support; ++i) to[i] = greedy ? log_probs[i] : log_probs[i] + noise[i];
    };
    if (separate && greedy && nodes == 1) {
        level.write_best(level.log_probs, 0, support, a.count);
    } else if (separate) {
        for (int64_t d = 0; d < a.count; ++d) {
            const int64_t node = nodes > 1 ? d : 0;
            perturb(level.log_probs + node * support, d, scores);
            level.write_best(scores, node, support, 1);
        }
    } else if (a.rule == DrawRule::gumbel_top_k) {
        for (int64_t node = 0; node < nodes; ++node) {
            perturb(level.log_probs + node * support, node, scores);
            level.write_best(scores, node, support, a.count);
        }
    } else {
        for (int64_t node = 0; node < nodes; ++node) {
            float *of_node = scores + node * support, *paths = totals + node * support;
            const float above = a.drawn ? a.totals[b * nodes + node] : 0.0f;
            for (int64_t i = 0; i < support; ++i) paths[i] = above + level.log_probs[node * support + i];
            perturb(paths, node, of_node);
            if (!greedy) truncate(of_node, support, a.drawn ? a.gumbels[b * nodes + node] : 0.0f);
        }
        level.write_best(scores, 0, nodes * support, a.count, totals);
    }
}

// A few thousand numbers: not worth waking other threads for.
static void draw_step(const DrawStepArgs& a) {
    const int64_t nodes = draw_nodes(a), size = draw_count(a), before = a.expanded * a.support, level = nodes * a.support;
    PoolLock lock;
    float* scratch = static_cast<float*>(lock.shared_scratch(2 * level * sizeof(float)));
    for (int64_t b = 0; b < a.sequences; ++b) {
        int32_t* ids = copy_levels(a.next_ids + b * (before + level), a.ids_before + b * before, before);
        float* log_probs = copy_levels(a.next_log_probs + b * (before + level), a.log_probs_before + b * before, before);
        copy_levels(a.next_draws + b * (a.drawn + size), a.draws_before + b * a.drawn, a.drawn);
        for (int64_t node = 0; node < nodes; ++node) {
            const bool there = a.drawn == 0 || a.draws_before[(b + 1) * a.drawn - nodes + node] >= 0;
            const int64_t from = (b * nodes + node) * a.support, to = node * a.support;
            for (int64_t i = 0; i < a.support; ++i) ids[to + i] = there ? a.ids[from + i] : 0;
            if (there)
                filter_node(a.values + from, a.support, a.temperature[b] > 0 ? a.temperature[b] : 1, a.top_k[b],
                            a.top_p[b], log_probs + to);
            else
                for (int64_t i = 0; i < a.support; ++i) log_probs[to + i] = kNothing;
        }
        draw_sequence({a, b, nodes, size, log_probs}, scratch, scratch + level);
    }
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
