// AddNorm: see README.md. A block is a row.
#include "../../cuda/device.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kAtOnce = 8;  // numbers that a thread loads and stores as 16 bytes

REDRAFT_DEVICE uint32_t add(uint32_t a, uint32_t b) { return pair(low(a) + low(b), high(a) + high(b)); }
REDRAFT_DEVICE float squares(uint32_t two) { return low(two) * low(two) + high(two) * high(two); }
REDRAFT_DEVICE uint32_t scaled(uint32_t two, float factor, uint32_t weight) {
    return pair(low(two) * factor * low(weight), high(two) * factor * high(weight));
}

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads)
    add_norm(const uint4* x, const uint4* part, const uint4* weight, int features, int eps, uint4* total, uint4* normed) {
    using namespace redraft;
    __shared__ float room[kWarps];
    const int parts = features / kAtOnce;
    const int64_t from = static_cast<int64_t>(blockIdx.x) * parts;
    float sum = 0;
    for (int i = threadIdx.x; i < parts; i += kThreads) {
        const uint4 a = x[from + i], b = part[from + i];
        const uint4 both = {add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w)};
        total[from + i] = both;
        sum += squares(both.x) + squares(both.y) + squares(both.z) + squares(both.w);
    }
    for (int mask = 16; mask; mask /= 2) sum += exchange(sum, mask);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += room[w];
    const float factor = 1 / sqrtf(sum / static_cast<float>(features) + as_float(static_cast<uint32_t>(eps)));
    for (int i = threadIdx.x; i < parts; i += kThreads) {
        const uint4 a = total[from + i], w = weight[i];
        normed[from + i] = {scaled(a.x, factor, w.x), scaled(a.y, factor, w.y), scaled(a.z, factor, w.z),
                            scaled(a.w, factor, w.w)};
    }
}

#ifndef __CUDACC__
REDRAFT_KERNEL(add_norm)
#endif
