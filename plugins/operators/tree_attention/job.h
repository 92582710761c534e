// What one call of the operator is made of: blocks of queries, and the cache that is updated before any of them reads it.
#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"
#include "../norm/kernel.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// Consecutive rows of one sequence under one KV head: all of its query heads.
struct Block {
    int32_t sequence, head, first, rows;
};

struct AttentionJob {
    const TreeAttentionArgs& a;
    int64_t group;    // query heads of a KV head
    int64_t padded;   // longest sequence's keys, rounded up to kKeys
    int64_t behind;   // most rows behind a sequence's context
    int64_t queries;  // largest block's
    Block* blocks;
    float* scores;    // [blocks, queries * padded], where keys are shared out
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
    // Whether the row's bits name row t behind the context, which is not behind the row.
    bool listed(const Block& b, int64_t row, int64_t t) const {
        return t / 32 < a.mask_words && (static_cast<uint32_t>(mask(b, row)[t / 32]) >> (t % 32) & 1);
    }
    // Cache row of the sequence's first row, and how many rows stand between the context and it.
    int64_t start(int64_t sequence) const { return (a.starts ? a.starts : a.cache_lengths)[sequence]; }
    int64_t earlier(const Block& b) const { return start(b.sequence) - a.cache_lengths[b.sequence]; }
    // Keys that some row of the block may see: the context and the rows up to the block's last.
    int64_t keys(const Block& b) const { return start(b.sequence) + b.first + b.rows; }
    // Keys at the start of the cache, in whole kKeys, that no row sees: its window ends after them.
    int64_t first_key(const Block& b) const {
        const int64_t hidden = a.window ? a.cache_lengths[b.sequence] + 1 - a.window : 0;
        return hidden > 0 ? hidden / kKeys * kKeys : 0;
    }
    // Place of a cached key or value in its head's part of the cache, in elements; from a multiple of kKeys on, so many
    // lie one after the other.
    int64_t at(int64_t place) const { return (place < a.cache_rows ? place : place % a.cache_rows) * a.head_size; }
    int64_t cache_offset(const Block& b) const {
        return (a.slots[b.sequence] * a.kv_heads + b.head) * a.cache_rows * a.head_size;
    }
};

static inline void write(float* to, f32x16 v) { store(to, v); }
static inline void write(uint16_t* to, f32x16 v) { store_bf16(to, v); }

// to = x, normalized where there is a norm, rotated to the position, times scale.
template <class C>
static inline void rope(const TreeAttentionArgs& a, const float* x, const float* norm, int64_t row, float scale, C* to) {
    const int64_t half = a.head_size / 2;
    const float* cosine = a.rope_table + a.positions[row] * a.head_size;
    const f32x16 inverse = set1(norm ? inverse_rms(x, a.head_size, a.norm_eps) : 1.0f);
    const auto element = [&](int64_t i) { return norm ? mul(mul(load(x + i), inverse), load(norm + i)) : load(x + i); };
    for (int64_t i = 0; i < half; i += 16) {
        const f32x16 c = load(cosine + i), s = load(cosine + half + i), x0 = element(i), x1 = element(half + i);
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
            const int64_t to = job.at(base + j), moved = job.at(base + source);
            __builtin_memcpy(k + to, k + moved, d * sizeof(C));
            __builtin_memcpy(v + to, v + moved, d * sizeof(C));
        }
        for (int64_t row = a.row_offsets[b.sequence]; row < a.row_offsets[b.sequence + 1]; ++row) {
            const int64_t at = job.at(job.start(b.sequence) + row - a.row_offsets[b.sequence]);
            const float* x = a.qkv + row * (a.heads + 2 * a.kv_heads) * d + (a.heads + b.head) * d;
            rope(a, x, a.k_norm, row, 1.0f, k + at);
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
        const float* x = a.qkv + (row * (a.heads + 2 * a.kv_heads) + head) * a.head_size;
        rope(a, x, a.q_norm, row, scale, q + i * a.head_size);
    }
}

// Dwords of the keys [key, key + kKeys), transposed: to[head_size / elements per dword][kKeys]; zeros from the key `end`
// on. Behind them is room for kKeys rows.
template <class C>
static inline void transpose_keys(const AttentionJob& job, const Block& b, int64_t key, int64_t end, uint32_t* to) {
    const int64_t dwords = job.a.head_size * sizeof(C) / 4, left = end - key;
    const C* cache = static_cast<const C*>(job.a.k_cache) + job.cache_offset(b);
    const uint32_t* rows = reinterpret_cast<const uint32_t*>(cache + job.at(key));
    if (left < kKeys) {
        uint32_t* last = to + kKeys * dwords;
        __builtin_memcpy(last, rows, left * dwords * 4);
        __builtin_memset(last + left * dwords, 0, (kKeys - left) * dwords * 4);
        rows = last;
    }
    for (int64_t half = 0; half < kKeys; half += 16)
        for (int64_t j = 0; j < dwords; j += 16)
            transpose16(rows + half * dwords + j, dwords, to + j * kKeys + half, kKeys);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
