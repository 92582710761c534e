// Sixteen float lanes with the same meaning in every instruction set.
//
// `f32x16` is one AVX-512 register or a pair of AVX2 registers. Every operation rounds the same way in
// both, so that fp32 results do not depend on the instruction set. Compiled once per instruction set:
// REDRAFT_ISA_NAMESPACE keeps the copies apart. No standard templates here: the linker would merge
// copies compiled for different instruction sets.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace redraft::REDRAFT_ISA_NAMESPACE {

#if defined(__AVX512F__)

struct f32x16 {
    __m512 v;
};

static inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }
static inline __m512 widen_bf16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
static inline f32x16 zero() { return {_mm512_setzero_ps()}; }
static inline f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline f32x16 load(const uint16_t* p) {
    return {widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline f32x16 load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
// The first n lanes of x, and zeros.
static inline f32x16 first(f32x16 x, int64_t n) { return {_mm512_maskz_mov_ps(first_lanes(n), x.v)}; }
static inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
static inline void store_first(float* p, f32x16 x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
static inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline f32x16 round_to_int(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
static inline f32x16 scale_by_power_of_two(f32x16 a, f32x16 n) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), bits))};
}
// `a` where x >= limit, else 0.
static inline f32x16 where_at_least(f32x16 x, float limit, f32x16 a) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GE_OQ), a.v)};
}
// Bit i is set where lane i of a is >= lane i of b.
static inline uint32_t at_least(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
static inline __m256 low_half(f32x16 a) { return _mm512_castps512_ps256(a.v); }
static inline __m256 high_half(f32x16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
// 16 floats to bf16, round to nearest even, denormals kept.
static inline __m256i round_bits_bf16(f32x16 x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
static inline void store_bf16(uint16_t* p, f32x16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bits_bf16(x));
}
static inline f32x16 round_bf16(f32x16 x) { return {widen_bf16(round_bits_bf16(x))}; }
// The even / odd elements of 32 consecutive bf16 numbers.
static inline f32x16 load_even_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
static inline f32x16 load_odd_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff0000)))};
}
static inline f32x16 load_int8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
static inline f32x16 load_uint8(const char* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// 16 numbers of half precision.
static inline f32x16 load_half(const char* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Not __m512i: GCC 12 would keep an array of those in memory where their lanes are multiplied as 32-bit numbers.
struct i32x16 {
    __v16si v;
};
static inline i32x16 lanes32(__m512i x) { return {reinterpret_cast<__v16si>(x)}; }
static inline __m512i bits(i32x16 x) { return reinterpret_cast<__m512i>(x.v); }
static inline i32x16 to_int(f32x16 x) { return lanes32(_mm512_cvtps_epi32(x.v)); }
static inline f32x16 to_float(i32x16 x) { return {_mm512_cvtepi32_ps(bits(x))}; }
static inline f32x16 absolute(f32x16 x) { return {_mm512_abs_ps(x.v)}; }
static inline i32x16 load(const int32_t* p) { return lanes32(_mm512_loadu_si512(p)); }
static inline i32x16 count_from(int32_t first) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return lanes32(_mm512_add_epi32(_mm512_set1_epi32(first), lanes));
}
// The chosen lanes, one after another; up to 16 numbers at `p` are written.
static inline void store_lanes(float* p, f32x16 x, uint32_t lanes) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), x.v));
}
static inline void store_lanes(int32_t* p, i32x16 x, uint32_t lanes) {
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(lanes), bits(x)));
}
static inline i32x16 add(i32x16 a, i32x16 b) { return {a.v + b.v}; }
static inline void store(int32_t* p, i32x16 x) { _mm512_storeu_si512(p, bits(x)); }
// Bit i is set where the unsigned number in lane i is at most `limit`.
static inline uint32_t at_most(i32x16 a, uint32_t limit) {
    return _mm512_cmple_epu32_mask(bits(a), _mm512_set1_epi32(static_cast<int>(limit)));
}

