// Every score is a dot product summed over the head's elements in order, and every output element is
// summed over the visible keys in ascending order; masked keys have weight exactly 0. So a row's result
// depends on its visible keys alone: not on other rows, nor on how the work is divided.
#pragma once

#include "../cpu/kernels.h"
#include "../cpu/pool.h"
#include "../cpu/simd.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

constexpr int64_t kKeys = 32;         // keys scored together
constexpr int64_t kKeyChunk = 128;    // keys of one item where scores are shared out by keys
constexpr int64_t kBlockQueries = 24;
#if defined(__AVX512F__)
constexpr int kScoreTile = 4, kValueTile = 5;
#else
constexpr int kScoreTile = 1, kValueTile = 1;
#endif

// Consecutive rows of one sequence under one KV head: all of its query heads.
struct Block {
    int32_t sequence, head, first, rows;
};

struct AttentionJob {
    const TreeAttentionArgs& a;
    int64_t group;    // query heads of a KV head
    int64_t padded;   // longest sequence's keys, rounded up to kKeys
    int64_t queries;  // largest block's
    Block* blocks;
    float* scores;    // [blocks, queries, padded], shared where keys are shared out; else null
    int64_t key_chunks, value_chunks;

    int64_t length(const Block& b) const { return a.row_offsets[b.sequence + 1] - a.row_offsets[b.sequence]; }
    const int32_t* mask(const Block& b, int64_t row) const {
        return a.tree_mask + (a.row_offsets[b.sequence] + row) * a.mask_words;
    }
    bool causal(const Block& b, int64_t row) const {
        int32_t any = 0;
        for (int64_t w = 0; w < a.mask_words; ++w) any |= mask(b, row)[w];
        return any == 0;
    }
    // Cache row of the sequence's first row, and how many rows stand between the context and it.
    int64_t start(int64_t sequence) const { return (a.starts ? a.starts : a.cache_lengths)[sequence]; }
    int64_t earlier(const Block& b) const { return start(b.sequence) - a.cache_lengths[b.sequence]; }
    // Keys that some row of the block may see: the context, earlier rows and the sequence's first rows.
    int64_t keys(const Block& b) const {
        int64_t rows = b.first + b.rows;
        for (int64_t i = 0; i < b.rows; ++i)
            if (!causal(b, b.first + i)) rows = length(b);
        return start(b.sequence) + rows;
    }
    int64_t cache_offset(const Block& b) const {
        return (a.slots[b.sequence] * a.kv_heads + b.head) * a.cache_rows * a.head_size;
    }
};

static inline void write(float* to, f32x16 v) { store(to, v); }
static inline void write(uint16_t* to, f32x16 v) { store_bf16(to, v); }

// to = x rotated to the position, times scale.
template <class C>
static inline void rope(const TreeAttentionArgs& a, const float* x, int64_t row, float scale, C* to) {
    const int64_t half = a.head_size / 2;
    const float* cosine = a.rope_table + a.positions[row] * a.head_size;
    for (int64_t i = 0; i < half; i += 16) {
        const f32x16 c = load(cosine + i), s = load(cosine + half + i), x0 = load(x + i), x1 = load(x + half + i);
        write(to + i, mul(sub(mul(x0, c), mul(x1, s)), set1(scale)));
        write(to + half + i, mul(fma(x1, c, mul(x0, s)), set1(scale)));
    }
}

