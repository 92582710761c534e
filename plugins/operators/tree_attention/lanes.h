// Every score is a dot product summed over the head's elements in order, and every output element is
// summed over the visible keys in ascending order; masked keys have weight exactly 0. So a row's result
// depends on its visible keys alone: not on other rows, nor on how the work is divided.
#pragma once

#include "job.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// Queries that are multiplied with keys at once, those with values, and values' 16 columns: sums stay in registers.
#if defined(__AVX512F__)
constexpr int kScoreTile = 4, kValueTile = 5, kValueParts = 4;
#else
constexpr int kScoreTile = 2, kValueTile = 2, kValueParts = 2;
#endif

// keys: dwords of kKeys keys, transposed: [head_size / elements per dword][kKeys].
template <class C, int QUERIES>
static inline void score_tile(const float* q, int64_t d, const uint32_t* keys, float* scores, int64_t stride) {
    f32x16 acc[QUERIES][2];
    for (int i = 0; i < QUERIES; ++i) acc[i][0] = acc[i][1] = zero();
    constexpr int64_t kElements = 4 / sizeof(C);
    for (int64_t j = 0; j < d; ++j) {
        f32x16 k0, k1;
        if constexpr (sizeof(C) == 4) {
            k0 = load(reinterpret_cast<const float*>(keys) + j * kKeys);
            k1 = load(reinterpret_cast<const float*>(keys) + j * kKeys + 16);
        } else {
            const uint16_t* pair = reinterpret_cast<const uint16_t*>(keys + j / kElements * kKeys);
            k0 = j % 2 ? load_odd_bf16(pair) : load_even_bf16(pair);
            k1 = j % 2 ? load_odd_bf16(pair + 32) : load_even_bf16(pair + 32);
        }
#pragma GCC unroll 8
        for (int i = 0; i < QUERIES; ++i) {
            const f32x16 x = set1(q[i * d + j]);
            acc[i][0] = fma(x, k0, acc[i][0]);
            acc[i][1] = fma(x, k1, acc[i][1]);
        }
    }
    for (int i = 0; i < QUERIES; ++i) {
        store(scores + i * stride, acc[i][0]);
        store(scores + i * stride + 16, acc[i][1]);
    }
}

template <class C, int QUERIES = kScoreTile>
static inline void dispatch_score(int64_t count, const float* q, int64_t d, const uint32_t* keys, float* scores,
                                  int64_t stride) {
    if (count >= QUERIES) return score_tile<C, QUERIES>(q, d, keys, scores, stride);
    if constexpr (QUERIES > 1) dispatch_score<C, QUERIES - 1>(count, q, d, keys, scores, stride);
}

// scores[query][key] for keys [from, to); from is a multiple of kKeys. tile: room for 2 x kKeys rows.
template <class C>
static inline void score(const AttentionJob& job, const Block& b, const float* q, int64_t from, int64_t to,
                         uint32_t* tile, float* scores) {
    const int64_t d = job.a.head_size, queries = b.rows * job.group;
    for (int64_t key = from; key < to; key += kKeys) {
        transpose_keys<C>(job, b, key, to, tile);
        for (int64_t i = 0; i < queries; i += kScoreTile)
            dispatch_score<C>(queries - i, q + i * d, d, tile, scores + i * job.padded + key, job.padded);
    }
}

// weights[query][key] = exp(score - maximum over the visible keys); 0 for masked keys and the padding.
static inline void weigh(const AttentionJob& job, const Block& b, const float* scores, float* weights) {
    const int64_t keys = job.keys(b), context = job.a.cache_lengths[b.sequence], earlier = job.earlier(b);
    const int64_t first = job.first_key(b), end = (keys + 15) / 16 * 16;
    for (int64_t i = 0; i < b.rows * job.group; ++i) {
        const int64_t row = b.first + i / job.group, own = earlier + row;
        const float* s = scores + i * job.padded;
        float* w = weights + i * job.padded;
        if (w != s) __builtin_memcpy(w + first, s + first, (keys - first) * sizeof(float));
        const bool causal = job.causal(b, row);
        int64_t seen = context;
        for (int64_t t = 0; t < keys - context; ++t) {
            if (t == own || (causal ? t < own : job.listed(b, row, t))) ++seen;
            else w[context + t] = -__builtin_inff();
        }
        // Of its path, in the order of places, a row sees only the last `window`.
        int64_t hidden = job.a.window ? seen - job.a.window - first : 0;
        for (int64_t j = first; j < keys && hidden > 0; ++j)
            if (w[j] != -__builtin_inff()) {
                w[j] = -__builtin_inff();
                --hidden;
            }
        for (int64_t j = keys; j < end; ++j) w[j] = -__builtin_inff();
        f32x16 top = set1(-__builtin_inff());
        for (int64_t j = first; j < end; j += 16) top = max(top, load(w + j));
        const f32x16 m = set1(maximum(top));
        for (int64_t j = first; j < end; j += 16) store(w + j, exp(sub(load(w + j), m)));
    }
}

