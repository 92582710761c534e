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
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
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

// What the sum of a group's products is multiplied by: a scale, after `offset` times the sum of the row's codes was added
// or before `minimum` times it is; or each half's sum by its own scale.
enum class GroupScale { offset, minimum, halves };
constexpr int kHalvesZero = 32;  // of the one form that has halves

// What a tile knows of a form. Forms that differ in how their floats are stored share it.
struct TileForm {
    int bits;
    GroupScale scale;
};
constexpr TileForm tile_form(const BlockForm& f) {
    return {f.bits, f.steps == ScaleSteps::half ? GroupScale::halves
                    : f.minimum                 ? GroupScale::minimum
                                                : GroupScale::offset};
}

// Two vectors for 16 weight rows: a group's scale, and its offset or minimum; or its halves' scales.
template <BlockForm F>
static inline void group_floats(const char* span, const char* group, f32x16* floats) {
    const f32x16 scale = F.zeros ? load(reinterpret_cast<const float*>(span)) : load_half(span);
    if constexpr (F.steps == ScaleSteps::half) {
        for (int i = 0; i < 2; ++i)
            floats[i] = mul(scale, load_int8(reinterpret_cast<const int8_t*>(group) + kHalfPanel * i));
    } else if constexpr (F.steps == ScaleSteps::group) {
        floats[0] = mul(scale, load_uint8(group));
        floats[1] = sub(zero(), mul(load_half(span + 2 * kHalfPanel), load_uint8(group + kHalfPanel)));
    } else {
        const f32x16 offset = set1(static_cast<float>(kCodeOffset<F.bits>));
        floats[0] = scale;
        floats[1] = F.minimum ? load_half(span + 2 * kHalfPanel)
                    : F.zeros ? sub(offset, load_uint8(span + 4 * kHalfPanel))
                              : sub(offset, set1(static_cast<float>(F.zero)));
    }
}

// The same for one of the forms that share a tile.
template <TileForm T, int INDEX = 0>
static inline void group_floats(int32_t form, const char* span, const char* group, f32x16* floats) {
    constexpr TileForm here = tile_form(kBlockForms[INDEX]);
    if constexpr (here.bits == T.bits && here.scale == T.scale)
        if (form == INDEX) return group_floats<kBlockForms[INDEX]>(span, group, floats);
    if constexpr (INDEX + 1 < kBlockFormCount) group_floats<T, INDEX + 1>(form, span, group, floats);
}

// A half-panel of a form, and what lies in it: for each span its floats, then its groups, whose codes follow their steps.
struct HalfPanelView {
    const char* data;
    int32_t form;
    int64_t span_groups, span_bytes, step_bytes, group_bytes;
};

// ROWS prepared rows times one half-panel: out[ROWS][32], of which 16 are written. Fetches what lies `ahead` bytes
// behind, unless that is 0.
template <TileForm F, int ROWS>
__attribute__((noinline)) static void block_tile(const float* x, int64_t stride, HalfPanelView panel, int64_t groups,
                                                 int64_t ahead, float* out) {
    const float* rows[ROWS];
    f32x16 sums[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        rows[r] = x + r * stride;
        sums[r] = zero();
    }
    const char *w = panel.data, *span = w;
    for (int64_t g = 0, left = 0; g < groups; ++g, --left) {
        if (!left) {
            span = w;
            w += panel.span_bytes;
            left = panel.span_groups;
        }
        if (ahead)
            for (int64_t i = 0; i <= kHalfPanel * kBlockGroup * F.bits / 8; i += 64) _mm_prefetch(w + ahead + i, _MM_HINT_T0);
        const char* codes = w + panel.step_bytes;
        i32x16 dots[ROWS], more[ROWS];
        if constexpr (F.scale == GroupScale::halves) {
            dot_units<F.bits, ROWS, 0, 4>(rows, codes, dots);
            dot_units<F.bits, ROWS, 4, 4>(rows, codes, more);
        } else {
            dot_units<F.bits, ROWS, 0, 8>(rows, codes, dots);
        }
        f32x16 floats[2];
        group_floats<F>(panel.form, span, w, floats);
        const f32x16 zeros = set1(-kHalvesZero);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const f32x16 sum = set1(rows[r][kGroupSum]);
            f32x16 value;
            if constexpr (F.scale == GroupScale::halves)
                value = fma(floats[1], fma(zeros, set1(rows[r][kHalfSums + 1]), to_float(more[r])),
                            mul(floats[0], fma(zeros, set1(rows[r][kHalfSums]), to_float(dots[r]))));
            else if constexpr (F.scale == GroupScale::minimum)
                value = fma(floats[0], to_float(dots[r]), mul(floats[1], sum));
            else
                value = mul(floats[0], fma(floats[1], sum, to_float(dots[r])));
            sums[r] = fma(set1(rows[r][kGroupScale]), value, sums[r]);
            rows[r] += kGroupFloats;
        }
        w += panel.group_bytes;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) store(out + r * kPanel, sums[r]);
}

template <TileForm F, int ROWS = kBlockRows>
static inline void dispatch_block_tile(int64_t rows, const float* x, int64_t stride, const HalfPanelView& panel,
                                       int64_t groups, int64_t ahead, float* out) {
    if (rows == ROWS) return block_tile<F, ROWS>(x, stride, panel, groups, ahead, out);
    if constexpr (ROWS > 1) dispatch_block_tile<F, ROWS - 1>(rows, x, stride, panel, groups, ahead, out);
}

// All prepared rows times one half-panel of so many bytes; what follows it is fetched.
template <TileForm F>
__attribute__((noinline)) static void block_tiles(const float* x, int64_t stride, int64_t rows,
                                                  const HalfPanelView& panel, int64_t groups, int64_t bytes, float* out) {
    const int64_t tiles = (rows + kBlockRows - 1) / kBlockRows;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
        dispatch_block_tile<F>(count, x + first * stride, stride, panel, groups, t ? 0 : bytes, out + first * kPanel);
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
    const char* span = w;
    for (int64_t first = 0, group = 0; first < features; first += kBlockGroup, ++group, w += group_bytes(F)) {
        if (group % span_groups == 0) {
            span = w;
            w += span_bytes(F);
        }
        f32x16 floats[2];
        group_floats<F>(span, w, floats);
        float scale[2][16], second[16];
        for (int half = 0; half < 2; ++half) store(scale[half], floats[F.steps == ScaleSteps::half ? half : 0]);
        store(second, floats[1]);
        const float zero = F.steps == ScaleSteps::half ? kHalvesZero
                           : F.minimum                 ? 0.0f
                                                       : kCodeOffset<F.bits> - second[row];
        for (int i = 0; i < kBlockGroup && first + i < features; ++i) {
            const float code = static_cast<float>(
                code_of<F.bits>(reinterpret_cast<const uint8_t*>(w) + step_bytes(F), row, i));
            const float value = scale[i / 16][row] * (code - zero);
            out[first + i] = F.minimum ? value + second[row] : value;
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