// Commit the previous step's path and write this step's keys and values, for one sequence and KV head.
template <class C>
static void update_cache(const void* context, int64_t begin, int64_t end, int) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const TreeAttentionArgs& a = job.a;
    for (int64_t item = begin; item < end; ++item) {
        const Block b = {static_cast<int32_t>(item / a.kv_heads), static_cast<int32_t>(item % a.kv_heads), 0, 0};
        C* k = static_cast<C*>(a.k_cache) + job.cache_offset(b);
        C* v = static_cast<C*>(a.v_cache) + job.cache_offset(b);
        const int64_t from = a.commit_offsets ? a.commit_offsets[b.sequence] : 0;
        const int64_t commits = a.commit_offsets ? a.commit_offsets[b.sequence + 1] - from : 0;
        const int64_t base = a.cache_lengths[b.sequence] - commits, d = a.head_size;
        for (int64_t j = 0; j < commits; ++j) {
            const int64_t source = a.commit_src[from + j];
            if (source == j) continue;
            __builtin_memcpy(k + (base + j) * d, k + (base + source) * d, d * sizeof(C));
            __builtin_memcpy(v + (base + j) * d, v + (base + source) * d, d * sizeof(C));
        }
        for (int64_t row = a.row_offsets[b.sequence]; row < a.row_offsets[b.sequence + 1]; ++row) {
            const int64_t at = (job.start(b.sequence) + row - a.row_offsets[b.sequence]) * d;
            const float* x = a.qkv + row * (a.heads + 2 * a.kv_heads) * d + (a.heads + b.head) * d;
            rope(a, x, row, 1.0f, k + at);
            for (int64_t i = 0; i < d; i += 16) write(v + at + i, load(x + a.kv_heads * d + i));
        }
    }
}

static inline void load_queries(const AttentionJob& job, const Block& b, float* q) {
    const TreeAttentionArgs& a = job.a;
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(a.head_size));
    for (int64_t i = 0; i < b.rows * job.group; ++i) {
        const int64_t row = a.row_offsets[b.sequence] + b.first + i / job.group;
        const int64_t head = b.head * job.group + i % job.group;
        rope(a, a.qkv + (row * (a.heads + 2 * a.kv_heads) + head) * a.head_size, row, scale, q + i * a.head_size);
    }
}

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
    const int64_t d = job.a.head_size, dwords = d * sizeof(C) / 4, queries = b.rows * job.group;
    const uint32_t* cache =
        reinterpret_cast<const uint32_t*>(static_cast<const C*>(job.a.k_cache) + job.cache_offset(b));
    uint32_t* tail = tile + kKeys * dwords;
    for (int64_t key = from; key < to; key += kKeys) {
        const uint32_t* rows = cache + key * dwords;
        if (to - key < kKeys) {
            __builtin_memcpy(tail, rows, (to - key) * dwords * 4);
            __builtin_memset(tail + (to - key) * dwords, 0, (kKeys - (to - key)) * dwords * 4);
            rows = tail;
        }
        for (int64_t half = 0; half < kKeys; half += 16)
            for (int64_t j = 0; j < dwords; j += 16)
                transpose16(rows + half * dwords + j, dwords, tile + j * kKeys + half, kKeys);
        for (int64_t i = 0; i < queries; i += kScoreTile)
            dispatch_score<C>(queries - i, q + i * d, d, tile, scores + i * job.padded + key, job.padded);
    }
}

// weights[query][key] = exp(score - maximum over the visible keys); 0 for masked keys and the padding.
static inline void weigh(const AttentionJob& job, const Block& b, float* scores, float* weights) {
    const int64_t keys = job.keys(b), context = job.a.cache_lengths[b.sequence], earlier = job.earlier(b);
    const int64_t end = (keys + 15) / 16 * 16;
    for (int64_t i = 0; i < b.rows * job.group; ++i) {
        const int64_t row = b.first + i / job.group, own = earlier + row;
        float* s = scores + i * job.padded;
        float* w = weights + i * job.padded;
        if (w != s) __builtin_memcpy(w, s, keys * sizeof(float));
        const bool causal = job.causal(b, row);
        const int32_t* mask = job.mask(b, row);
        for (int64_t t = 0; t < keys - context; ++t) {
            const bool listed = t / 32 < job.a.mask_words && (static_cast<uint32_t>(mask[t / 32]) >> (t % 32) & 1);
            if (!(t == own || (causal ? t < own : listed))) w[context + t] = -__builtin_inff();
        }
        for (int64_t j = keys; j < end; ++j) w[j] = -__builtin_inff();
        f32x16 top = set1(-__builtin_inff());
        for (int64_t j = 0; j < end; j += 16) top = max(top, load(w + j));
        const f32x16 m = set1(maximum(top));
        for (int64_t j = 0; j < end; j += 16) store(w + j, exp(sub(load(w + j), m)));
    }
}

