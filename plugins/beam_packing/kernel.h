#pragma once

#include "../cpu/kernels.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// Grows each sequence's trie beam by beam: a child stands behind its parent, so a prefix is found by one pass.
static void pack_beams(const PackBeamsArgs& a) {
    const int64_t nodes = 1 + a.width * a.length, words = (nodes + 31) / 32;
    for (int64_t b = 0; b < a.sequences; ++b) {
        int32_t *tokens = a.tokens + b * nodes, *parents = a.parents + b * nodes, *positions = a.positions + b * nodes;
        uint32_t* masks = a.tree_mask + b * nodes * words;
        float* scores = a.scores + b * nodes;
        int32_t size = 0;
        const auto append = [&](int32_t token, int32_t parent, float score) {
            uint32_t* mask = masks + size * words;
            for (int64_t w = 0; w < words; ++w) mask[w] = parent < 0 ? 0 : masks[parent * words + w];
            mask[size / 32] |= 1u << (size % 32);
            tokens[size] = token;
            parents[size] = parent;
            positions[size] = parent < 0 ? a.cache_lengths[b] : positions[parent] + 1;
            scores[size] = score;
            return size++;
        };
        append(a.roots[b], -1, 0.0f);
        for (int64_t w = 0; w < a.width; ++w) {
            const int32_t* beam = a.beams + (b * a.width + w) * a.length;
            const float* log_probs = a.log_probs + (b * a.width + w) * a.length;
            const bool is_none = log_probs[a.length - 1] == -__builtin_inff();
            for (int64_t depth = 0, node = 0; depth < a.length && !is_none; ++depth) {
                int32_t child = node + 1;
                while (child < size && (parents[child] != node || tokens[child] != beam[depth])) ++child;
                node = child < size ? child : append(beam[depth], node, log_probs[depth]);
            }
        }
        a.sizes[b] = size;
        for (int64_t node = size; node < nodes; ++node) {
            tokens[node] = positions[node] = 0;
            parents[node] = -1;
            scores[node] = -__builtin_inff();
            for (int64_t w = 0; w < words; ++w) masks[node * words + w] = 0;
        }
    }
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
