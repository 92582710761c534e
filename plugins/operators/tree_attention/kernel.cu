// TreeAttention in bf16, in three kernels, one after the other on a stream: commit_write, split, combine (README.md,
// "CUDA"; the first and the last are rows.cuh's).
// A block's warps share keys and values in shared memory: while they work on one stage, the next two are on their way.
#include "rows.cuh"

namespace redraft {
namespace {

constexpr int kStages = 3;     // the 48 KB that a kernel has
constexpr int kLeastKeys = 64;  // of a split: a multiple of every stage's
template <int D>
constexpr int kParts = D > 128 ? 2 : 1;  // of a query's columns, a warp's each: its registers hold 128 values
template <int D>
constexpr int kTile = 64 / kParts<D>;  // queries of a block; a query is a row under one of its query heads
template <int D>
constexpr int kPitch = D <= 64 ? 8 : D <= 128 ? 16 : 32;  // pieces that a stage's row has room for
template <int D>
constexpr int kKeys = 512 / kPitch<D>;  // of a stage, 16 KB with their values

// Keys and values by rows of D / 8 pieces of 16 bytes. Pieces are exchanged within 8, so that the same piece of 8
// neighbouring rows lies in different banks.
template <int D>
struct Stage {
    uint4 keys[kKeys<D> * kPitch<D>], values[kKeys<D> * kPitch<D>];

    static REDRAFT_DEVICE int at(int row, int piece) { return row * kPitch<D> + (piece ^ row % 8); }

    // Starts to copy kKeys rows of a cache. Only `count` are there: the last of them stands for the others, since no row
    // sees what stands after the last rows' keys.
    REDRAFT_DEVICE void fetch(const uint16_t* cached_keys, const uint16_t* cached_values, int count) {
        constexpr int kAtOnce = kThreads / kPitch<D>;
        const int own = threadIdx.x / kPitch<D>, piece = threadIdx.x % kPitch<D>;
        if (piece >= D / 8) return;
#pragma unroll
        for (int i = 0; i < kKeys<D> / kAtOnce; ++i) {
            const int row = own + i * kAtOnce;
            const int from = least(row, count - 1) * D + 8 * piece;
            copy_async(keys + at(row, piece), cached_keys + from);
            copy_async(values + at(row, piece), cached_values + from);
        }
    }
};

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
// values; element i of column tile n is column 8 n + 2 t + i % 2 of the warp's, of row g + 8 (i / 2).
template <int Columns>
struct Partial {
    float maximum[2], sum[2], values[Columns / 8][4];

