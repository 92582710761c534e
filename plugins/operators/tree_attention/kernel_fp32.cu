// TreeAttention in float32, on FMA units: commit_write, split, combine as in kernel.cu. A row's bits depend on its own
// query and on the keys and values of its path alone. Keys are taken by their place in the path, not in the cache, in
// blocks of 32 and parts of kSplitKeys that begin at multiples of these, whatever the other rows, the number of parts
// and the tree around the path.
#include "rows.cuh"

namespace redraft {
namespace {

constexpr int kSplitKeys = 256;

// Where the cache holds the keys of a row's path: the context's in order, then its visible rows, itself last.
struct Path {
    const uint32_t* mask;
    int context, own;
    bool causal;

    REDRAFT_DEVICE uint32_t above(int word) const {  // the word's rows above this one
        const int rows = own - 32 * word;
        return rows >= 32 ? mask[word] : rows <= 0 ? 0u : mask[word] & ((1u << rows) - 1u);
    }
    REDRAFT_DEVICE int length(int words) const {
        if (causal) return context + own + 1;
        int rows = 1;
        for (int w = 0; w < words; ++w) rows += count_bits(above(w));
        return context + rows;
    }
    REDRAFT_DEVICE int place(int key, int words) const {
        if (key < context || causal) return key;
        int left = key - context;
        for (int w = 0; w < words; ++w) {
            uint32_t rows = above(w);
            const int found = count_bits(rows);
            if (left < found) {
                for (; left; --left) rows &= rows - 1u;
                return context + 32 * w + count_bits((rows & (0u - rows)) - 1u);
            }
            left -= found;
        }
        return context + own;
    }
};

// Block (4 queries, KV head, split of the keys), a warp for each query: a row under a query head. For the scores a lane
// takes a key, for the weighted values D / 32 columns.
template <int D>
REDRAFT_DEVICE void split(const float* q, const int* row_offsets, const int* slots, const int* cache_lengths,
                          const int* starts, const uint32_t* tree_mask, const float* k_cache, const float* v_cache,
                          int rows, int sequences, int words, int cache_slots, int cache_rows, int heads, int kv_heads,
                          int window, float* partial, float* stats) {
    constexpr int kColumns = D / 32;
    __shared__ int sequence[kWarps];
    __shared__ float4 queries[kWarps][D / 4];
    __shared__ float weights[kWarps][32];
    __shared__ int places[kWarps][32];
    const int group = heads / kv_heads, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int query = blockIdx.x * kWarps + warp, row = query / group;
    const int64_t at = static_cast<int64_t>(row) * heads + head * group + query % group;
    if (lane == 0) sequence[warp] = -1;
    __syncthreads();
    for (int b = lane; b < sequences; b += 32)
        if (row_offsets[b] <= row && row < row_offsets[b + 1]) sequence[warp] = b;
    __syncthreads();
    const int b = sequence[warp];
    if (row >= rows || b < 0) return;
    for (int i = lane; i < D / 4; i += 32) queries[warp][i] = *reinterpret_cast<const float4*>(q + at * D + 4 * i);
    sync_warp();

    const Span span = span_of(b, row_offsets, slots, cache_lengths, starts, rows, cache_slots, cache_rows);
    Path path = {tree_mask + static_cast<int64_t>(row) * words, span.context,
                 span.start + row - span.begin - span.context, true};
    for (int w = 0; w < words; ++w) path.causal = path.causal && !path.mask[w];
    const int length = path.length(words), hidden = window ? length - window : 0;  // the path's first rows
    const int from = (most(hidden, 0) / kSplitKeys + blockIdx.z) * kSplitKeys, end = least(length, from + kSplitKeys);
    const int64_t cache = (static_cast<int64_t>(span.slot) * kv_heads + head) * cache_rows * D;
    const int64_t out = static_cast<int64_t>(blockIdx.z) * rows * heads + at;
    float maximum = kNone, sum = 0.0f, values[kColumns] = {};
    for (int key = from; key < end; key += 32) {
        const int place = row_of(path.place(least(key + lane, end - 1), words), cache_rows);
        const float4* k = reinterpret_cast<const float4*>(k_cache + cache + static_cast<int64_t>(place) * D);
        float score = 0.0f;
#pragma unroll 4
        for (int i = 0; i < D / 4; ++i) {
            const float4 x = queries[warp][i], y = k[i];
            score = fmaf(x.x, y.x, score);
            score = fmaf(x.y, y.y, score);
            score = fmaf(x.z, y.z, score);
            score = fmaf(x.w, y.w, score);
        }
        score = key + lane < end && key + lane >= hidden ? score * kScale<D> : kNone;
        float top = score;
#pragma unroll
        for (int step = 16; step; step /= 2) top = fmaxf(top, exchange(top, step));
        top = fmaxf(top, maximum);
        const float weight = score == kNone ? 0.0f : exp2f(score - top);
        const float factor = maximum == kNone ? 0.0f : exp2f(maximum - top);
        float all = weight;
#pragma unroll
        for (int step = 16; step; step /= 2) all += exchange(all, step);
        maximum = top;
        sum = fmaf(sum, factor, all);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) values[i] *= factor;
        weights[warp][lane] = weight;
        places[warp][lane] = place;
        sync_warp();
        const int keys = least(32, end - key);
        for (int j = 0; j < keys; ++j) {
            const float* v = v_cache + cache + static_cast<int64_t>(places[warp][j]) * D + lane * kColumns;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) values[i] = fmaf(weights[warp][j], v[i], values[i]);
        }
        sync_warp();
    }
    if (lane == 0) {
        stats[2 * out] = maximum;
        stats[2 * out + 1] = sum;
    }
    if (sum == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) partial[out * D + lane * kColumns + i] = values[i];
}

