// Fp8Linear's quantization of rows: see README.md. A block is a row.
#include "../../cuda/device.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kAtOnce = 16;             // numbers that a thread loads, and stores as 16 bytes
constexpr float kLargest = 448.0f;      // of E4M3
constexpr float kSmallestScale = 1.17549435e-38f;
constexpr float kSmallestNormal = 0.015625f;
constexpr float kSubnormalSteps = 16384.0f;  // float32 numbers from here on are 2^-9 apart, as E4M3's subnormal ones

// NaN is larger than any number.
REDRAFT_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }
REDRAFT_DEVICE float magnitude(float x) { return as_float(as_bits(x) & 0x7FFFFFFFu); }
REDRAFT_DEVICE float of_both(uint32_t two) { return larger(magnitude(low(two)), magnitude(high(two))); }

// The code of the nearest number in E4M3, rounded to nearest even; NaN beyond 464.
REDRAFT_DEVICE uint32_t e4m3(float x) {
    const uint32_t sign = as_bits(x) >> 24 & 0x80u, bits = as_bits(x) & 0x7FFFFFFFu;
    const float size = as_float(bits);
    if (size < kSmallestNormal) return sign | (as_bits(size + kSubnormalSteps) - as_bits(kSubnormalSteps));
    const uint32_t code = ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - ((127 - 7) << 3);
    return sign | (code < 0x7Fu ? code : 0x7Fu);
}

// Four codes, those of two pairs of bf16 numbers.
REDRAFT_DEVICE uint32_t four_codes(uint32_t first, uint32_t second, float scale) {
    return e4m3(low(first) / scale) | e4m3(high(first) / scale) << 8 | e4m3(low(second) / scale) << 16 |
           e4m3(high(second) / scale) << 24;
}

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads)
    quantize_rows(const uint4* x, int features, uint4* codes, float* scales) {
    using namespace redraft;
    __shared__ float room[kWarps];
    const int parts = features / kAtOnce;
    const uint4* row = x + static_cast<int64_t>(blockIdx.x) * parts * 2;
    float largest = 0;
    for (int i = threadIdx.x; i < parts * 2; i += kThreads) {
        const uint4 a = row[i];
        largest = larger(largest, larger(larger(of_both(a.x), of_both(a.y)), larger(of_both(a.z), of_both(a.w))));
    }
    for (int mask = 16; mask; mask /= 2) largest = larger(largest, exchange(largest, mask));
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) largest = larger(largest, room[w]);
    const float scale = larger(largest / kLargest, kSmallestScale);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < parts; i += kThreads) {
        const uint4 a = row[2 * i], b = row[2 * i + 1];
        codes[static_cast<int64_t>(blockIdx.x) * parts + i] = {four_codes(a.x, a.y, scale), four_codes(a.z, a.w, scale),
                                                               four_codes(b.x, b.y, scale), four_codes(b.z, b.w, scale)};
    }
}

#ifndef __CUDACC__
REDRAFT_KERNEL(quantize_rows)
#endif