    // Scales what is there to a new maximum, which seldom rises.
    REDRAFT_DEVICE void raise(int half, float to) {
        if (to == maximum[half]) return;
        const float factor = power_of_two(maximum[half] - to);
        maximum[half] = to;
        sum[half] *= factor;
#pragma unroll
        for (int n = 0; n < Columns / 8; ++n) {
            values[n][2 * half] *= factor;
            values[n][2 * half + 1] *= factor;
        }
    }
};

// Scores of some keys, which stand at places from `key` on, and in the stage from row `first` on, and the part's columns of
// their weighted values.
template <int D, int Keys>
REDRAFT_DEVICE void attend(const uint32_t (&q)[D / 16][4], const Stage<D>& stage, int first, int part, int key,
                           int context, const Sight (&sight)[2], int lane, Partial<D / kParts<D>>& state) {
    const int t = lane % 4, matrix = lane / 8, row = first + lane % 8;
    // The first pieces of the lane's rows: even ones that follow are these, exclusive or 2, 4, ...
    const int key_piece = Stage<D>::at(row + matrix / 2 * 8, matrix % 2);
    const int value_piece = Stage<D>::at(row + matrix % 2 * 8, matrix / 2) ^ part * (kPitch<D> / kParts<D>);
    float scores[Keys / 8][4] = {};
#pragma unroll
    for (int c = 0; c < D / 16; ++c)
#pragma unroll
        for (int i = 0; i < Keys / 16; ++i) {
            const uint4 k = load_matrices(stage.keys + (key_piece ^ 2 * c) + 16 * i * kPitch<D>);
            mma(scores[2 * i], q[c][0], q[c][1], q[c][2], q[c][3], k.x, k.y);
            mma(scores[2 * i + 1], q[c][0], q[c][1], q[c][2], q[c][3], k.z, k.w);
        }
    if (key + Keys > context || key < most(sight[0].hidden, sight[1].hidden)) {
#pragma unroll
        for (int i = 0; i < Keys / 8; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int place = key + 8 * i + 2 * t + e % 2;
                const bool seen = (place < context || sight[e / 2].sees(place - context)) &&
                                  sight[e / 2].in_window(place, context);
                if (!seen) scores[i][e] = kNone;
            }
    }
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = kNone;
#pragma unroll
        for (int i = 0; i < Keys / 8; ++i) top = fmaxf(top, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
        top = fmaxf(top, exchange(top, 1));
        top = fmaxf(top, exchange(top, 2));
        state.raise(half, fmaxf(state.maximum[half], top * kScale<D>));
        base[half] = state.maximum[half] == kNone ? 0.0f : state.maximum[half];
    }
#pragma unroll
    for (int i = 0; i < Keys / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            scores[i][e] = power_of_two(scores[i][e] * kScale<D> - base[e / 2]);
            state.sum[e / 2] += scores[i][e];
        }
#pragma unroll
    for (int i = 0; i < Keys / 16; ++i) {
        const float(&even)[4] = scores[2 * i], (&odd)[4] = scores[2 * i + 1];
        const uint32_t a0 = pair(even[0], even[1]), a1 = pair(even[2], even[3]);
        const uint32_t a2 = pair(odd[0], odd[1]), a3 = pair(odd[2], odd[3]);
#pragma unroll
        for (int n = 0; n < D / kParts<D> / 16; ++n) {
            const uint4 v = load_transposed(stage.values + (value_piece ^ 2 * n) + 16 * i * kPitch<D>);
            mma(state.values[2 * n], a0, a1, a2, a3, v.x, v.y);
            mma(state.values[2 * n + 1], a0, a1, a2, a3, v.z, v.w);
        }
    }
}

// A part of a tile's keys that a block takes: that of the sequence's tile, one of `parts`. The sequence's items begin at
// `first`, tile by tile and part by part.
struct Item {
    int sequence, tile, part, parts, first;
};
// What the threads of a block share to find it, each for some sequences.
struct Plan {
    int work[kThreads], items[kThreads];
    Item item;
};

// The item of this number, or a sequence below 0; all threads of a block call it. A sequence's tiles have as many parts
// as give each part the same share of all tiles' keys, of which there are `shares`: so there are at most as many items as
// tiles and shares. Keys are counted in kLeastKeys, a tile's as its sequence's last one sees them.
template <int D, class SpanOf>
REDRAFT_DEVICE Item find_item(int number, int shares, int sequences, int group, int cache_rows, SpanOf span, Plan& plan) {
    const int thread = threadIdx.x, each = (sequences + kThreads - 1) / kThreads, threads = least(sequences, kThreads);
    const int first = least(thread * each, sequences), last = least(first + each, sequences);
    const auto tiles_of = [=](const Span& s) { return (s.count * group + kTile<D> - 1) / kTile<D>; };
    const auto keys_of = [=](const Span& s) {
        return (least(s.start + s.count, cache_rows + kLeastKeys - 1) + kLeastKeys - 1) / kLeastKeys;
    };
    int work = 0;
    for (int b = first; b < last; ++b) {
        const Span s = span(b);
        work += tiles_of(s) * keys_of(s);
    }
    plan.work[thread] = work;
    if (thread == 0) plan.item.sequence = -1;
    __syncthreads();
    int all = 0;
    for (int i = 0; i < threads; ++i) all += plan.work[i];
    const int share = most(1, (all + shares - 1) / shares);
    const auto parts_of = [=](const Span& s) { return (keys_of(s) + share - 1) / share; };
    int items = 0;
    for (int b = first; b < last; ++b) {
        const Span s = span(b);
        items += tiles_of(s) * parts_of(s);
    }
    plan.items[thread] = items;
    __syncthreads();
    int begin = 0;
    for (int i = 0; i < threads; ++i) begin += i < thread ? plan.items[i] : 0;
    for (int b = first; b < last; ++b) {
        const Span s = span(b);
        const int parts = parts_of(s), end = begin + tiles_of(s) * parts;
        if (begin <= number && number < end)
            plan.item = {b, (number - begin) / parts, (number - begin) % parts, parts, begin};
        begin = end;
    }
    __syncthreads();
    const Item item = plan.item;
    __syncthreads();  // the plan's memory is free
    return item;
}

// Block (item, KV head). A warp has 16 queries, and all of their columns or, with wide heads, one of two parts. Without
// parts, two warps take half of each stage's keys with up to 32 queries. `plan` has for each row its sequence's first
// item, the parts of its tiles, and its first row.
template <int D>
REDRAFT_DEVICE void split(const uint16_t* q, const int* row_offsets, const int* slots, const int* cache_lengths,
                          const int* starts, const uint32_t* tree_mask, const uint16_t* k_cache, const uint16_t* v_cache,
                          int rows, int sequences, int words, int cache_slots, int cache_rows, int heads, int kv_heads,
                          int window, float* partial, float* stats, int* plan) {
    constexpr int kColumns = D / kParts<D>, kMerged = kColumns / 2 + 4;  // a lane's numbers of a partial result
    __shared__ Stage<D> stages[kStages];
    const int group = heads / kv_heads, head = blockIdx.y;
    const auto span = [=](int sequence) {
        return span_of(sequence, row_offsets, slots, cache_lengths, starts, rows, cache_slots, cache_rows);
    };
    const int shares = gridDim.x - (rows * group / kTile<D> + sequences);
    const Item item = find_item<D>(blockIdx.x, shares, sequences, group, cache_rows, span, *reinterpret_cast<Plan*>(stages));
    if (item.sequence < 0) return;
    const auto [begin, count, context, start, slot] = span(item.sequence);
    if (head == 0 && item.tile == 0 && item.part == 0)
        for (int row = threadIdx.x; row < count; row += kThreads) {
            int* own = plan + 3 * static_cast<int64_t>(begin + row);
            own[0] = item.first;
            own[1] = item.parts;
            own[2] = begin;
        }
    const int first_query = item.tile * kTile<D>, queries = least(kTile<D>, count * group - first_query);
    const int all_keys = start + (first_query + queries - 1) / group + 1;
    const int lost = most(0, all_keys - cache_rows) / kLeastKeys * kLeastKeys;  // all windows begin later
    const int share = ((all_keys - lost + item.parts - 1) / item.parts + kLeastKeys - 1) / kLeastKeys * kLeastKeys;
    const int from = lost + item.part * share, end = least(all_keys, from + share);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int query_warps = kParts<D> > 1 || queries <= 32 ? 2 : 4, query = warp % query_warps * 16 + g;
    const int part = kParts<D> > 1 ? warp / query_warps : 0, key_warp = kParts<D> > 1 ? 0 : warp / query_warps;
    const int key_warps = kParts<D> > 1 ? 1 : kWarps / query_warps;
    int at[2];  // place of the lane's queries in q
    Sight sight[2];
    uint32_t fragments[D / 16][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int which = first_query + least(query + 8 * half, queries - 1), row = which / group;
        at[half] = (begin + row) * heads + head * group + which % group;
        sight[half] = {tree_mask + static_cast<int64_t>(begin + row) * words, words, start - context + row, true, 0};
        for (int w = 0; w < words; ++w) sight[half].causal = sight[half].causal && !sight[half].mask[w];
        if (window) sight[half].hidden = context + sight[half].before(sight[half].own) + 1 - window;
        const uint16_t* from = q + static_cast<int64_t>(at[half]) * D + 2 * t;
#pragma unroll
        for (int c = 0; c < D / 8; ++c)
            fragments[c / 2][half + c % 2 * 2] = *reinterpret_cast<const uint32_t*>(from + 8 * c);
    }
    const int64_t place = (static_cast<int64_t>(slot) * kv_heads + head) * cache_rows * D;
    const auto fetch = [&](int stage, int key) {
        if (key < end) {
            const int row = row_of(key, cache_rows);
            const int64_t first = place + static_cast<int64_t>(row) * D;
            stages[stage].fetch(k_cache + first, v_cache + first, least(end - key, cache_rows - row));
        }
        end_copies();
    };
    Partial<kColumns> state = {{kNone, kNone}, {}, {}};
    for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage, from + stage * kKeys<D>);
    for (int key = from, now = 0; key < end; key += kKeys<D>, now = (now + 1) % kStages) {
        wait_copies<kStages - 2>();
        __syncthreads();
        fetch((now + kStages - 1) % kStages, key + (kStages - 1) * kKeys<D>);
        if (query - g >= queries) continue;
        if (key_warps == 1)
            attend<D, kKeys<D>>(fragments, stages[now], 0, part, key, context, sight, lane, state);
        else if constexpr (kParts<D> == 1)
            if (const int half = key_warp * (kKeys<D> / 2); key + half < end)
                attend<D, kKeys<D> / 2>(fragments, stages[now], half, part, key + half, context, sight, lane, state);
    }
    wait_copies<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state.sum[half] += exchange(state.sum[half], 1);
        state.sum[half] += exchange(state.sum[half], 2);
    }