// Eight 64-bit lanes, for products of unsigned 32-bit numbers: their low halves.
struct u64x8 {
    __m512i v;
};
static inline u64x8 set1_wide(uint64_t x) { return {_mm512_set1_epi64(static_cast<long long>(x))}; }
static inline u64x8 widen(const uint32_t* p) {
    return {_mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// first, first + 1, ...
static inline u64x8 ascending(uint64_t first) {
    return {_mm512_add_epi64(set1_wide(first).v, _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7))};
}
static inline u64x8 product(u64x8 a, u64x8 b) { return {_mm512_mul_epu32(a.v, b.v)}; }
static inline u64x8 high_halves(u64x8 a) { return {_mm512_srli_epi64(a.v, 32)}; }
static inline u64x8 exclusive_or(u64x8 a, u64x8 b) { return {_mm512_xor_si512(a.v, b.v)}; }
// Low halves: lane i of a to 2 i, lane i of b to 2 i + 1.
static inline i32x16 interleave(u64x8 a, u64x8 b) {
    return lanes32(_mm512_mask_blend_epi32(0xaaaa, a.v, _mm512_slli_epi64(b.v, 32)));
}
// 64 bytes, four for each of 16 lanes.
struct u8x64 {
    __m512i v;
};
static inline u8x64 load_bytes(const char* p) { return {_mm512_loadu_si512(p)}; }
static inline u8x64 set1_bytes(int x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
static inline u8x64 operator&(u8x64 a, u8x64 b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline u8x64 operator|(u8x64 a, u8x64 b) { return {_mm512_or_si512(a.v, b.v)}; }
static inline u8x64 operator^(u8x64 a, u8x64 b) { return {_mm512_xor_si512(a.v, b.v)}; }
// To the left by `n` bits, or by -n to the right, in words: bits pass from one byte into its neighbour.
static inline u8x64 shift_words(u8x64 a, int n) {
    return {n < 0 ? _mm512_srli_epi16(a.v, -n) : _mm512_slli_epi16(a.v, n)};
}
#if defined(__AVX512VNNI__)
// sum + the products of four unsigned bytes of each lane and the four signed ones at x.
static inline i32x16 dot_bytes(i32x16 sum, u8x64 w, const float* x) {
    return lanes32(_mm512_dpbusd_epi32(bits(sum), w.v, _mm512_castps_si512(_mm512_set1_ps(*x))));
}
#else
static inline u8x64 absolute(u8x64 a) { return {_mm512_abs_epi8(a.v)}; }
// Signed bytes times the signs of others.
static inline u8x64 with_sign(u8x64 a, u8x64 sign) {
    return {_mm512_mask_sub_epi8(a.v, _mm512_movepi8_mask(sign.v), _mm512_setzero_si512(), a.v)};
}
static inline u8x64 set1_unit(const float* x) { return {_mm512_castps_si512(_mm512_set1_ps(*x))}; }
struct i16x32 {
    __m512i v;
};
static inline i16x32 add(i16x32 a, i16x32 b) {
    a = {_mm512_add_epi16(a.v, b.v)};
    asm("" : "+v"(a.v));  // lest GCC put all products of a sum into memory before it adds the first two
    return a;
}
// Of unsigned and signed bytes: the sums of two products each, which 16 bits must hold.
static inline i16x32 pair_products(u8x64 a, u8x64 b) { return {_mm512_maddubs_epi16(a.v, b.v)}; }
static inline i32x16 pair_sums(i16x32 a) { return lanes32(_mm512_madd_epi16(a.v, _mm512_set1_epi16(1))); }
#endif

// out[c * out_stride + r] = in[r * in_stride + c] for 16 x 16 dwords.
static inline void transpose16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(in + i * in_stride);
    for (int i = 0; i < 8; ++i) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(out + i * out_stride, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
        _mm512_storeu_si512(out + (4 + i) * out_stride, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88));
        _mm512_storeu_si512(out + (8 + i) * out_stride, _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
        _mm512_storeu_si512(out + (12 + i) * out_stride, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd));
    }
}

#else

struct f32x16 {
    __m256 lo, hi;
};

static inline __m256i first_lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n > 8 ? 8 : n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline __m256 widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
static inline f32x16 load(const uint16_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
static inline f32x16 load_first(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
static inline f32x16 first(f32x16 x, int64_t n) {
    return {_mm256_and_ps(_mm256_castsi256_ps(first_lanes(n)), x.lo),
            _mm256_and_ps(_mm256_castsi256_ps(first_lanes(n - 8)), x.hi)};
}
static inline void store(float* p, f32x16 x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
static inline void store_first(float* p, f32x16 x, int64_t n) {
    _mm256_maskstore_ps(p, first_lanes(n), x.lo);
    _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.hi);
}
static inline f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline f32x16 round_to_int(f32x16 a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline __m256 scale_by_power_of_two(__m256 a, __m256 n) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
static inline f32x16 scale_by_power_of_two(f32x16 a, f32x16 n) {
    return {scale_by_power_of_two(a.lo, n.lo), scale_by_power_of_two(a.hi, n.hi)};
}
static inline f32x16 where_at_least(f32x16 x, float limit, f32x16 a) {
    const __m256 bound = _mm256_set1_ps(limit);
    return {_mm256_and_ps(_mm256_cmp_ps(x.lo, bound, _CMP_GE_OQ), a.lo),
            _mm256_and_ps(_mm256_cmp_ps(x.hi, bound, _CMP_GE_OQ), a.hi)};
}
static inline uint32_t at_least(f32x16 a, f32x16 b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))) << 8;
}
static inline __m256 low_half(f32x16 a) { return a.lo; }
static inline __m256 high_half(f32x16 a) { return a.hi; }
static inline __m256i round_bits_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
}
static inline void store_bf16(uint16_t* p, f32x16 x) {
    const __m256i packed = _mm256_packus_epi32(round_bits_bf16(x.lo), round_bits_bf16(x.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline f32x16 round_bf16(f32x16 x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(round_bits_bf16(x.lo), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(round_bits_bf16(x.hi), 16))};
}
static inline f32x16 load_even_bf16(const uint16_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
static inline f32x16 load_odd_bf16(const uint16_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), mask)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), mask))};
}
static inline f32x16 load_uint8(const char* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
static inline f32x16 load_half(const char* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
static inline f32x16 load_int8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

struct i32x16 {
    __m256i lo, hi;
};
static inline i32x16 to_int(f32x16 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
static inline f32x16 to_float(i32x16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
static inline f32x16 absolute(f32x16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
static inline i32x16 load(const int32_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
static inline i32x16 count_from(int32_t first) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_add_epi32(_mm256_set1_epi32(first), lanes), _mm256_add_epi32(_mm256_set1_epi32(first + 8), lanes)};
}
static inline void store_lanes(float* p, f32x16 x, uint32_t lanes) {
    float all[16];
    store(all, x);
    for (; lanes; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
}
static inline i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
static inline void store(int32_t* p, i32x16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.hi);
}
static inline uint32_t at_most(__m256i a, __m256i limit) {
    const __m256i within = _mm256_cmpeq_epi32(_mm256_min_epu32(a, limit), a);
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(within)));
}
static inline uint32_t at_most(i32x16 a, uint32_t limit) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(limit));
    return at_most(a.lo, all) | at_most(a.hi, all) << 8;
}

