// TreeAttention in three kernels, one after the other on a stream: commit_write, split, combine (README.md, "CUDA").
// Every load of keys and values is 16 bytes that go into a tensor core's fragment as they are: the order of a product's
// inner index and of an output's columns is free, so both follow memory, and nothing passes through shared memory.
#include "../cuda/device.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128, kWarps = 4;
constexpr int kTile = 64;       // queries of a block; a query is a row under one of its query heads
constexpr int kWriteRows = 64;  // rows that a block of commit_write writes
constexpr float kNone = -INFINITY;

REDRAFT_DEVICE int least(int a, int b) { return a < b ? a : b; }
REDRAFT_DEVICE int most(int a, int b) { return a > b ? a : b; }
REDRAFT_DEVICE uint4 load16(const uint16_t* from) { return *reinterpret_cast<const uint4*>(from); }
REDRAFT_DEVICE void store16(uint16_t* to, uint4 x) { *reinterpret_cast<uint4*>(to) = x; }

// x0 cos - x1 sin or, for the second half, x1 cos + x0 sin, of two neighbours.
REDRAFT_DEVICE uint32_t rotate(uint32_t x, uint32_t other, float sign, const float* cosine, const float* sine) {
    return pair(low(x) * cosine[0] + sign * low(other) * sine[0], high(x) * cosine[1] + sign * high(other) * sine[1]);
}
REDRAFT_DEVICE uint4 rotate(uint4 x, uint4 other, float sign, const float* cosine, const float* sine) {
    return {rotate(x.x, other.x, sign, cosine, sine), rotate(x.y, other.y, sign, cosine + 2, sine + 2),
            rotate(x.z, other.z, sign, cosine + 4, sine + 4), rotate(x.w, other.w, sign, cosine + 6, sine + 6)};
}

// Block (KV head, sequence, rows 64 z to 64 z + 63). Rows whose places are still sources of the commit are written by
// the block that commits, z = 0, behind its barrier.
template <int D>
REDRAFT_DEVICE void commit_write(const uint16_t* qkv, const int* positions, const int* row_offsets, const int* slots,
                                 const int* cache_lengths, const int* starts, const int* commit_src,
                                 const int* commit_offsets, const float* rope_table, int commit_bounds, int cache_rows,
                                 int heads, int kv_heads, uint16_t* q, uint16_t* k_cache, uint16_t* v_cache) {
    constexpr int kPieces = D / 16;  // of 2 x 8 elements, i and i + D / 2
    const int head = blockIdx.x, sequence = blockIdx.y, part = blockIdx.z, group = heads / kv_heads;
    const int begin = row_offsets[sequence], rows = row_offsets[sequence + 1] - begin;
    const int first_commit = commit_bounds ? commit_offsets[sequence] : 0;
    const int commits = commit_bounds ? commit_offsets[sequence + 1] - first_commit : 0;
    const int base = cache_lengths[sequence] - commits, start = starts[sequence];
    const int64_t place = (static_cast<int64_t>(slots[sequence]) * kv_heads + head) * cache_rows;
    uint16_t* keys = k_cache + place * D;
    uint16_t* values = v_cache + place * D;
    const int sources = commits ? most(0, base + commit_src[first_commit + commits - 1] + 1 - start) : 0;

    if (part == 0) {
        constexpr int kWide = 2 * D / 8, kAtOnce = kThreads / kWide;
        const int piece = threadIdx.x % kWide * 8;
        uint16_t* cache = piece < D ? keys + piece : values + piece - D;
        for (int j = threadIdx.x / kWide; j - static_cast<int>(threadIdx.x) / kWide < commits; j += kAtOnce) {
            uint4 moved;
            if (j < commits) moved = load16(cache + static_cast<int64_t>(base + commit_src[first_commit + j]) * D);
            __syncthreads();
            if (j < commits) store16(cache + static_cast<int64_t>(base + j) * D, moved);
        }
    }
    const int from = part == 0 ? 0 : most(part * kWriteRows, sources);
    const int to = least(rows, part == 0 ? most(kWriteRows, sources) : (part + 1) * kWriteRows);
    for (int item = threadIdx.x; item < (to - from) * (group + 2) * kPieces; item += kThreads) {
        const int i = item % kPieces * 8, vector = item / kPieces % (group + 2), row = from + item / kPieces / (group + 2);
        const int64_t at = begin + row;
        const int column = vector < group ? head * group + vector : heads + (vector - group) * kv_heads + head;
        const uint16_t* x = qkv + (at * (heads + 2 * kv_heads) + column) * D + i;
        uint16_t* out = vector < group ? q + (at * heads + column) * D
                                       : (vector == group ? keys : values) + static_cast<int64_t>(start + row) * D;
        uint4 x0 = load16(x), x1 = load16(x + D / 2);
        if (vector <= group) {
            const float* cosine = rope_table + static_cast<int64_t>(positions[at]) * D + i;
            const uint4 first = rotate(x0, x1, -1.0f, cosine, cosine + D / 2);
            x1 = rotate(x1, x0, 1.0f, cosine, cosine + D / 2);
            x0 = first;
        }
        store16(out + i, x0);
        store16(out + i + D / 2, x1);
    }
}