    __syncthreads();  // the stages' memory is free
    float (*merged)[kMerged][32] = reinterpret_cast<float (*)[kMerged][32]>(stages);
    if (key_warp) {
        float (*mine)[32] = merged[warp - query_warps];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mine[2 * half][lane] = state.maximum[half];
            mine[2 * half + 1][lane] = state.sum[half];
        }
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) mine[4 + i][lane] = state.values[i / 4][i % 4];
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
            factor[half] = maximum == kNone ? 0.0f : power_of_two(maximum - state.maximum[half]);
            state.sum[half] += factor[half] * theirs[2 * half + 1][lane];
        }
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) state.values[i / 4][i % 4] += factor[i % 4 / 2] * theirs[4 + i][lane];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (query + 8 * half >= queries) continue;
        const int64_t out = (static_cast<int64_t>(blockIdx.x) * kv_heads + head) * kTile<D> + query + 8 * half;
        if (t == 0 && part == 0) {
            stats[2 * out] = state.maximum[half];
            stats[2 * out + 1] = state.sum[half];
        }
        if (state.sum[half] == 0.0f) continue;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
            *reinterpret_cast<float2*>(partial + out * D + part * kColumns + 8 * n + 2 * t) = {
                state.values[n][2 * half], state.values[n][2 * half + 1]};
    }
}

