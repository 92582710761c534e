// AVX-512 as SIMDe carries it out with AVX2 and plain code, under the compiler's own names: for tests on CPUs without.
// What SIMDe lacks follows.
#pragma once

#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace emulated {

template <class To, class Lane, class From, class F>
static inline To lanes(From from, F f) {
    constexpr int kCount = sizeof(To) / sizeof(Lane);
    Lane result[kCount];
    for (int i = 0; i < kCount; ++i) result[i] = f(from, i);
    To to;
    __builtin_memcpy(&to, result, sizeof(to));
    return to;
}
template <class Lane, class From>
static inline Lane lane(const From& from, int i) {
    Lane result;
    __builtin_memcpy(&result, reinterpret_cast<const char*>(&from) + i * sizeof(Lane), sizeof(result));
    return result;
}
template <class To, class Lane, class Source, class From>
static inline To converted(From from) {
    return lanes<To, Lane>(from, [](const From& x, int i) { return static_cast<Lane>(lane<Source>(x, i)); });
}

static inline __m512 cvtph(__m256i x) {
    return lanes<__m512, float>(x, [](const __m256i& h, int i) { return _cvtsh_ss(lane<unsigned short>(h, i)); });
}
static inline __m512i cvtps(__m512 x) {  // to nearest even, as the CPU is set
    return lanes<__m512i, int>(x, [](const __m512& v, int i) { return _mm_cvtss_si32(_mm_set_ss(lane<float>(v, i))); });
}
static inline __m512 maskz_loadu(unsigned mask, const float* p) {
    return lanes<__m512, float>(p, [mask](const float* from, int i) { return mask >> i & 1 ? from[i] : 0.0f; });
}
static inline void mask_storeu(float* p, unsigned mask, __m512 x) {
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) p[i] = lane<float>(x, i);
}
static inline __m256 extract(__m512 x, int half) {
    __m256 result;
    __builtin_memcpy(&result, reinterpret_cast<const char*>(&x) + 32 * half, sizeof(result));
    return result;
}

}  // namespace emulated

#undef _mm512_madd_epi16  // SIMDe 0.7.4 gives it the parameters of another
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm512_cvtepi32_epi16(x) (emulated::converted<__m256i, short, int>(x))
#define _mm512_cvtepi32_epi8(x) (emulated::converted<__m128i, signed char, int>(x))
#define _mm512_cvtepi32_ps(x) (emulated::converted<__m512, float, int>(x))
#define _mm512_cvtepi8_epi32(x) (emulated::converted<__m512i, int, signed char>(x))
#define _mm512_cvtepu8_epi32(x) (emulated::converted<__m512i, int, unsigned char>(x))
#define _mm512_cvtepu16_epi32(x) (emulated::converted<__m512i, int, unsigned short>(x))
#define _mm512_cvtepu32_epi64(x) (emulated::converted<__m512i, long long, unsigned>(x))
#define _mm512_cvtph_ps(x) emulated::cvtph(x)
#define _mm512_cvtps_epi32(x) emulated::cvtps(x)
#define _mm512_maskz_loadu_ps(mask, p) emulated::maskz_loadu(mask, p)
#define _mm512_mask_storeu_ps(p, mask, x) emulated::mask_storeu(p, mask, x)
#define _mm512_extractf32x8_ps(x, half) emulated::extract(x, half)

#define asm(...)  // what holds GCC back in simd.h names registers that this CPU lacks

#define _mm256_dpbusd_avx_epi32(sum, a, b) simde_mm256_dpbusd_epi32(sum, a, b)

// The kernels ask these; SIMDe must not have seen them.
#if defined(REDRAFT_EMULATED_AVX_VNNI)
#define __AVXVNNI__ 1
#else
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if defined(REDRAFT_EMULATED_VNNI)
#define __AVX512VNNI__ 1
#endif
#endif
