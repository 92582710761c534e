// Attention by AMX, over caches in bf16. A query is split into two bf16 numbers, which keep 16 of its 24 bits; weights are
// rounded to bf16.
//
// Values are summed in the order of a row's path, 32 keys at a time, so that a row's result depends on its path alone, and
// not on where a tree has put it. The keys that all rows of a block have in common from the start on, in whole 32s, go
// through tiles; the rest of each row's path, the same sums without them (`add_tail`).
#pragma once

#include "../linear/tiles.h"
#include "job.h"

#if defined(__AMX_BF16__)

namespace redraft::REDRAFT_ISA_NAMESPACE {

// 2^x, 0 below the least normal number where denormals are flushed; relative error below 2^-18.
static inline f32x16 exp2(f32x16 x) {
    const f32x16 bounded = max(x, set1(-300.0f)), n = round_to_int(bounded), r = sub(bounded, n);
    f32x16 p = set1(9.582852945e-03f);
    p = fma(p, r, set1(5.590642616e-02f));
    p = fma(p, r, set1(2.402409911e-01f));
    p = fma(p, r, set1(6.931241751e-01f));
    p = fma(p, r, set1(1.0f));
    return {_mm512_scalef_ps(p.v, n.v)};
}

// 32 consecutive floats to bf16; denormals to zero.
static inline __m512i pack_bf16(f32x16 first, f32x16 second) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
}

static_assert(kKeys == kPanel && kKeys == 2 * kTileSteps, "a tile's 16 pairs of keys");

// A thread's scratch, and what it does with a block.
struct Tiled {
    using Cache = uint16_t;
    static constexpr int64_t kBlockQueries = 2 * kTileRows, kItemsPerThread = 2;

    const AttentionJob& job;
    const int64_t d, stride, tail;
    float* q;           // [queries, d]
    uint16_t* split;    // [queries, 2, d] queries in bf16, then what that leaves of them
    uint32_t* keys;     // [d / 2, kKeys] pairs of elements, and room for kKeys rows
    float* scores;      // [padded / kKeys, queries, kKeys]
    int32_t* paths;     // [queries, tail] per row, the cache rows of its path behind the common keys
    int64_t* counts;    // [queries] how many
    float* rest;        // [tail] their scores
    uint16_t* weights;  // [queries, stride] in the order of the path
    float* totals;      // [queries] sums of the weights
    uint32_t* values;   // [d / kPanel, padded / 2, kPanel] pairs of keys
    float* sums;        // [queries, kPanel]

    Tiled(const AttentionJob& of, int thread) : Tiled(of, reinterpret_cast<uintptr_t>(thread_scratch(thread))) {}
    static int64_t bytes(const AttentionJob& job) { return static_cast<int64_t>(Tiled(job, uintptr_t{0}).scratch_end); }

    // scores of the keys [from, to); from is a multiple of kKeys.
    void score_keys(const Block& b, int64_t from, int64_t to, float* out) const {
        const int64_t queries = b.rows * job.group;
        load_queries(job, b, q);
        for (int64_t i = 0; i < queries; ++i)
            for (int64_t j = 0; j < d; j += 32) {
                const f32x16 x0 = load(q + i * d + j), x1 = load(q + i * d + j + 16);
                uint16_t* to_parts = split + i * 2 * d + j;
                _mm512_storeu_si512(to_parts, pack_bf16(x0, x1));
                _mm512_storeu_si512(to_parts + d, pack_bf16(sub(x0, load(to_parts)), sub(x1, load(to_parts + 16))));
            }
        const Tiles tiles(queries);
        for (int64_t key = from; key < to; key += kKeys) {
            for (int64_t i = 0; i < kKeys * d; i += 32) _mm_prefetch(cached_values(b) + key * d + i, _MM_HINT_T1);
            transpose_keys<uint16_t>(job, b, key, to, keys);
            multiply<2>(split, d, keys, d / 2, queries, out + key * job.queries);
        }
    }

    void attend(const Block& b, const float* scored, int64_t from, int64_t to) const {
        const FlushedDenormals flushed;
        const int64_t common = follow_paths(b);
        weigh(b, scored, common);
        pair_values(b, common, from, to);
        const Tiles tiles(b.rows * job.group);
        const uint32_t* panel = values;
        for (int64_t column = from; column < to; column += kPanel, panel += common / 2 * kPanel) {
            multiply<1>(weights, stride / 2, panel, common / 2, b.rows * job.group, sums);
            add_tails(b, common, column);
            write_out(b, column);
        }
    }

  private:
    const uintptr_t scratch_end;

