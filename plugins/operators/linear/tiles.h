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
// Cache lines of the next panel that are fetched every 16 steps: all of them, or what leaves some to fetch while results
// are written, as measured.
constexpr int64_t kTileLines = 32, kEarlyLines = 24;

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

// Adds the products of the tiles 4 and, if SECOND, 5 with 6 and 7.
template <bool SECOND>
static inline void multiply_tiles() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (SECOND) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Adds rows x, which lie `stride` floats apart, times 16 steps w of a panel; a row is the sum of PARTS, `part` floats apart.
template <bool SECOND, int PARTS>
static inline void tile_steps(const float* x, int64_t stride, int64_t part, const char* w, const char* next,
                              int64_t lines) {
    _tile_loadd(6, w, kStepBytes);
    for (int64_t i = 0; i < lines / 2; ++i) _mm_prefetch(next + i * 64, _MM_HINT_T1);
    _tile_loadd(7, w + 64, kStepBytes);
    for (int64_t i = lines / 2; i < lines; ++i) _mm_prefetch(next + i * 64, _MM_HINT_T1);
    for (int i = 0; i < PARTS; ++i, x += part) {
        _tile_loadd(4, x, stride * 4);
        if constexpr (SECOND) _tile_loadd(5, x + kTileRows * stride, stride * 4);
        multiply_tiles<SECOND>();
    }
}

// Up to 32 prepared rows times one panel: out[rows][32], as `Tiles` of so many rows are set. Rows are
// zero, or multiply into a zero, behind their units; a row is the sum of PARTS, one behind the other, of as many steps
// each. Meanwhile fetches cache lines from `next` on, `lines` for every 16 steps.
template <bool SECOND, int PARTS = 1>
static void tile_rows(const float* x, int64_t stride, const char* w, int64_t steps, const char* next, int64_t lines,
                      float* out) {
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (SECOND) _tile_zero(2);
    if constexpr (SECOND) _tile_zero(3);
    const int64_t whole = steps / kTileSteps * kTileSteps;
    for (int64_t k = 0; k < whole; k += kTileSteps) {
        tile_steps<SECOND, PARTS>(x + k, stride, steps, w + k * kStepBytes, next, lines);
        next += lines * 64;
    }
    if (whole < steps) {
        alignas(64) char last[kTileSteps * kStepBytes] = {};
        memcpy(last, w + whole * kStepBytes, (steps - whole) * kStepBytes);
        asm volatile("" ::: "memory");
        tile_steps<SECOND, PARTS>(x + whole, stride, steps, last, next, 0);
    }
    _tile_stored(0, out, kPanel * 4);
    _tile_stored(1, out + 16, kPanel * 4);
    if constexpr (SECOND) _tile_stored(2, out + kTileRows * kPanel, kPanel * 4);
    if constexpr (SECOND) _tile_stored(3, out + kTileRows * kPanel + 16, kPanel * 4);
    asm volatile("" ::: "memory");
}

// All prepared rows times one panel: out[rows][32]. Tiles have the shapes of so many rows, unless these are more than 32.
static inline void all_tile_rows(const float* x, int64_t stride, int64_t rows, const char* w, int64_t steps,
                                 const char* next, int64_t lines, float* out) {
    if (rows <= kTileRows) return tile_rows<false>(x, stride, w, steps, next, lines, out);
    if (rows <= 2 * kTileRows) return tile_rows<true>(x, stride, w, steps, next, lines, out);
    for (int64_t first = 0; first < rows; first += 2 * kTileRows) {
        const int64_t count = rows - first < 2 * kTileRows ? rows - first : 2 * kTileRows;
        shape_tiles(count);
        const auto multiply = count > kTileRows ? tile_rows<true> : tile_rows<false>;
        multiply(x + first * stride, stride, w, steps, next, first ? 0 : lines, out + first * kPanel);
    }
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE

#endif
