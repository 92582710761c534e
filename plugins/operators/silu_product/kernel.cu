// SiluProduct and SiluProductQuantized: see README.md.
#include "../../cuda/e4m3.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128;
constexpr int kThreadsOfRow = 512;  // a block makes all of a row where that is quantized
constexpr int kAtOnce = 8;  // numbers that a thread loads as 16 bytes

REDRAFT_DEVICE float silu(float x) { return x / (1 + expf(-x)); }
REDRAFT_DEVICE uint32_t gated(uint32_t gate, uint32_t up) {
    const uint32_t rounded = pair(silu(low(gate)), silu(high(gate)));
    return pair(low(rounded) * low(up), high(rounded) * high(up));
}
REDRAFT_DEVICE uint4 product_of(uint4 gate, uint4 up) {
    return {gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w)};
}

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads)
    silu_product(const uint4* gate_up, int features, uint4* out) {
    using namespace redraft;
    const int parts = features / kAtOnce, i = blockIdx.y * kThreads + threadIdx.x;
    if (i >= parts) return;
    const int64_t row = blockIdx.x;
    const uint4 gate = gate_up[2 * row * parts + i], up = gate_up[(2 * row + 1) * parts + i];
    out[row * parts + i] = product_of(gate, up);
}

extern "C" __global__ void __launch_bounds__(redraft::kThreadsOfRow)
    silu_product_quantized(const uint4* gate_up, int features, uint4* codes, float* scales) {
    using namespace redraft;
    __shared__ float room[kThreadsOfRow / 32];
    const int parts = features / kAtOnce;
    const uint4* gate = gate_up + 2 * static_cast<int64_t>(blockIdx.x) * parts;
    const auto product = [&](int i) {
        const uint4 a = gate[i], b = gate[parts + i];
        return product_of(a, b);
    };
    float largest = 0;
    for (int i = threadIdx.x; i < parts; i += kThreadsOfRow)
        largest = e4m3::larger(largest, e4m3::largest_of(product(i)));
    const float scale = e4m3::scale_of_row<kThreadsOfRow / 32>(largest, room);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < parts / 2; i += kThreadsOfRow)
        codes[static_cast<int64_t>(blockIdx.x) * (parts / 2) + i] =
            e4m3::codes_of(product(2 * i), product(2 * i + 1), scale);
}

#ifndef __CUDACC__
REDRAFT_KERNEL(silu_product)
REDRAFT_KERNEL(silu_product_quantized)
#endif