// A query's row among its sequence's, and which of the rows behind the context it sees.
struct Sight {
    const uint32_t* mask;
    int words, own;
    bool causal;

    REDRAFT_DEVICE bool sees(int row) const {
        return row == own || (causal ? row < own : row < 32 * words && (mask[row / 32] >> (row % 32) & 1u));
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
    const bool all = key + Keys <= context;
    float top[2] = {state.maximum[0], state.maximum[1]};
#pragma unroll
    for (int i = 0; i < Keys / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int place = key + 8 * i + 2 * t + e % 2;
            const bool seen = all || place < context || sight[e / 2].sees(place - context);
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
                          int rows, int sequences, int words, int cache_rows, int heads, int kv_heads, float* partial,
                          float* stats) {
    __shared__ int sequence;
    __shared__ float merged[kWarps - 1][D / 2 + 4][32];
    const int group = heads / kv_heads, tile = blockIdx.x, head = blockIdx.y;
    if (threadIdx.x == 0) sequence = -1;
    __syncthreads();
    for (int b = threadIdx.x; b < sequences; b += kThreads)
        if (row_offsets[b] * group / kTile + b <= tile && tile <= row_offsets[b + 1] * group / kTile + b) sequence = b;
    __syncthreads();
    if (sequence < 0) return;
    const int begin = row_offsets[sequence], count = row_offsets[sequence + 1] - begin;
    const int first_query = (tile - (begin * group / kTile + sequence)) * kTile;
    const int queries = least(kTile, count * group - first_query);
    if (queries <= 0) return;
    const int context = cache_lengths[sequence], start = starts[sequence];
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
        sight[half] = {tree_mask + static_cast<int64_t>(begin + row) * words, words, start - context + row, true};
        for (int w = 0; w < words; ++w) sight[half].causal = sight[half].causal && !sight[half].mask[w];
#pragma unroll
        for (int c = 0; c < D / 32; ++c) fragments[c][half] = load16(q + at[half] * D + 32 * c + 8 * t);
    }
    const int64_t place = (static_cast<int64_t>(slots[sequence]) * kv_heads + head) * cache_rows * D;
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

// Warp: one row under one head. Splits without a visible key have sum 0 and no values.
template <int D>
REDRAFT_DEVICE void combine(const float* partial, const float* stats, const int* row_offsets, int rows, int bounds,
                            int heads, int splits, uint16_t* out) {
    constexpr int kColumns = D / 32;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, all = static_cast<int64_t>(rows) * heads;
    if (at >= all) return;
    const int column = threadIdx.x % 32 * kColumns;
    float maximum = kNone, sum = 0.0f, values[kColumns] = {};
    const int used = at / heads < row_offsets[bounds - 1] ? splits : 0;
    for (int s = 0; s < used; ++s) maximum = fmaxf(maximum, stats[2 * (s * all + at)]);
    for (int s = 0; s < used; ++s) {
        const float weight = stats[2 * (s * all + at) + 1];
        if (weight == 0.0f) continue;
        const float factor = exp2f(stats[2 * (s * all + at)] - maximum);
        sum += factor * weight;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) values[i] += factor * partial[(s * all + at) * D + column + i];
    }
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int i = 0; i < kColumns; i += 2)
        *reinterpret_cast<uint32_t*>(out + at * D + column + i) = pair(values[i] * scale, values[i + 1] * scale);
}

}  // namespace
}  // namespace redraft

// Arguments: inputs, int32 scalars, outputs (tensorrt_plugin.py declares them). The caches come in as inputs and, at the
// same address, as outputs.
#define REDRAFT_TREE_ATTENTION(D, Keys)                                                                                \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads) tree_attention_commit_write_##D(                    \
        const uint16_t* qkv, const int* positions, const int* row_offsets, const int* slots, const int* cache_lengths,  \
        const int* starts, const int* commit_src, const int* commit_offsets, const float* rope_table, const uint16_t*,  \
        const uint16_t*, int commit_bounds, int cache_rows, int heads, int kv_heads, uint16_t* q, uint16_t* k_cache,    \
        uint16_t* v_cache) {                                                                                           \
        redraft::commit_write<D>(qkv, positions, row_offsets, slots, cache_lengths, starts, commit_src, commit_offsets, \
                                 rope_table, commit_bounds, cache_rows, heads, kv_heads, q, k_cache, v_cache);          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads, 2) tree_attention_split_##D(                        \
        const uint16_t* q, const int* row_offsets, const int* slots, const int* cache_lengths, const int* starts,       \
        const uint32_t* tree_mask, const uint16_t* k_cache, const uint16_t* v_cache, int rows, int sequences, int words, \
        int cache_rows, int heads, int kv_heads, float* partial, float* stats) {                                       \
        redraft::split<D, Keys>(q, row_offsets, slots, cache_lengths, starts, tree_mask, k_cache, v_cache, rows,        \
                                sequences, words, cache_rows, heads, kv_heads, partial, stats);                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads) tree_attention_combine_##D(                         \
        const float* partial, const float* stats, const int* row_offsets, int rows, int bounds, int heads,              \
        int splits, uint16_t* out) {                                                                                   \
        redraft::combine<D>(partial, stats, row_offsets, rows, bounds, heads, splits, out);                             \
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
