// TreeAttention in bf16, in three kernels, one after the other on a stream: commit_write, split, combine (README.md,
// "CUDA"; the first and the last are rows.cuh's).
// Every load of keys and values is 16 bytes that go into a tensor core's fragment as they are: the order of a product's
// inner index and of an output's columns is free, so both follow memory, and nothing passes through shared memory.
#include "rows.cuh"

namespace redraft {
namespace {

constexpr int kTile = 64;  // queries of a block; a query is a row under one of its query heads

// A query's row among its sequence's, and which of the rows behind the context it sees. A window hides the first
// `hidden` rows of its path.
struct Sight {
    const uint32_t* mask;
    int words, own;
    bool causal;
    int hidden;

    REDRAFT_DEVICE bool sees(int row) const {
        return row == own || (causal ? row < own : row < 32 * words && (mask[row / 32] >> (row % 32) & 1u));
    }
    // Rows of the path behind the context that stand before this one.
    REDRAFT_DEVICE int before(int row) const {
        if (causal) return row;
        int rows = 0;
        for (int w = 0; w < words && 32 * w < row; ++w)
            rows += count_bits(row - 32 * w >= 32 ? mask[w] : mask[w] & ((1u << (row - 32 * w)) - 1u));
        return rows;
    }
    REDRAFT_DEVICE bool in_window(int place, int context) const {
        return hidden <= 0 || (place < context ? place : context + before(place - context)) >= hidden;
    }
};

// Softmax over some keys of 16 queries, of which a lane holds rows g and g + 8: maxima in base 2, sums and weighted
// values; element i of column tile 8 c + j is output column 64 c + 16 t + 8 (i % 2) + j of row g + 8 (i / 2).
template <int D>
struct Partial {
    float maximum[2], sum[2], values[D / 8][4];

    // Scales what is there to a new maximum.
    REDRAFT_DEVICE void raise(int half, float to) {
        const float factor = maximum[half] == kNone ? 0.0f : exp2f(maximum[half] - to);
        maximum[half] = to;
        sum[half] *= factor;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
            values[i][2 * half] *= factor;
            values[i][2 * half + 1] *= factor;
        }
    }
};

// Scores and weighted values of keys `key` to `key + Keys - 1`. Those from `end` on are not there: only the last rows'
// keys can end within, and no row sees what stands behind them.
template <int D, int Keys>
REDRAFT_DEVICE void attend(const uint4 (&q)[D / 32][2], const uint16_t* keys, const uint16_t* values, int key, int end,
                           int context, const Sight (&sight)[2], int g, int t, Partial<D>& state) {
    uint4 k[Keys / 8][D / 32], v[Keys / 8][2][D / 64];
#pragma unroll
    for (int i = 0; i < Keys / 8; ++i) {
        const uint16_t* row = keys + static_cast<int64_t>(least(key + 8 * i + g, end - 1)) * D + 8 * t;
#pragma unroll
        for (int c = 0; c < D / 32; ++c) k[i][c] = load16(row + 32 * c);
    }
#pragma unroll
    for (int i = 0; i < Keys / 8; ++i)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const uint16_t* row = values + static_cast<int64_t>(least(key + 8 * i + 2 * t + odd, end - 1)) * D + 8 * g;
#pragma unroll
            for (int c = 0; c < D / 64; ++c) v[i][odd][c] = load16(row + 64 * c);
        }

    float scores[Keys / 8][4] = {};
#pragma unroll
    for (int c = 0; c < D / 32; ++c)
#pragma unroll
        for (int i = 0; i < Keys / 8; ++i) {
            mma(scores[i], q[c][0].x, q[c][1].x, q[c][0].y, q[c][1].y, k[i][c].x, k[i][c].y);
            mma(scores[i], q[c][0].z, q[c][1].z, q[c][0].w, q[c][1].w, k[i][c].z, k[i][c].w);
        }

    constexpr float kScale = (D == 64 ? 0.125f : 0.08838834764831845f) * 1.4426950408889634f;
    const bool all = key + Keys <= context && key >= most(sight[0].hidden, sight[1].hidden);
    float top[2] = {state.maximum[0], state.maximum[1]};
#pragma unroll
    for (int i = 0; i < Keys / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int place = key + 8 * i + 2 * t + e % 2;
            const bool seen = all || ((place < context || sight[e / 2].sees(place - context)) &&
                                      sight[e / 2].in_window(place, context));
            scores[i][e] = seen ? scores[i][e] * kScale : kNone;
            top[e / 2] = fmaxf(top[e / 2], scores[i][e]);
        }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half], exchange(top[half], 1));
        top[half] = fmaxf(top[half], exchange(top[half], 2));
        state.raise(half, top[half]);
    }