template <class C, int QUERIES, int PARTS>
static inline void value_tile(const float* weights, int64_t stride, const C* values, int64_t d, int64_t keys,
                              float* const* out) {
    f32x16 acc[QUERIES][PARTS], total[QUERIES];
    for (int i = 0; i < QUERIES; ++i) {
        total[i] = zero();
        for (int j = 0; j < PARTS; ++j) acc[i][j] = zero();
    }
    for (int64_t key = 0; key < keys; ++key) {
        f32x16 v[PARTS];
#pragma GCC unroll 4
        for (int j = 0; j < PARTS; ++j) v[j] = load(values + key * d + 16 * j);
#pragma GCC unroll 8
        for (int i = 0; i < QUERIES; ++i) {
            const f32x16 w = set1(weights[i * stride + key]);
            total[i] = add(total[i], w);
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; ++j) acc[i][j] = fma(w, v[j], acc[i][j]);
        }
    }
    for (int i = 0; i < QUERIES; ++i)
        for (int j = 0; j < PARTS; ++j) store(out[i] + 16 * j, div(acc[i][j], total[i]));
}

template <class C, int PARTS, int QUERIES = kValueTile>
static inline void dispatch_value(int64_t count, const float* weights, int64_t stride, const C* values, int64_t d,
                                  int64_t keys, float* const* out) {
    if (count >= QUERIES) return value_tile<C, QUERIES, PARTS>(weights, stride, values, d, keys, out);
    if constexpr (QUERIES > 1) dispatch_value<C, PARTS, QUERIES - 1>(count, weights, stride, values, d, keys, out);
}

// The block's output columns [from, to) of each head.
template <class C>
static inline void gather_values(const AttentionJob& job, const Block& b, const float* weights, int64_t from,
                                 int64_t to) {
    const TreeAttentionArgs& a = job.a;
    const int64_t d = a.head_size, keys = job.keys(b);
    const C* values = static_cast<const C*>(a.v_cache) + job.cache_offset(b);
    for (int64_t i = 0; i < b.rows * job.group; i += kValueTile) {
        const int64_t count = b.rows * job.group - i;
        float* out[kValueTile];
        for (int64_t j = 0; j < kValueTile && j < count; ++j) {
            const int64_t row = a.row_offsets[b.sequence] + b.first + (i + j) / job.group;
            out[j] = a.out + (row * a.heads + b.head * job.group + (i + j) % job.group) * d + from;
        }
        for (int64_t column = from; column < to;) {
            const int64_t width = to - column >= 64 ? 64 : 32;
            const float* w = weights + i * job.padded;
            if (width == 64)
                dispatch_value<C, 4>(count, w, job.padded, values + column, d, keys, out);
            else
                dispatch_value<C, 2>(count, w, job.padded, values + column, d, keys, out);
            for (int64_t j = 0; j < kValueTile && j < count; ++j) out[j] += width;
            column += width;
        }
    }
}

struct AttentionScratch {
    float* q;
    uint32_t* tile;
    float* scores;

    AttentionScratch(const AttentionJob& job, int thread)
        : q(static_cast<float*>(thread_scratch(thread))),
          tile(reinterpret_cast<uint32_t*>(q + job.queries * job.a.head_size)),
          scores(reinterpret_cast<float*>(tile + 2 * kKeys * job.a.head_size)) {}
    static int64_t bytes(const AttentionJob& job) {
        return 4 * (job.queries * (job.a.head_size + job.padded) + 2 * kKeys * job.a.head_size);
    }
};

template <class C>
static void attend_block(const void* context, int64_t begin, int64_t end, int thread) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const AttentionScratch scratch(job, thread);
    for (int64_t item = begin; item < end; ++item) {
        const Block& b = job.blocks[item];
        load_queries(job, b, scratch.q);
        score<C>(job, b, scratch.q, 0, job.keys(b), scratch.tile, scratch.scores);
        weigh(job, b, scratch.scores, scratch.scores);
        gather_values<C>(job, b, scratch.scores, 0, job.a.head_size);
    }
}

