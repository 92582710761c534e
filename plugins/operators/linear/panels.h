// Rows times panels of packed weights: what `linear` and `linear_topk` share. README.md has the layout.
//
// An output element is summed over the input features in one order, whatever the number of rows, the
// tile it falls into or the thread that computes it.
#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"
#include "../norm/kernel.h"
#include "blocks.h"
#include "tiles.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// An activation unit is what multiplies a step: a float, or a pair of bf16 or floats.

struct DotFloat {
    static constexpr int64_t kUnit = 1;  // floats per step in a prepared row
    static inline void step(f32x16* acc, const float* x, const char* w) {
        const float* p = reinterpret_cast<const float*>(w);
        const f32x16 b = set1(*x);
        acc[0] = fma(b, load(p), acc[0]);
        acc[1] = fma(b, load(p + 16), acc[1]);
    }
};

#if defined(__AVX512BF16__)
constexpr bool kPairedBf16 = true;
constexpr int kMaxTile = 12;
struct DotBf16 {
    static constexpr int64_t kUnit = 1;
    static inline void step(f32x16* acc, const float* x, const char* w) {
        const __m512bh b = reinterpret_cast<__m512bh>(_mm512_set1_ps(*x));
        acc[0].v = _mm512_dpbf16_ps(acc[0].v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(w)), b);
        acc[1].v = _mm512_dpbf16_ps(acc[1].v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + 64)), b);
    }
};
#else
constexpr bool kPairedBf16 = false;
#if defined(__AVX512F__)
constexpr int kMaxTile = 12;
#else
constexpr int kMaxTile = 3;
#endif
struct DotBf16 {
    static constexpr int64_t kUnit = 2;
    static inline void step(f32x16* acc, const float* x, const char* w) {
        const uint16_t* p = reinterpret_cast<const uint16_t*>(w);
        const f32x16 even = set1(x[0]), odd = set1(x[1]);
        acc[0] = fma(even, load_even_bf16(p), fma(odd, load_odd_bf16(p), acc[0]));
        acc[1] = fma(even, load_even_bf16(p + 32), fma(odd, load_odd_bf16(p + 32), acc[1]));
    }
};
#endif

// ROWS prepared rows times one panel: out[ROWS][32]. Meanwhile fetches LINES cache lines per step from
// `prefetch` on.
template <class Dot, int ROWS, int LINES>
static void tile(const float* x, int64_t stride, const char* w, int64_t steps, const char* prefetch, float* out) {
    f32x16 acc[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = zero();
    for (int64_t k = 0; k < steps; ++k) {
        if constexpr (LINES > 0) _mm_prefetch(prefetch + k * LINES * 64, _MM_HINT_T1);
        if constexpr (LINES > 1) _mm_prefetch(prefetch + k * LINES * 64 + 64, _MM_HINT_T1);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) Dot::step(acc[r], x + r * stride + k * Dot::kUnit, w + k * kStepBytes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        store(out + r * kPanel, acc[r][0]);
        store(out + r * kPanel + 16, acc[r][1]);
    }
}

template <class Dot, int LINES, int ROWS = kMaxTile>
static inline void dispatch_tile(int rows, const float* x, int64_t stride, const char* w, int64_t steps,
                                 const char* prefetch, float* out) {
    if (rows == ROWS) return tile<Dot, ROWS, LINES>(x, stride, w, steps, prefetch, out);
    if constexpr (ROWS > 1) dispatch_tile<Dot, LINES, ROWS - 1>(rows, x, stride, w, steps, prefetch, out);
}

// All prepared rows times one panel: out[rows][32].
template <class Dot>
static inline void all_tiles(const float* x, int64_t stride, int64_t rows, const char* w, int64_t steps,
                             const char* next, float* out) {
    const int64_t tiles = (rows + kMaxTile - 1) / kMaxTile;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles, end = rows * (t + 1) / tiles;
        const float* row = x + first * stride;
        float* to = out + first * kPanel;
        const int count = static_cast<int>(end - first);
        constexpr int kLines = kStepBytes / 64;  // of a panel, per step
        if (tiles == 1)
            dispatch_tile<Dot, kLines>(count, row, stride, w, steps, next, to);
        else if (t < kLines)
            dispatch_tile<Dot, 1>(count, row, stride, w, steps, next + t * steps * 64, to);
        else
            dispatch_tile<Dot, 0>(count, row, stride, w, steps, next, to);
    }
}

constexpr int64_t kTail = 8;  // floats behind a row's units: room to write whole vectors

// Up to so many rows are prepared by every thread for itself: it has less to wait for and to fetch from others.
constexpr int64_t kOwnRows = 4;

// A Projection with its rows normalized, rounded and laid out for the tiles.
struct Prepared {
    Projection p;
    float* shared = nullptr;  // [rows, stride], unless every thread has its own
    int64_t stride;           // in floats: an odd number of cache lines
    int64_t steps;
    int64_t tail;             // where a row's units end
    int64_t panel_bytes;      // of stored weights
    bool tiled = false;       // whether AMX multiplies these rows
    int64_t late_lines = 0;   // what `fetch` fetches for each row, in cache lines
    bool gated;               // whether a panel's second half is not behind the first

    explicit Prepared(const Projection& projection, bool gated = false) : p(projection), gated(gated) {
        const int64_t group = feature_group(p.dtype);
        steps = (p.in_features + group - 1) / group;
        panel_bytes = steps * kStepBytes;
        tail = steps * (p.dtype == DType::blocks ? kGroupFloats : p.dtype == DType::bf16 ? DotBf16::kUnit : 1);
        stride = ((tail + kTail + 15) / 16 * 16) | 16;
#if defined(__AMX_BF16__)
        tiled = p.dtype == DType::bf16;
        if (tiled) late_lines = (panel_bytes / 64 - steps / kTileSteps * kEarlyLines + p.rows - 1) / p.rows;
#endif
    }
    bool own_rows() const { return p.rows <= kOwnRows; }
    int64_t row_floats() const { return p.rows * stride; }
    int64_t shared_bytes() const { return own_rows() ? 0 : row_floats() * 4; }
    float* rows_of(int thread) const { return own_rows() ? static_cast<float*>(thread_scratch(thread)) : shared; }

