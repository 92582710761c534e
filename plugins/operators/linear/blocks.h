// Prepared rows times half-panels of weights in blocks: codes of 4, 5, 6 or 8 bits, and what the scale of a group of
// features is made of. README.md has the layout and the arithmetic.
#pragma once

#include "../../cpu/simd.h"
#include "block_forms.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// A prepared row has for each group of 32 features eight units of four int8 codes, then floats: the scale, and the sums
// of all codes, of the first 16 and of the others.
constexpr int kGroupUnits = kBlockGroup / 4;
constexpr int kGroupScale = kGroupUnits, kGroupSum = kGroupUnits + 1, kHalfSums = kGroupUnits + 2;
constexpr int64_t kGroupFloats = kGroupUnits + 4;

#if defined(__AVX512F__)
constexpr int kBlockRows = 8;  // that are multiplied with a group once it is unpacked
#else
constexpr int kBlockRows = 4;
#endif

// Units 2 * pair and 2 * pair + 1 of a group: of each, four unsigned codes of every weight row.
template <int BITS>
static inline void unpack(const char* codes, int pair, u8x64* units) {
    if constexpr (BITS == 8) {
        for (int i = 0; i < 2; ++i) units[i] = load_bytes(codes + (2 * pair + i) * 64);
    } else {
        const u8x64 both = load_bytes(codes + pair * 64);
        units[0] = both & set1_bytes(15);
        units[1] = shift_words(both, -4) & set1_bytes(15);
    }
    if constexpr (BITS == 5) {
        const u8x64 high = load_bytes(codes + 256);  // a bit of every unit
        for (int i = 0; i < 2; ++i) units[i] = units[i] | (shift_words(high, 4 - 2 * pair - i) & set1_bytes(16));
    }
    if constexpr (BITS == 6) {
        const u8x64 high = load_bytes(codes + 256 + pair / 2 * 64);  // two bits of four units
        for (int i = 0; i < 2; ++i)
            units[i] = units[i] | (shift_words(high, 4 - 2 * (2 * pair % 4 + i)) & set1_bytes(48));
    }
}

// ROWS rows times the codes of units FIRST to FIRST + COUNT, less kCodeOffset: exact sums.
#if defined(__AVX512VNNI__)
template <int BITS>
constexpr int kCodeOffset = 0;

template <int BITS, int ROWS, int FIRST, int COUNT>
static inline void dot_units(const float* const* rows, const char* codes, i32x16* sums) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[r] = to_int(zero());
#pragma GCC unroll 4
    for (int pair = FIRST / 2; pair < (FIRST + COUNT) / 2; ++pair) {
        u8x64 w[2];
        unpack<BITS>(codes, pair, w);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sums[r] = dot_bytes(sums[r], w[i], rows[r] + 2 * pair + i);
    }
}
#else
template <int BITS>
constexpr int kCodeOffset = BITS == 8 ? 128 : 0;

template <int BITS, int ROWS, int FIRST, int COUNT>
static inline void dot_units(const float* const* rows, const char* codes, i32x16* sums) {
    // Units whose pairs of products, 2 * 127 times the largest code each, add up within 16 bits.
    constexpr int kFit = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
    i16x32 words[ROWS];
#pragma GCC unroll 4
    for (int pair = FIRST / 2; pair < (FIRST + COUNT) / 2; ++pair) {
        u8x64 w[2];
        unpack<BITS>(codes, pair, w);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const int unit = 2 * pair + i - FIRST;
            const u8x64 weights = BITS == 8 ? w[i] ^ set1_bytes(128) : w[i];
            const u8x64 magnitude = BITS == 8 ? absolute(weights) : weights;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                u8x64 each = set1_unit(rows[r] + 2 * pair + i);
                if constexpr (BITS == 8) each = with_sign(each, weights);
                const i16x32 products = pair_products(magnitude, each);
                words[r] = unit % kFit ? add(words[r], products) : products;
                if (unit % kFit == kFit - 1 || unit == COUNT - 1)
                    sums[r] = unit < kFit ? pair_sums(words[r]) : add(sums[r], pair_sums(words[r]));
            }
        }
    }
}
#endif

// The float parts of 16 weight rows: those of a span, and those of one of its groups.
template <BlockForm F>
struct BlockParts {
    f32x16 span_scale, span_minimum;  // or the span's zero
    f32x16 scale[2], minimum;         // of a group's halves; where they are not apart the first is of both

    void enter_span(const char* p) {
        span_scale = F.zeros ? load(reinterpret_cast<const float*>(p)) : load_half(p);
        if constexpr (F.minimum) span_minimum = load_half(p + 32);
        if constexpr (F.zeros) span_minimum = load_uint8(p + 64);
    }
    void enter_group(const char* p) {
        scale[0] = span_scale;
        minimum = span_minimum;
        if constexpr (F.steps == ScaleSteps::group) {
            scale[0] = mul(span_scale, load_uint8(p));
            minimum = sub(zero(), mul(span_minimum, load_uint8(p + 16)));
        }
        if constexpr (F.steps == ScaleSteps::half)
            for (int i = 0; i < 2; ++i) scale[i] = mul(span_scale, load_int8(reinterpret_cast<const int8_t*>(p) + 16 * i));
    }
    // Exact: codes less zero, times a row's codes.
    f32x16 less_zero(i32x16 dot, f32x16 sum) const {
        const f32x16 offset = set1(static_cast<float>(kCodeOffset<F.bits>));
        if constexpr (F.zeros) return fma(sub(offset, minimum), sum, to_float(dot));
        if constexpr (F.zero == kCodeOffset<F.bits>) return to_float(dot);
        return fma(set1(static_cast<float>(kCodeOffset<F.bits> - F.zero)), sum, to_float(dot));
    }
};

