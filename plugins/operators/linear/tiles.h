// Rows times panels by AMX, whose tile registers hold 16 rows of 64 bytes.
//
// 16 steps of half a panel are a tile as they lie in memory, and so are 16 units of up to 16 prepared rows. One
// instruction multiplies two such tiles; how it sums for a row depends on no other row, nor on how many there are.
#pragma once

#include "../../cpu/simd.h"

#if defined(__AMX_BF16__)

#include <string.h>

namespace redraft::REDRAFT_ISA_NAMESPACE {

constexpr int64_t kTileRows = 16, kTileSteps = 16;

// Gives a thread's tiles shapes for so many rows: 0 and 1 are the sums of up to 16 rows, 2 and 3 those of up to 16 more, 4
// and 5 these rows, 6 and 7 the panel's halves.
static inline void shape_tiles(int64_t rows) {
    const int64_t first = rows < kTileRows ? rows : kTileRows, second = rows - first;
    const int64_t counts[8] = {first, first, second, second, first, second, kTileSteps, kTileSteps};
    struct alignas(64) {
        uint8_t palette = 1, unused[15] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) {
        shape.rows[i] = static_cast<uint8_t>(counts[i]);
        shape.row_bytes[i] = counts[i] ? 64 : 0;
    }
    asm volatile("" ::"r"(&shape) : "memory");  // the compiler does not know what tile instructions read
    _tile_loadconfig(&shape);
}

// The same while it lives.
class Tiles {
  public:
    explicit Tiles(int64_t rows) { shape_tiles(rows); }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// The tiles' numbers are part of an instruction's name, hence macros.
#define REDRAFT_TILE_DOT(name, instruction)        \
    struct name {                                  \
        template <bool SECOND>                     \
        static inline void multiply() {            \
            instruction(0, 4, 6);                  \
            instruction(1, 4, 7);                  \
            if constexpr (SECOND) {                \
                instruction(2, 5, 6);              \
                instruction(3, 5, 7);              \
            }                                      \
        }                                          \
    };
REDRAFT_TILE_DOT(TileBf16, _tile_dpbf16ps)
REDRAFT_TILE_DOT(TileW8A8, _tile_dpbsud)
#undef REDRAFT_TILE_DOT

// Adds rows x, which lie `stride` floats apart, times 16 steps w of a panel; a row is the sum of PARTS, `part` floats apart.
template <class Dot, bool SECOND, int PARTS>
static inline void tile_steps(const float* x, int64_t stride, int64_t part, const char* w, const char* next,
                              int64_t lines) {
    _tile_loadd(6, w, kStepBytes);
    for (int64_t i = 0; i < lines / 2; ++i) _mm_prefetch(next + i * 64, _MM_HINT_T1);
    _tile_loadd(7, w + 64, kStepBytes);
    for (int64_t i = lines / 2; i < lines; ++i) _mm_prefetch(next + i * 64, _MM_HINT_T1);
    for (int i = 0; i < PARTS; ++i, x += part) {
        _tile_loadd(4, x, stride * 4);
        if constexpr (SECOND) _tile_loadd(5, x + kTileRows * stride, stride * 4);
        Dot::template multiply<SECOND>();
    }
}

// Up to 32 prepared rows times one panel: float or int32 out[rows][32], as `Tiles` of so many rows are set. Rows are
// zero, or multiply into a zero, behind their units; a row is the sum of PARTS, one behind the other, of as many steps
// each. Meanwhile fetches cache lines from `next` on, `lines` for every 16 steps.
template <class Dot, bool SECOND, int PARTS = 1>
static void tile_rows(const float* x, int64_t stride, const char* w, int64_t steps, const char* next, int64_t lines,
                      float* out) {
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (SECOND) _tile_zero(2);
    if constexpr (SECOND) _tile_zero(3);
    const int64_t whole = steps / kTileSteps * kTileSteps;
    for (int64_t k = 0; k < whole; k += kTileSteps) {
        tile_steps<Dot, SECOND, PARTS>(x + k, stride, steps, w + k * kStepBytes, next, lines);
        next += lines * 64;
    }
    if (whole < steps) {
        alignas(64) char last[kTileSteps * kStepBytes] = {};
        memcpy(last, w + whole * kStepBytes, (steps - whole) * kStepBytes);
        asm volatile("" ::: "memory");
        tile_steps<Dot, SECOND, PARTS>(x + whole, stride, steps, last, next, 0);
    }
    _tile_stored(0, out, kPanel * 4);
    _tile_stored(1, out + 16, kPanel * 4);
    if constexpr (SECOND) _tile_stored(2, out + kTileRows * kPanel, kPanel * 4);
    if constexpr (SECOND) _tile_stored(3, out + kTileRows * kPanel + 16, kPanel * 4);
    asm volatile("" ::: "memory");
}

// The same sums without tiles, for int8 weights that stand for bf16: widening takes longer than few rows take to multiply.
// Over 16 steps at a time those of even and of odd features apart, fused, with denormals as zeros; then their sum is added.
// (Intel's Software Developer's Manual, TDPBF16PS.)
template <int ROWS>
static void few_rows(const float* x, int64_t stride, const char* w, int64_t steps, const char* next, float* out) {
    constexpr int64_t kBytes = kStepBytes / 2;
    const FlushedDenormals flushed;
    const __m512i odd_bits = _mm512_set1_epi32(0xffff0000);
    const auto even_of = [](__m512i pairs) { return f32x16{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}; };
    const auto odd_of = [&](__m512i pairs) { return f32x16{_mm512_castsi512_ps(_mm512_and_si512(pairs, odd_bits))}; };
    f32x16 sum[ROWS][2];
    for (auto& row : sum) row[0] = row[1] = zero();
    for (int64_t first = 0; first < steps; first += kTileSteps) {
        const int64_t end = first + kTileSteps < steps ? first + kTileSteps : steps;
        f32x16 even[ROWS][2], odd[ROWS][2];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = zero();
        for (int64_t k = first; k < end; ++k) {
            _mm_prefetch(next + k * kBytes, _MM_HINT_T1);
            __m512i weights[2];
            for (int half = 0; half < 2; ++half)
                weights[half] = widen_int8(reinterpret_cast<const int8_t*>(w) + k * kBytes + half * 32);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const __m512i pair = _mm512_castps_si512(_mm512_set1_ps(x[r * stride + k]));
                for (int half = 0; half < 2; ++half) {
                    even[r][half] = fma(even_of(pair), even_of(weights[half]), even[r][half]);
                    odd[r][half] = fma(odd_of(pair), odd_of(weights[half]), odd[r][half]);
                }
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int half = 0; half < 2; ++half) sum[r][half] = add(sum[r][half], add(even[r][half], odd[r][half]));
    }
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) store(out + r * kPanel + half * 16, sum[r][half]);
}

constexpr int kFewRows = 4;  // so many are faster without tiles, as measured

template <int ROWS = kFewRows>
static inline void dispatch_few_rows(int64_t rows, const float* x, int64_t stride, const char* w, int64_t steps,
                                     const char* next, float* out) {
    if (rows == ROWS) return few_rows<ROWS>(x, stride, w, steps, next, out);
    if constexpr (ROWS > 1) dispatch_few_rows<ROWS - 1>(rows, x, stride, w, steps, next, out);
}

// All prepared rows times one panel: out[rows][32]. Tiles have the shapes of so many rows, unless these are more than 32.
template <class Dot>
static inline void all_tile_rows(const float* x, int64_t stride, int64_t rows, const char* w, int64_t steps,
                                 const char* next, int64_t lines, float* out) {
    if (rows <= kTileRows) return tile_rows<Dot, false>(x, stride, w, steps, next, lines, out);
    if (rows <= 2 * kTileRows) return tile_rows<Dot, true>(x, stride, w, steps, next, lines, out);
    for (int64_t first = 0; first < rows; first += 2 * kTileRows) {
        const int64_t count = rows - first < 2 * kTileRows ? rows - first : 2 * kTileRows;
        shape_tiles(count);
        const auto multiply = count > kTileRows ? tile_rows<Dot, true> : tile_rows<Dot, false>;
        multiply(x + first * stride, stride, w, steps, next, first ? 0 : lines, out + first * kPanel);
    }
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE

#endif