struct u64x8 {
    __m256i lo, hi;
};
static inline u64x8 set1_wide(uint64_t x) {
    const __m256i all = _mm256_set1_epi64x(static_cast<long long>(x));
    return {all, all};
}
static inline u64x8 widen(const uint32_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepu32_epi64(_mm_loadu_si128(q)), _mm256_cvtepu32_epi64(_mm_loadu_si128(q + 1))};
}
static inline u64x8 ascending(uint64_t first) {
    const u64x8 all = set1_wide(first);
    return {_mm256_add_epi64(all.lo, _mm256_setr_epi64x(0, 1, 2, 3)),
            _mm256_add_epi64(all.hi, _mm256_setr_epi64x(4, 5, 6, 7))};
}
static inline u64x8 product(u64x8 a, u64x8 b) { return {_mm256_mul_epu32(a.lo, b.lo), _mm256_mul_epu32(a.hi, b.hi)}; }
static inline u64x8 high_halves(u64x8 a) { return {_mm256_srli_epi64(a.lo, 32), _mm256_srli_epi64(a.hi, 32)}; }
static inline u64x8 exclusive_or(u64x8 a, u64x8 b) {
    return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
static inline i32x16 interleave(u64x8 a, u64x8 b) {
    return {_mm256_blend_epi32(a.lo, _mm256_slli_epi64(b.lo, 32), 0xaa),
            _mm256_blend_epi32(a.hi, _mm256_slli_epi64(b.hi, 32), 0xaa)};
}
static inline void store_lanes(int32_t* p, i32x16 x, uint32_t lanes) {
    int32_t all[16];
    store(all, x);
    for (; lanes; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
}
struct u8x64 {
    __m256i lo, hi;
};
static inline u8x64 load_bytes(const char* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
static inline u8x64 set1_bytes(int x) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(x));
    return {all, all};
}
static inline u8x64 operator&(u8x64 a, u8x64 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
static inline u8x64 operator|(u8x64 a, u8x64 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
static inline u8x64 operator^(u8x64 a, u8x64 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
static inline __m256i shift_words(__m256i a, int n) {
    return n < 0 ? _mm256_srli_epi16(a, -n) : _mm256_slli_epi16(a, n);
}
static inline u8x64 shift_words(u8x64 a, int n) { return {shift_words(a.lo, n), shift_words(a.hi, n)}; }
#if defined(__AVXVNNI__)
static inline i32x16 dot_bytes(i32x16 sum, u8x64 w, const float* x) {
    const __m256i unit = _mm256_castps_si256(_mm256_set1_ps(*x));
    return {_mm256_dpbusd_avx_epi32(sum.lo, w.lo, unit), _mm256_dpbusd_avx_epi32(sum.hi, w.hi, unit)};
}
#else
static inline u8x64 absolute(u8x64 a) { return {_mm256_abs_epi8(a.lo), _mm256_abs_epi8(a.hi)}; }
static inline u8x64 with_sign(u8x64 a, u8x64 sign) {
    return {_mm256_sign_epi8(a.lo, sign.lo), _mm256_sign_epi8(a.hi, sign.hi)};
}
static inline u8x64 set1_unit(const float* x) {
    const __m256i unit = _mm256_castps_si256(_mm256_set1_ps(*x));
    return {unit, unit};
}
struct i16x32 {
    __m256i lo, hi;
};
static inline i16x32 add(i16x32 a, i16x32 b) {
    a = {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)};
    asm("" : "+x"(a.lo), "+x"(a.hi));  // lest GCC put all products of a sum into memory before it adds the first two
    return a;
}
static inline i16x32 pair_products(u8x64 a, u8x64 b) {
    return {_mm256_maddubs_epi16(a.lo, b.lo), _mm256_maddubs_epi16(a.hi, b.hi)};
}
static inline i32x16 pair_sums(i16x32 a) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(a.lo, ones), _mm256_madd_epi16(a.hi, ones)};
}
#endif

static inline void transpose8(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(in + i * in_stride));
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        a[4 * i] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0x44);
        a[4 * i + 1] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0xee);
        a[4 * i + 2] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0x44);
        a[4 * i + 3] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(reinterpret_cast<float*>(out + i * out_stride), _mm256_permute2f128_ps(a[i], a[4 + i], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(out + (4 + i) * out_stride),
                         _mm256_permute2f128_ps(a[i], a[4 + i], 0x31));
    }
}
static inline void transpose16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    for (int r = 0; r < 16; r += 8)
        for (int c = 0; c < 16; c += 8)
            transpose8(in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
}