// ROWS prepared rows times one half-panel: out[ROWS][32], of which 16 are written. Fetches what lies `ahead` bytes
// behind, unless that is 0.
template <BlockForm F, int ROWS>
__attribute__((noinline)) static void block_tile(const float* x, int64_t stride, const char* w, int64_t groups,
                                                 int64_t span_groups, int64_t ahead, float* out) {
    const float* rows[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        rows[r] = x + r * stride;
        store(out + r * kPanel, zero());
    }
    BlockParts<F> parts;
    int64_t left = 0;  // groups of the span
    for (int64_t g = 0; g < groups; ++g) {
        if (F.span == kBlockGroup || !left) {
            parts.enter_span(w);
            w += span_bytes(F);
            left = span_groups;
        }
        --left;
        if (ahead)
            for (int64_t i = 0; i < group_bytes(F) + span_bytes(F); i += 64) _mm_prefetch(w + ahead + i, _MM_HINT_T0);
        const char* codes = w + step_bytes(F);
        i32x16 dots[ROWS], more[ROWS];
        if constexpr (F.steps == ScaleSteps::half) {
            dot_units<F.bits, ROWS, 0, 4>(rows, codes, dots);
            dot_units<F.bits, ROWS, 4, 4>(rows, codes, more);
        } else {
            dot_units<F.bits, ROWS, 0, 8>(rows, codes, dots);
        }
        parts.enter_group(w);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            f32x16 value;
            if constexpr (F.steps == ScaleSteps::half)
                value = fma(parts.scale[1], parts.less_zero(more[r], set1(rows[r][kHalfSums + 1])),
                            mul(parts.scale[0], parts.less_zero(dots[r], set1(rows[r][kHalfSums]))));
            else if constexpr (F.minimum)
                value = fma(parts.scale[0], to_float(dots[r]), mul(parts.minimum, set1(rows[r][kGroupSum])));
            else
                value = mul(parts.scale[0], parts.less_zero(dots[r], set1(rows[r][kGroupSum])));
            float* sum = out + r * kPanel;  // in memory: registers hold the integers
            store(sum, fma(set1(rows[r][kGroupScale]), value, load(sum)));
            rows[r] += kGroupFloats;
        }
        w += group_bytes(F);
    }
}

template <BlockForm F, int ROWS = kBlockRows>
static inline void dispatch_block_tile(int64_t rows, const float* x, int64_t stride, const char* w, int64_t groups,
                                       int64_t span_groups, int64_t ahead, float* out) {
    if (rows == ROWS) return block_tile<F, ROWS>(x, stride, w, groups, span_groups, ahead, out);
    if constexpr (ROWS > 1) dispatch_block_tile<F, ROWS - 1>(rows, x, stride, w, groups, span_groups, ahead, out);
}

// All prepared rows times one half-panel.
template <BlockForm F>
static inline void block_tiles(const float* x, int64_t stride, int64_t rows, const char* w, int64_t groups,
                               int64_t span_groups, int64_t half_panel, float* out) {
    const int64_t tiles = (rows + kBlockRows - 1) / kBlockRows;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
        dispatch_block_tile<F>(count, x + first * stride, stride, w, groups, span_groups, t ? 0 : half_panel,
                               out + first * kPanel);
    }
}

// A feature's code in a group's codes.
template <int BITS>
static inline int code_of(const uint8_t* codes, int64_t row, int feature) {
    const int unit = feature / 4;
    const int64_t byte = row * 4 + feature % 4;
    if constexpr (BITS == 8) return codes[unit * 64 + byte];
    int code = codes[unit / 2 * 64 + byte] >> (unit % 2 * 4) & 15;
    if constexpr (BITS == 5) code |= (codes[256 + byte] >> unit & 1) << 4;
    if constexpr (BITS == 6) code |= (codes[256 + unit / 4 * 64 + byte] >> (unit % 4 * 2) & 3) << 4;
    return code;
}

// One of a half-panel's rows in float: scale * (code - zero) + minimum.
template <BlockForm F>
static inline void block_row(const char* w, int64_t row, int64_t span_groups, int64_t features, float* out) {
    BlockParts<F> parts;
    for (int64_t first = 0, group = 0; first < features; first += kBlockGroup, ++group, w += group_bytes(F)) {
        if (group % span_groups == 0) {
            parts.enter_span(w);
            w += span_bytes(F);
        }
        parts.enter_group(w);
        float scale[2][16], minimum[16];
        for (int half = 0; half < 2; ++half) store(scale[half], parts.scale[F.steps == ScaleSteps::half ? half : 0]);
        if constexpr (F.minimum || F.zeros) store(minimum, parts.minimum);
        const float zero = F.zeros ? minimum[row] : static_cast<float>(F.zero);
        for (int i = 0; i < kBlockGroup && first + i < features; ++i) {
            const float code = static_cast<float>(
                code_of<F.bits>(reinterpret_cast<const uint8_t*>(w) + step_bytes(F), row, i));
            const float value = scale[i / 16][row] * (code - zero);
            out[first + i] = F.minimum ? value + minimum[row] : value;
        }
    }
}

// Calls f<form>().
template <class F, int INDEX = 0>
static inline void with_form(int32_t form, F f) {
    if (form == INDEX) return f.template operator()<kBlockForms[INDEX]>();
    if constexpr (INDEX + 1 < kBlockFormCount) with_form<F, INDEX + 1>(form, f);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