// A row's partial results lie a split's rows apart; padding has none.
struct SplitParts {
    int rows, heads, splits, padded;

    REDRAFT_DEVICE Parts operator()(int64_t at) const {
        return {at, static_cast<int64_t>(padded) * heads, at / heads < rows ? splits : 0};
    }
};

}  // namespace
}  // namespace redraft

// As in kernel.cu.
#define REDRAFT_TREE_ATTENTION(D)                                                                                      \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads) tree_attention_commit_write_fp32_##D(              \
        const float* qkv, const int* positions, const int* row_offsets, const int* slots, const int* cache_lengths,    \
        const int* starts, const int* commit_src, const int* commit_offsets, const float* rope_table,                  \
        const float* q_norm, const float* k_norm, const float*, const float*, int rows, int commits,                   \
        int commit_bounds, int max_positions, int cache_slots, int cache_rows, int heads, int kv_heads, int eps,       \
        float* q, float* k_cache, float* v_cache) {                                                                    \
        redraft::commit_write<float, D>(qkv, positions, row_offsets, slots, cache_lengths, starts, commit_src,         \
                                      commit_offsets, rope_table, q_norm, k_norm, rows, commits, commit_bounds,        \
                                      max_positions, cache_slots, cache_rows, heads, kv_heads, eps, q, k_cache,        \
                                      v_cache);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads, 4) tree_attention_split_fp32_##D(                  \
        const float* q, const int* row_offsets, const int* slots, const int* cache_lengths, const int* starts,         \
        const uint32_t* tree_mask, const float* k_cache, const float* v_cache, int rows, int sequences,                \
        int words, int cache_slots, int cache_rows, int heads, int kv_heads, int window, float* partial,               \
        float* stats) {                                                                                                \
        redraft::split<D>(q, row_offsets, slots, cache_lengths, starts, tree_mask, k_cache, v_cache, rows,             \
                               sequences, words, cache_slots, cache_rows, heads, kv_heads, window, partial, stats);    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads) tree_attention_combine_fp32_##D(                   \
        const float* partial, const float* stats, const int*, const int* row_offsets, const float*, int rows,          \
        int bounds, int heads, int splits, float* out) {                                                               \
        const redraft::SplitParts parts = {row_offsets[bounds - 1], heads, splits, rows};                              \
        redraft::combine<float, D>(partial, stats, rows, heads, parts, out);                                           \
    }

REDRAFT_TREE_ATTENTION(64)
REDRAFT_TREE_ATTENTION(96)
REDRAFT_TREE_ATTENTION(128)
REDRAFT_TREE_ATTENTION(256)

#ifndef __CUDACC__
REDRAFT_KERNEL(tree_attention_commit_write_fp32_64)
REDRAFT_KERNEL(tree_attention_commit_write_fp32_96)
REDRAFT_KERNEL(tree_attention_commit_write_fp32_128)
REDRAFT_KERNEL(tree_attention_commit_write_fp32_256)
REDRAFT_KERNEL(tree_attention_split_fp32_64)
REDRAFT_KERNEL(tree_attention_split_fp32_96)
REDRAFT_KERNEL(tree_attention_split_fp32_128)
REDRAFT_KERNEL(tree_attention_split_fp32_256)
REDRAFT_KERNEL(tree_attention_combine_fp32_64)
REDRAFT_KERNEL(tree_attention_combine_fp32_96)
REDRAFT_KERNEL(tree_attention_combine_fp32_128)
REDRAFT_KERNEL(tree_attention_combine_fp32_256)
#endif
