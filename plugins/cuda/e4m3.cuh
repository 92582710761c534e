// Rows of bf16 numbers in E4M3, as `quantize_rows` of operators/fp8_linear/README.md has them.
#pragma once

#include "device.cuh"

namespace redraft::e4m3 {

constexpr float kLargest = 448.0f;  // of E4M3
constexpr float kSmallestScale = 1.17549435e-38f;
constexpr float kSmallestNormal = 0.015625f;
constexpr float kSubnormalSteps = 16384.0f;  // float32 numbers from here on are 2^-9 apart, as E4M3's subnormal ones

// NaN is larger than any number.
REDRAFT_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }
REDRAFT_DEVICE float magnitude(float x) { return as_float(as_bits(x) & 0x7FFFFFFFu); }
REDRAFT_DEVICE float of_both(uint32_t two) { return larger(magnitude(low(two)), magnitude(high(two))); }

// The largest magnitude of eight numbers.
REDRAFT_DEVICE float largest_of(uint4 a) {
    return larger(larger(of_both(a.x), of_both(a.y)), larger(of_both(a.z), of_both(a.w)));
}

// The scale of a row, from the largest magnitude that each thread of its block has seen. `room` holds a number for each
// warp. Passes a barrier.
template <int kWarps>
REDRAFT_DEVICE float scale_of_row(float largest, float* room) {
    for (int mask = 16; mask; mask /= 2) largest = larger(largest, exchange(largest, mask));
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) largest = larger(largest, room[w]);
    return larger(largest / kLargest, kSmallestScale);
}

// The code of the nearest number in E4M3, rounded to nearest even; NaN beyond 464.
REDRAFT_DEVICE uint32_t code(float x) {
    const uint32_t sign = as_bits(x) >> 24 & 0x80u, bits = as_bits(x) & 0x7FFFFFFFu;
    const float size = as_float(bits);
    if (size < kSmallestNormal) return sign | (as_bits(size + kSubnormalSteps) - as_bits(kSubnormalSteps));
    const uint32_t code = ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - ((127 - 7) << 3);
    return sign | (code < 0x7Fu ? code : 0x7Fu);
}

// Four codes, those of two pairs of numbers.
REDRAFT_DEVICE uint32_t four_codes(uint32_t first, uint32_t second, float scale) {
    return code(low(first) / scale) | code(high(first) / scale) << 8 | code(low(second) / scale) << 16 |
           code(high(second) / scale) << 24;
}

// Sixteen codes.
REDRAFT_DEVICE uint4 codes_of(uint4 a, uint4 b, float scale) {
    return {four_codes(a.x, a.y, scale), four_codes(a.z, a.w, scale), four_codes(b.x, b.y, scale),
            four_codes(b.z, b.w, scale)};
}

}  // namespace redraft::e4m3