#pragma unroll
    for (int i = 0; i < Keys / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            scores[i][e] = scores[i][e] == kNone ? 0.0f : exp2f(scores[i][e] - top[e / 2]);
            state.sum[e / 2] += scores[i][e];
        }

#pragma unroll
    for (int i = 0; i < Keys / 8; i += 2) {
        const uint32_t a0 = pair(scores[i][0], scores[i][1]), a1 = pair(scores[i][2], scores[i][3]);
        const uint32_t a2 = pair(scores[i + 1][0], scores[i + 1][1]), a3 = pair(scores[i + 1][2], scores[i + 1][3]);
#pragma unroll
        for (int c = 0; c < D / 64; ++c) {
            const uint4 v0 = v[i][0][c], v1 = v[i][1][c], v8 = v[i + 1][0][c], v9 = v[i + 1][1][c];
            const uint32_t w0[4] = {v0.x, v0.y, v0.z, v0.w}, w1[4] = {v1.x, v1.y, v1.z, v1.w};
            const uint32_t w8[4] = {v8.x, v8.y, v8.z, v8.w}, w9[4] = {v9.x, v9.y, v9.z, v9.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                mma(state.values[8 * c + 2 * w], a0, a1, a2, a3, low_halves(w0[w], w1[w]), low_halves(w8[w], w9[w]));
                mma(state.values[8 * c + 2 * w + 1], a0, a1, a2, a3, high_halves(w0[w], w1[w]),
                    high_halves(w8[w], w9[w]));
            }
        }
    }
}

// Block (tile of queries, KV head, split of the keys). Tile i of sequence b is tile i + row_offsets[b] group / 64 + b of
// the grid: that leaves each sequence enough tiles, and needs no table. Few queries share out the keys among the warps.
template <int D, int Keys>
REDRAFT_DEVICE void split(const uint16_t* q, const int* row_offsets, const int* slots, const int* cache_lengths,
                          const int* starts, const uint32_t* tree_mask, const uint16_t* k_cache, const uint16_t* v_cache,
                          int rows, int sequences, int words, int cache_slots, int cache_rows, int heads, int kv_heads,
                          int window, float* partial, float* stats) {
    __shared__ int sequence;
    __shared__ float merged[kWarps - 1][D / 2 + 4][32];
    const int group = heads / kv_heads, tile = blockIdx.x, head = blockIdx.y;
    if (threadIdx.x == 0) sequence = -1;
    __syncthreads();
    const auto last_tile = [=](int bound, int b) { return within(row_offsets[bound], 0, rows) * group / kTile + b; };
    for (int b = threadIdx.x; b < sequences; b += kThreads)
        if (last_tile(b, b) <= tile && tile <= last_tile(b + 1, b)) sequence = b;
    __syncthreads();
    if (sequence < 0) return;
    const auto [begin, count, context, start, slot] =
        span_of(sequence, row_offsets, slots, cache_lengths, starts, rows, cache_slots, cache_rows);
    const int first_query = (tile - (begin * group / kTile + sequence)) * kTile;
    const int queries = least(kTile, count * group - first_query);
    if (queries <= 0) return;
    const int all_keys = start + (first_query + queries - 1) / group + 1, parts = gridDim.z;
    const int share = ((all_keys + parts - 1) / parts + kTile - 1) / kTile * kTile;
    const int from = blockIdx.z * share, end = least(all_keys, from + share);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int query_warps = queries <= 16 ? 1 : queries <= 32 ? 2 : 4, key_warps = kWarps / query_warps;
    const int query = warp % query_warps * 16 + g, key_warp = warp / query_warps;
    int64_t at[2];  // place of the lane's queries in q
    Sight sight[2];
    uint4 fragments[D / 32][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int which = first_query + least(query + 8 * half, queries - 1), row = which / group;
        at[half] = static_cast<int64_t>(begin + row) * heads + head * group + which % group;
        sight[half] = {tree_mask + static_cast<int64_t>(begin + row) * words, words, start - context + row, true, 0};
        for (int w = 0; w < words; ++w) sight[half].causal = sight[half].causal && !sight[half].mask[w];
        if (window) sight[half].hidden = context + sight[half].before(sight[half].own) + 1 - window;
#pragma unroll
        for (int c = 0; c < D / 32; ++c) fragments[c][half] = load16(q + at[half] * D + 32 * c + 8 * t);
    }
    const int64_t place = (static_cast<int64_t>(slot) * kv_heads + head) * cache_rows * D;
    Partial<D> state = {{kNone, kNone}, {}, {}};
    for (int key = from + key_warp * Keys; key < end; key += key_warps * Keys)
        attend<D, Keys>(fragments, k_cache + place, v_cache + place, key, end, context, sight, g, t, state);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state.sum[half] += exchange(state.sum[half], 1);
        state.sum[half] += exchange(state.sum[half], 2);
    }

    if (key_warp) {
        float (*mine)[32] = merged[warp - query_warps];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mine[2 * half][lane] = state.maximum[half];
            mine[2 * half + 1][lane] = state.sum[half];
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) mine[4 + i][lane] = state.values[i / 4][i % 4];
    }
    __syncthreads();
    if (key_warp) return;
    for (int other = 1; other < key_warps; ++other) {
        float (*theirs)[32] = merged[warp + (other - 1) * query_warps];
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float maximum = theirs[2 * half][lane];
            state.raise(half, fmaxf(state.maximum[half], maximum));
            factor[half] = maximum == kNone ? 0.0f : exp2f(maximum - state.maximum[half]);
            state.sum[half] += factor[half] * theirs[2 * half + 1][lane];
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) state.values[i / 4][i % 4] += factor[i % 4 / 2] * theirs[4 + i][lane];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (query + 8 * half >= queries) continue;
        const int64_t out = static_cast<int64_t>(blockIdx.z) * rows * heads + at[half];
        if (t == 0) {
            stats[2 * out] = state.maximum[half];
            stats[2 * out + 1] = state.sum[half];
        }
        if (state.sum[half] == 0.0f) continue;