    // A thread's scratch: its own rows, results of `panels` panels [panels, rows, 32], and `more`.
    int64_t scratch_bytes(int64_t panels, int64_t more = 0) const {
        return ((own_rows() ? row_floats() : 0) + panels * p.rows * kPanel) * 4 + more;
    }
    float* results(int thread) const {
        return static_cast<float*>(thread_scratch(thread)) + (own_rows() ? row_floats() : 0);
    }

    const char* panel(int64_t index) const { return static_cast<const char*>(p.weight) + index * panel_bytes; }

    // What a thread does before its first panel, and behind its last.
    void enter(int thread) const {
        if (own_rows())
            for (int64_t r = 0; r < p.rows; ++r) prepare_row(r, thread);
#if defined(__AMX_BF16__)
        if (tiled && p.rows <= 2 * kTileRows) shape_tiles(p.rows);
#endif
    }
    void leave() const {
#if defined(__AMX_BF16__)
        if (tiled) _tile_release();
#endif
    }

    void prepare_row(int64_t r, int thread) const {
        const int64_t n = p.in_features;
        const float* from = p.x + (p.row_ids ? p.row_ids[r] : r) * n;
        float* to = rows_of(thread) + r * stride;
        const RowNorm norm(from, n, p.norm, p.norm_bias, p.norm_eps);
        const auto normalized = [&](int64_t i) { return norm(load_first(from + i, n - i), i, n - i); };
        if (p.dtype == DType::blocks) return round_groups(normalized, to);
        for (int64_t i = 0; i < n; i += 16) {
            const f32x16 v = normalized(i);
            if (p.dtype == DType::fp32)
                store(to + i, v);
            else if (kPairedBf16)
                store_bf16(reinterpret_cast<uint16_t*>(to) + i, v);
            else
                store(to + i, round_bf16(v));
        }
#if defined(__AMX_BF16__)
        if (p.dtype != DType::fp32)
            for (int64_t i = tail; i % kTileSteps; ++i) to[i] = 0;
#endif
    }

    // Integers: multiples of 1/127 of each group's largest magnitude.
    template <class F>
    void round_groups(F value, float* to) const {
        const auto half = [&](int64_t i) { return i < p.in_features ? value(i) : zero(); };
        for (int64_t i = 0; i < p.in_features; i += kBlockGroup, to += kGroupFloats) {
            const f32x16 x[2] = {half(i), half(i + 16)};
            const float top = maximum(max(max(absolute(x[0]), absolute(x[1])), set1(1e-30f)));
            const f32x16 inverse = set1(127.0f / top);
            // Not a number where one of them is none: rounding would make it one.
            to[kGroupScale] = top / 127.0f + sum(fma(x[0], zero(), mul(x[1], zero())));
            for (int h = 0; h < 2; ++h) {
                const i32x16 rounded = to_int(mul(x[h], inverse));
                store_bytes(to + 4 * h, rounded);
                to[kHalfSums + h] = sum(rounded);
            }
            to[kGroupSum] = to[kHalfSums] + to[kHalfSums + 1];
        }
    }

    // The first or second half-panel of a panel times all rows: out[rows][32], of which 16 are written.
    void multiply_blocks(int64_t index, int half, const float* x, float* out) const {
        const int64_t number = gated ? index + half * half_panels(p.out_features) : 2 * index + half;
        const HalfPanel found = find_half_panel(p.segments, p.segment_count, p.weight, p.in_features, number);
        if (!found.segment) {
            for (int64_t r = 0; r < p.rows; ++r) store(out + r * kPanel, zero());
            return;
        }
        with_form(found.segment->form, [&]<BlockForm F>() {
            const HalfPanelView panel = {found.data,    found.segment->form, span_groups(*found.segment),
                                         span_bytes(F), step_bytes(F),       group_bytes(F)};
            block_tiles<tile_form(F)>(x, stride, p.rows, panel, steps, found.bytes, out);
        });
    }

    // out[rows][32] = all rows times panel `index`. Meanwhile the panel behind it is fetched, by tiles all of it or most:
    // where results are written behind each panel, `fetch` has the rest, lest memory be idle then.
    void multiply(int64_t index, int thread, float* out, [[maybe_unused]] bool all) const {
        const char* w = panel(index);
        const char* next = w + panel_bytes;
        const float* x = rows_of(thread);
        if (p.dtype == DType::blocks) {
            for (int half = 0; half < 2; ++half) multiply_blocks(index, half, x, out + half * kPanel / 2);
            return;
        }
        if (p.dtype == DType::fp32) return all_tiles<DotFloat>(x, stride, p.rows, w, steps, next, out);
#if defined(__AMX_BF16__)
        all_tile_rows(x, stride, p.rows, w, steps, next, all ? kTileLines : kEarlyLines, out);
#else
        all_tiles<DotBf16>(x, stride, p.rows, w, steps, next, out);
#endif
    }

    // What multiply left of the panel behind `index`, a part for each row.
    void fetch(int64_t index, int64_t r) const {
        const char* from = panel(index + 2) - (p.rows - r) * late_lines * 64;
        for (int64_t i = 0; i < late_lines; ++i) _mm_prefetch(from + i * 64, _MM_HINT_T1);
    }
};

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