// Where `split` put the parts of a row under a head; padding has none.
template <int D>
struct PlannedParts {
    const int* plan;
    int rows, heads, kv_heads, items;

    REDRAFT_DEVICE Parts operator()(int64_t at) const {
        const int row = at / heads, head = at % heads, group = heads / kv_heads;
        if (row >= rows) return {0, 0, 0};
        const int* own = plan + 3 * static_cast<int64_t>(row);
        const int first = within(own[0], 0, items), parts = within(own[1], 0, items), begin = within(own[2], 0, row);
        const int query = (row - begin) * group + head % group;
        const int64_t item = first + static_cast<int64_t>(query / kTile<D>) * parts, last = items - parts;
        const int64_t stride = static_cast<int64_t>(kv_heads) * kTile<D>;
        return {(item < last ? item : last) * stride + head / group * kTile<D> + query % kTile<D>, stride, parts};
    }
};

}  // namespace
}  // namespace redraft

// Arguments: inputs, int32 scalars, outputs (cuda_kernels.py declares them). The caches come in as inputs and, at the
// same address, as outputs.
#define REDRAFT_TREE_ATTENTION(D)                                                                                      \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads) tree_attention_commit_write_##D(                   \
        const uint16_t* qkv, const int* positions, const int* row_offsets, const int* slots, const int* cache_lengths, \
        const int* starts, const int* commit_src, const int* commit_offsets, const float* rope_table,                  \
        const float* q_norm, const float* k_norm, const uint16_t*, const uint16_t*, int rows, int commits,             \
        int commit_bounds, int max_positions, int cache_slots, int cache_rows, int heads, int kv_heads, int eps,       \
        uint16_t* q, uint16_t* k_cache, uint16_t* v_cache) {                                                           \
        redraft::commit_write<uint16_t, D>(qkv, positions, row_offsets, slots, cache_lengths, starts, commit_src,      \
                                      commit_offsets, rope_table, q_norm, k_norm, rows, commits, commit_bounds,        \
                                      max_positions, cache_slots, cache_rows, heads, kv_heads, eps, q, k_cache,        \
                                      v_cache);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads, 2) tree_attention_split_##D(                       \
        const uint16_t* q, const int* row_offsets, const int* slots, const int* cache_lengths, const int* starts,      \
        const uint32_t* tree_mask, const uint16_t* k_cache, const uint16_t* v_cache, int rows, int sequences,          \
        int words, int cache_slots, int cache_rows, int heads, int kv_heads, int window, float* partial,               \
        float* stats, int* plan) {                                                                                     \
        redraft::split<D>(q, row_offsets, slots, cache_lengths, starts, tree_mask, k_cache, v_cache, rows,             \
                          sequences, words, cache_slots, cache_rows, heads, kv_heads, window, partial, stats, plan);   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(redraft::kThreads) tree_attention_combine_##D(                        \
        const float* partial, const float* stats, const int* plan, const int* row_offsets, int rows, int bounds,       \
        int heads, int kv_heads, int items, uint16_t* out) {                                                           \
        const redraft::PlannedParts<D> parts = {plan, row_offsets[bounds - 1], heads, kv_heads, items};                \
        redraft::combine<uint16_t, D>(partial, stats, rows, heads, parts, out);                                        \
    }

REDRAFT_TREE_ATTENTION(64)
REDRAFT_TREE_ATTENTION(96)
REDRAFT_TREE_ATTENTION(128)
REDRAFT_TREE_ATTENTION(256)

#ifndef __CUDACC__
REDRAFT_KERNEL(tree_attention_commit_write_64)
REDRAFT_KERNEL(tree_attention_commit_write_96)
REDRAFT_KERNEL(tree_attention_commit_write_128)
REDRAFT_KERNEL(tree_attention_commit_write_256)
REDRAFT_KERNEL(tree_attention_split_64)
REDRAFT_KERNEL(tree_attention_split_96)
REDRAFT_KERNEL(tree_attention_split_128)
REDRAFT_KERNEL(tree_attention_split_256)
REDRAFT_KERNEL(tree_attention_combine_64)
REDRAFT_KERNEL(tree_attention_combine_96)
REDRAFT_KERNEL(tree_attention_combine_128)
REDRAFT_KERNEL(tree_attention_combine_256)
#endif
