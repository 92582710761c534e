// `redraft.decoding.verification.walk` of a batch's trees.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "../cpu/kernels.h"
#include "forest.h"

namespace redraft {

// The index of the largest value, and of equal ones the first; of the first NaN where there is one, as numpy has it.
inline int32_t largest(const float* values, int64_t count) {
    using Floats = float __attribute__((vector_size(16), aligned(4), may_alias));
    using Flags = int32_t __attribute__((vector_size(16)));
    constexpr int64_t lanes = 4, vectors = 4, block = 4096;
    float best = -INFINITY;
    int64_t best_block = 0;
    Flags unordered = {};
    for (int64_t start = 0; start < count; start += block) {
        const int64_t end = std::min(start + block, count);
        Floats most[vectors];
        std::fill(most, most + vectors, Floats{} - INFINITY);
        int64_t index = start;
        for (; index + vectors * lanes <= end; index += vectors * lanes)
#pragma GCC unroll 4
            for (int64_t v = 0; v < vectors; ++v) {
                const Floats here = *reinterpret_cast<const Floats*>(values + index + v * lanes);
                most[v] = here > most[v] ? here : most[v];
                unordered |= here != here;
            }
        float most_here = -INFINITY;
        for (; index < end; ++index) {
            most_here = std::max(most_here, values[index]);
            unordered[0] |= values[index] != values[index];
        }
        for (const Floats& each : most)
            for (int64_t lane = 0; lane < lanes; ++lane) most_here = std::max(most_here, each[lane]);
        if (most_here > best) {
            best = most_here;
            best_block = start;
        }
    }
    if (unordered[0] | unordered[1] | unordered[2] | unordered[3])
        return static_cast<int32_t>(std::find_if(values, values + count, [](float v) { return v != v; }) - values);
    return static_cast<int32_t>(std::find(values + best_block, values + count, best) - values);
}

// Chooses as each tree's sampler does, at the nodes that are visited.
struct LogitChooser {
    const float* logits;  // [rows, vocabulary]
    int64_t vocabulary;
    const ChooseArgs* const* draws;  // by tree; null: the token of the largest logit
    const int64_t* positions;        // by tree, the root's output position
    const char* (*choose)(const ChooseArgs*);

    int32_t operator()(int64_t tree, int64_t row, int64_t depth) const {
        const float* values = logits + row * vocabulary;
        if (!draws[tree]) return largest(values, vocabulary);
        int32_t token;
        ChooseArgs args = *draws[tree];
        args.f.logits = values;
        args.f.vocabulary = vocabulary;
        args.position = positions[tree] + depth;
        args.token = &token;
        if (const char* message = choose(&args)) throw std::runtime_error(message);
        return token;
    }
};

// Follow, in each tree, the tokens that `choose(tree, row, depth)` gives: the accepted path's nodes, root first, and the
// tokens, back to back from `path_offsets` on. A path ends after one of the sequence's end tokens. Where siblings repeat
// a token it follows all of them, and stands at the first.
template <class Choose>
inline void walk_trees(const Trees& trees, const Choose& choose, const int32_t* ends, const int32_t* end_offsets,
                       int32_t* path_offsets, int32_t* path, int32_t* tokens) {
    std::vector<uint8_t> here, next;
    int32_t length = 0;
    for (int64_t b = 0; b < trees.count; ++b) {
        const int64_t first = trees.offsets[b], size = trees.offsets[b + 1] - first;
        const int32_t *end_ids = ends + end_offsets[b], *last_id = ends + end_offsets[b + 1];
        path_offsets[b] = length;
        here.assign(size, 0);
        here[0] = 1;
        for (int64_t node = 0; node >= 0;) {
            const int32_t token = choose(b, first + node, length - path_offsets[b]);
            path[length] = static_cast<int32_t>(node);
            tokens[length++] = token;
            node = -1;
            if (std::find(end_ids, last_id, token) != last_id) break;
            next.assign(size, 0);
            for (int64_t below = size - 1; below > 0; --below)
                if (here[trees.parents[first + below]] && trees.tokens[first + below] == token) next[node = below] = 1;
            here.swap(next);
        }
    }
    path_offsets[trees.count] = length;
}

}  // namespace redraft