template <class C>
static void score_chunk(const void* context, int64_t begin, int64_t end, int thread) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const AttentionScratch scratch(job, thread);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t block = item / job.key_chunks, from = item % job.key_chunks * kKeyChunk;
        const Block& b = job.blocks[block];
        const int64_t keys = job.keys(b), to = keys < from + kKeyChunk ? keys : from + kKeyChunk;
        if (from >= to) continue;
        load_queries(job, b, scratch.q);
        score<C>(job, b, scratch.q, from, to, scratch.tile, job.scores + block * job.queries * job.padded);
    }
}

template <class C>
static void value_chunk(const void* context, int64_t begin, int64_t end, int thread) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const AttentionScratch scratch(job, thread);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t block = item / job.value_chunks, from = item % job.value_chunks * 32;
        const Block& b = job.blocks[block];
        weigh(job, b, job.scores + block * job.queries * job.padded, scratch.scores);
        gather_values<C>(job, b, scratch.scores, from, from + 32);
    }
}

template <class C>
static void run_attention(AttentionJob& job) {
    const TreeAttentionArgs& a = job.a;
    const int64_t rows = a.row_offsets[a.sequences];
    __builtin_memset(a.out + rows * a.heads * a.head_size, 0, (a.rows - rows) * a.heads * a.head_size * sizeof(float));
    PoolLock lock;
    const int64_t threads = thread_count(), wanted = 4 * threads;
    int64_t block_rows = kBlockQueries / job.group < 1 ? 1 : kBlockQueries / job.group;
    if (block_rows * wanted > rows * a.kv_heads) block_rows = rows * a.kv_heads / wanted;
    if (block_rows < 1) block_rows = 1;
    int64_t blocks = 0, longest = 0;
    for (int64_t s = 0; s < a.sequences; ++s) {
        const int64_t n = a.row_offsets[s + 1] - a.row_offsets[s];
        blocks += (n + block_rows - 1) / block_rows * a.kv_heads;
        if (job.start(s) + n > longest) longest = job.start(s) + n;
    }
    job.padded = (longest + kKeys - 1) / kKeys * kKeys;
    job.queries = block_rows * job.group;
    const bool by_keys = threads > 1 && blocks < wanted;
    const int64_t block_bytes = (blocks * sizeof(Block) + 63) / 64 * 64;
    char* scratch = static_cast<char*>(
        lock.shared_scratch(block_bytes + (by_keys ? blocks * job.queries * job.padded * sizeof(float) : 0)));
    job.blocks = reinterpret_cast<Block*>(scratch);
    job.scores = reinterpret_cast<float*>(scratch + block_bytes);
    job.key_chunks = (job.padded + kKeyChunk - 1) / kKeyChunk;
    job.value_chunks = a.head_size / 32;
    Block* block = job.blocks;
    for (int32_t s = 0; s < a.sequences; ++s) {
        const int32_t n = a.row_offsets[s + 1] - a.row_offsets[s];
        for (int32_t h = 0; h < a.kv_heads; ++h)
            for (int32_t first = 0; first < n; first += static_cast<int32_t>(block_rows))
                *block++ = {s, h, first, n - first < block_rows ? n - first : static_cast<int32_t>(block_rows)};
    }
    lock.reserve_thread_scratch(AttentionScratch::bytes(job));
    const Phase update = {update_cache<C>, a.sequences * a.kv_heads};
    if (by_keys) {
        const Phase phases[] = {update, {score_chunk<C>, blocks * job.key_chunks}, {value_chunk<C>, blocks * job.value_chunks}};
        run_phases(phases, 3, &job);
    } else {
        const Phase phases[] = {update, {attend_block<C>, blocks}};
        run_phases(phases, 2, &job);
    }
}

static void tree_attention(const TreeAttentionArgs& a) {
    AttentionJob job{a, a.heads / a.kv_heads, 0, 0, nullptr, nullptr, 0, 0};
    if (a.cache_dtype == DType::bf16)
        run_attention<uint16_t>(job);
    else
        run_attention<float>(job);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