    template <class T>
    static T* take(uintptr_t& from, int64_t count) {
        const uintptr_t here = from;
        from += (static_cast<uintptr_t>(count) * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(here);
    }
    Tiled(const AttentionJob& of, uintptr_t scratch)
        : job(of),
          d(of.a.head_size),
          stride((of.padded / kKeys | 1) * kKeys),
          tail((of.behind + 2 * kKeys - 1) / kKeys * kKeys),
          q(take<float>(scratch, of.queries * d)),
          split(take<uint16_t>(scratch, of.queries * 2 * d)),
          keys(take<uint32_t>(scratch, d * kKeys)),
          scores(take<float>(scratch, of.queries * of.padded)),
          paths(take<int32_t>(scratch, of.queries * tail)),
          counts(take<int64_t>(scratch, of.queries)),
          rest(take<float>(scratch, tail)),
          weights(take<uint16_t>(scratch, of.queries * stride)),
          totals(take<float>(scratch, of.queries)),
          values(take<uint32_t>(scratch, of.padded / 2 * d)),
          sums(take<float>(scratch, of.queries * kPanel)),
          scratch_end(scratch) {}

    // out[rows][kPanel] = rows x, `x_stride` dwords apart, times w[steps][kPanel], all pairs of bf16; a row is the sum of
    // PARTS that lie one after the other.
    template <int PARTS>
    static void multiply(const uint16_t* x, int64_t x_stride, const uint32_t* w, int64_t steps, int64_t rows, float* out) {
        const char* panel = reinterpret_cast<const char*>(w);
        const auto tiles = rows > kTileRows ? tile_rows<true, PARTS> : tile_rows<false, PARTS>;
        tiles(reinterpret_cast<const float*>(x), x_stride, panel, steps, panel, 0, out);
    }

    // Sets `paths` and `counts`; returns how many keys, in whole kKeys, all of the block's rows see from the start on.
    int64_t follow_paths(const Block& b) const {
        const int64_t context = job.a.cache_lengths[b.sequence], earlier = job.earlier(b);
        int64_t common = context + earlier + b.first + 1;  // what a causal first row sees
        for (int64_t i = 0; i < b.rows; ++i)
            if (!job.causal(b, b.first + i)) common = context;
        common = common / kKeys * kKeys;
        for (int64_t i = 0; i < b.rows; ++i) {
            const int64_t row = b.first + i, own = earlier + row;
            const bool causal = job.causal(b, row);
            int32_t* path = paths + i * tail;
            for (int64_t key = common; key < context; ++key) *path++ = static_cast<int32_t>(key);
            for (int64_t t = common > context ? common - context : 0; t <= own; ++t)
                if (t == own || causal || job.listed(b, row, t)) *path++ = static_cast<int32_t>(context + t);
            counts[i] = path - (paths + i * tail);
        }
        return common;
    }

    // exp(score - maximum over the path) in the order of the path, and zeros up to a multiple of kKeys.
    void weigh(const Block& b, const float* scored, int64_t common) const {
        const int64_t step = job.queries * kKeys;
        for (int64_t i = 0; i < b.rows * job.group; ++i) {
            const int32_t* path = paths + i / job.group * tail;
            const int64_t count = counts[i / job.group], filled = (count + kKeys - 1) / kKeys * kKeys;
            const float* s = scored + i * kKeys;
            for (int64_t j = 0; j < count; ++j) rest[j] = s[path[j] / kKeys * step + path[j] % kKeys];
            for (int64_t j = count; j < filled; ++j) rest[j] = -__builtin_inff();
            f32x16 top[2] = {set1(-__builtin_inff()), set1(-__builtin_inff())}, total[2] = {zero(), zero()};
            const auto find_top = [&](const float* from) {
                for (int half = 0; half < 2; ++half) top[half] = max(top[half], load(from + half * 16));
            };
            const float* end = s + common / kKeys * step;
            for (const float* from = s; from < end; from += step) find_top(from);
            for (int64_t j = 0; j < filled; j += kKeys) find_top(rest + j);
            const f32x16 m = set1(maximum(max(top[0], top[1]))), per_e = set1(1.44269504f);
            uint16_t* to = weights + i * stride;
            const auto weigh_keys = [&](const float* from) {
                const f32x16 w0 = exp2(mul(sub(load(from), m), per_e)), w1 = exp2(mul(sub(load(from + 16), m), per_e));
                _mm512_storeu_si512(to, pack_bf16(w0, w1));
                for (int half = 0; half < 2; ++half) total[half] = add(total[half], load(to + half * 16));
                to += kKeys;
            };
            for (const float* from = s; from < end; from += step) weigh_keys(from);
            for (int64_t j = 0; j < filled; j += kKeys) weigh_keys(rest + j);
            totals[i] = sum(add(total[0], total[1]));
        }
    }

    const uint16_t* cached_values(const Block& b) const {
        return static_cast<const uint16_t*>(job.a.v_cache) + job.cache_offset(b);
    }

    // values[column / kPanel][pair of keys][kPanel] of the columns [from, to).
    void pair_values(const Block& b, int64_t common, int64_t from, int64_t to) const {
        alignas(64) uint16_t order[2][32];
        for (int i = 0; i < 64; ++i) order[i / 32][i % 32] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
        const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
        const uint16_t* v = cached_values(b);
        uint32_t* pairs = values;
        const int64_t row = d, panel = common / 2 * kPanel;  // copies: a store of vectors might change `this`
        for (int64_t key = 0; key < common; key += 2, v += 2 * row, pairs += kPanel)
            for (int64_t column = from; column < to; column += kPanel) {
                const __m512i first = _mm512_loadu_si512(v + column), second = _mm512_loadu_si512(v + row + column);
                uint32_t* pair = pairs + (column - from) / kPanel * panel;
                _mm512_storeu_si512(pair, _mm512_permutex2var_epi16(first, low, second));
                _mm512_storeu_si512(pair + 16, _mm512_permutex2var_epi16(first, high, second));
            }
    }

    // Adds to the sums of QUERIES queries of one row what its path gives behind the common keys, as a tile instruction
    // sums: over 32 keys at a time those of even and of odd ones apart, fused, with denormals as zeros; then their sum is
    // added (Intel's Software Developer's Manual, TDPBF16PS).
    template <int QUERIES>
    void add_tail(const uint16_t* w, const uint16_t* v, const int32_t* path, int64_t count, float* to) const {
        f32x16 total[QUERIES][2];
        for (int i = 0; i < QUERIES; ++i)
            for (int half = 0; half < 2; ++half) total[i][half] = load(to + i * kPanel + half * 16);
        for (int64_t first = 0; first < count; first += kKeys) {
            const int64_t end = first + kKeys < count ? first + kKeys : count;
            f32x16 even[QUERIES][2], odd[QUERIES][2];
            for (int i = 0; i < QUERIES; ++i) even[i][0] = even[i][1] = odd[i][0] = odd[i][1] = zero();
            const auto add_key = [&](f32x16(*acc)[2], int64_t j) {
                const f32x16 v0 = load(v + path[j] * d), v1 = load(v + path[j] * d + 16);
#pragma GCC unroll 4
                for (int i = 0; i < QUERIES; ++i) {
                    const f32x16 x = {_mm512_castsi512_ps(_mm512_set1_epi32(w[i * stride + j] << 16))};
                    acc[i][0] = fma(x, v0, acc[i][0]);
                    acc[i][1] = fma(x, v1, acc[i][1]);
                }
            };
            for (int64_t j = first; j < end; j += 2) {
                add_key(even, j);
                if (j + 1 < end) add_key(odd, j + 1);
            }
            for (int i = 0; i < QUERIES; ++i)
                for (int half = 0; half < 2; ++half) total[i][half] = add(total[i][half], add(even[i][half], odd[i][half]));
        }
        for (int i = 0; i < QUERIES; ++i)
            for (int half = 0; half < 2; ++half) store(to + i * kPanel + half * 16, total[i][half]);
    }
    template <int QUERIES = 4>
    void dispatch_tail(int64_t queries, const uint16_t* w, const uint16_t* v, const int32_t* path, int64_t count,
                       float* to) const {
        if (queries >= QUERIES) return add_tail<QUERIES>(w, v, path, count, to);
        if constexpr (QUERIES > 1) dispatch_tail<QUERIES - 1>(queries, w, v, path, count, to);
    }
    void add_tails(const Block& b, int64_t common, int64_t column) const {
        for (int64_t row = 0; row < b.rows; ++row)
            for (int64_t i = 0; i < job.group; i += 4) {
                const int64_t query = row * job.group + i;
                dispatch_tail(job.group - i, weights + query * stride + common, cached_values(b) + column,
                              paths + row * tail, counts[row], sums + query * kPanel);
            }
    }

    void write_out(const Block& b, int64_t column) const {
        const TreeAttentionArgs& a = job.a;
        for (int64_t i = 0; i < b.rows * job.group; ++i) {
            const int64_t row = a.row_offsets[b.sequence] + b.first + i / job.group;
            float* out = a.out + (row * a.heads + b.head * job.group + i % job.group) * d + column;
            for (int half = 0; half < 2; ++half)
                store(out + half * 16, div(load(sums + i * kPanel + half * 16), set1(totals[i])));
        }
    }
};

}  // namespace redraft::REDRAFT_ISA_NAMESPACE

#endif