// Sums over the keys [first, keys) of a head's part of the cache, `values`, from a column on.
template <class C, int QUERIES, int PARTS>
static inline void value_tile(const AttentionJob& job, const float* weights, const C* values, int64_t first,
                              int64_t keys, float* const* out) {
    f32x16 acc[QUERIES][PARTS], total[QUERIES];
    for (int i = 0; i < QUERIES; ++i) {
        total[i] = zero();
        for (int j = 0; j < PARTS; ++j) acc[i][j] = zero();
    }
    const int64_t d = job.a.head_size, stride = job.padded, rows = job.a.cache_rows;
    for (int64_t key = first; key < keys;) {
        const C* value = values + job.at(key);
        const int64_t end = key < rows ? rows : (key / rows + 1) * rows;  // the ring's
        for (const int64_t to = end < keys ? end : keys; key < to; ++key, value += d) {
            f32x16 v[PARTS];
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; ++j) v[j] = load(value + 16 * j);
#pragma GCC unroll 8
            for (int i = 0; i < QUERIES; ++i) {
                const f32x16 w = set1(weights[i * stride + key]);
                total[i] = add(total[i], w);
#pragma GCC unroll 4
                for (int j = 0; j < PARTS; ++j) acc[i][j] = fma(w, v[j], acc[i][j]);
            }
        }
    }
    for (int i = 0; i < QUERIES; ++i)
        for (int j = 0; j < PARTS; ++j) store(out[i] + 16 * j, div(acc[i][j], total[i]));
}

template <class C, int PARTS, int QUERIES = kValueTile>
static inline void dispatch_value(int64_t count, const AttentionJob& job, const float* weights, const C* values,
                                  int64_t first, int64_t keys, float* const* out) {
    if (count >= QUERIES) return value_tile<C, QUERIES, PARTS>(job, weights, values, first, keys, out);
    if constexpr (QUERIES > 1) dispatch_value<C, PARTS, QUERIES - 1>(count, job, weights, values, first, keys, out);
}

// The block's output columns [from, to) of each head.
template <class C>
static inline void gather_values(const AttentionJob& job, const Block& b, const float* weights, int64_t from,
                                 int64_t to) {
    const TreeAttentionArgs& a = job.a;
    const int64_t d = a.head_size, first = job.first_key(b), keys = job.keys(b);
    const C* values = static_cast<const C*>(a.v_cache) + job.cache_offset(b);
    for (int64_t i = 0; i < b.rows * job.group; i += kValueTile) {
        const int64_t count = b.rows * job.group - i;
        float* out[kValueTile];
        for (int64_t j = 0; j < kValueTile && j < count; ++j) {
            const int64_t row = a.row_offsets[b.sequence] + b.first + (i + j) / job.group;
            out[j] = a.out + (row * a.heads + b.head * job.group + (i + j) % job.group) * d + from;
        }
        for (int64_t column = from; column < to;) {
            const int64_t width = to - column >= 16 * kValueParts ? 16 * kValueParts : 32;
            const float* w = weights + i * job.padded;
            if (width == 16 * kValueParts)
                dispatch_value<C, kValueParts>(count, job, w, values + column, first, keys, out);
            else
                dispatch_value<C, 2>(count, job, w, values + column, first, keys, out);
            for (int64_t j = 0; j < kValueTile && j < count; ++j) out[j] += width;
            column += width;
        }
    }
}

// Attention by vector registers: a thread's scratch, and what it does with a block.
template <class C>
struct Lanes {
    using Cache = C;
    static constexpr int64_t kBlockQueries = 24, kItemsPerThread = 4;

    const AttentionJob& job;
    float* q;
    uint32_t* tile;
    float* scores;  // [queries, padded]

    Lanes(const AttentionJob& of, int thread)
        : job(of),
          q(static_cast<float*>(thread_scratch(thread))),
          tile(reinterpret_cast<uint32_t*>(q + job.queries * job.a.head_size)),
          scores(reinterpret_cast<float*>(tile + 2 * kKeys * job.a.head_size)) {}
    static int64_t bytes(const AttentionJob& job) {
        return 4 * (job.queries * (job.a.head_size + job.padded) + 2 * kKeys * job.a.head_size);
    }

    void score_keys(const Block& b, int64_t from, int64_t to, float* out) const {
        load_queries(job, b, q);
        score<C>(job, b, q, from, to, tile, out);
    }
    void attend(const Block& b, const float* scored, int64_t from, int64_t to) const {
        weigh(job, b, scored, scores);
        gather_values<C>(job, b, scores, from, to);
    }
};

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