#pragma unroll
        for (int i = 0; i < D / 4; i += 4) {  // 16 columns of each 64 are this lane's, in this order
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = state.values[i / 16 * 8 + i % 8 + e][2 * half + i / 8 % 2];
            *reinterpret_cast<float4*>(partial + out * D + i / 16 * 64 + 16 * t + i % 16) = {x[0], x[1], x[2], x[3]};
        }
    }
}

}  // namespace
}  // namespace redraft

// Arguments: inputs, int32 scalars, outputs (tensorrt_plugin.py declares them). The caches come in as inputs and, at the
// same address, as outputs.
#define REDRAFT_TREE_ATTENTION(D, Keys)                                                                                \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads) tree_attention_commit_write_##D(                   \
        const uint16_t* qkv, const int* positions, const int* row_offsets, const int* slots, const int* cache_lengths, \
        const int* starts, const int* commit_src, const int* commit_offsets, const float* rope_table, const uint16_t*, \
        const uint16_t*, int rows, int commits, int commit_bounds, int max_positions, int cache_slots, int cache_rows, \
        int heads, int kv_heads, uint16_t* q, uint16_t* k_cache, uint16_t* v_cache) {                                  \
        redraft::commit_write<uint16_t, D>(qkv, positions, row_offsets, slots, cache_lengths, starts, commit_src,      \
                                      commit_offsets, rope_table, rows, commits, commit_bounds, max_positions,         \
                                      cache_slots, cache_rows, heads, kv_heads, q, k_cache, v_cache);                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads, 2) tree_attention_split_##D(                       \
        const uint16_t* q, const int* row_offsets, const int* slots, const int* cache_lengths, const int* starts,      \
        const uint32_t* tree_mask, const uint16_t* k_cache, const uint16_t* v_cache, int rows, int sequences,          \
        int words, int cache_slots, int cache_rows, int heads, int kv_heads, int window, float* partial,               \
        float* stats) {                                                                                                \
        redraft::split<D, Keys>(q, row_offsets, slots, cache_lengths, starts, tree_mask, k_cache, v_cache, rows,       \
                               sequences, words, cache_slots, cache_rows, heads, kv_heads, window, partial, stats);    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads) tree_attention_combine_##D(                        \
        const float* partial, const float* stats, const int*, const int* row_offsets, const uint16_t*, int rows,       \
        int bounds, int heads, int splits, uint16_t* out) {                                                            \
        redraft::combine<uint16_t, D>(partial, stats, row_offsets, rows, bounds, heads, splits, out);                  \
    }

REDRAFT_TREE_ATTENTION(64, 32)
REDRAFT_TREE_ATTENTION(128, 16)

#ifndef __CUDACC__
REDRAFT_KERNEL(tree_attention_commit_write_64)
REDRAFT_KERNEL(tree_attention_commit_write_128)
REDRAFT_KERNEL(tree_attention_split_64)
REDRAFT_KERNEL(tree_attention_split_128)
REDRAFT_KERNEL(tree_attention_combine_64)
REDRAFT_KERNEL(tree_attention_combine_128)
#endif