#endif

// 16 numbers from -127 to 127 as bytes.
static inline void store_bytes(float* to, i32x16 x) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(bits(x)));
#else
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#endif
}
static inline float sum(i32x16 a) {
    int32_t lanes[16], total = 0;
    store(lanes, a);
    for (int32_t lane : lanes) total += lane;
    return static_cast<float>(total);
}

// Sum and maximum of the 16 lanes, by halves: i with i + 8, then 4, 2, 1.
static inline float sum(f32x16 a) {
    const __m256 x = _mm256_add_ps(low_half(a), high_half(a));
    const __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
static inline float maximum(f32x16 a) {
    const __m256 x = _mm256_max_ps(low_half(a), high_half(a));
    const __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 z = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

// e^x within 2 ulp for x in [-87, 88]; exactly 0 below -87, so that a masked score (-inf) weighs nothing.
static inline f32x16 exp(f32x16 x) {
    const f32x16 bounded = sub(zero(), max(sub(zero(), max(x, set1(-87.0f))), set1(-88.0f)));
    const f32x16 n = round_to_int(mul(bounded, set1(1.44269504f)));
    const f32x16 r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), bounded));
    f32x16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    return where_at_least(x, -87.0f, scale_by_power_of_two(p, n));
}

// While it lives, vector instructions take denormals as zeros, as tile instructions do.
class FlushedDenormals {
  public:
    FlushedDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
    ~FlushedDenormals() { _mm_setcsr(before_); }
    FlushedDenormals(const FlushedDenormals&) = delete;
    FlushedDenormals& operator=(const FlushedDenormals&) = delete;

  private:
    const unsigned before_;
};

// The tanh approximation: 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline f32x16 gelu(f32x16 x) {
    const f32x16 u = mul(mul(x, set1(-1.5957691216f)), fma(mul(x, x), set1(0.044715f), set1(1.0f)));
    return div(x, add(set1(1.0f), exp(u)));
}
static inline f32x16 silu(f32x16 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
