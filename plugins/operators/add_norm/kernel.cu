// AddNorm and AddNormQuantized: see README.md. A block is a row.
#include "../../cuda/e4m3.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kAtOnce = 8;  // numbers that a thread loads and stores as 16 bytes

REDRAFT_DEVICE uint32_t add(uint32_t a, uint32_t b) { return pair(low(a) + low(b), high(a) + high(b)); }
REDRAFT_DEVICE float squares(uint32_t two) { return low(two) * low(two) + high(two) * high(two); }
REDRAFT_DEVICE uint32_t scaled(uint32_t two, float factor, uint32_t weight) {
    return pair(low(two) * factor * low(weight), high(two) * factor * high(weight));
}
REDRAFT_DEVICE uint4 normed_of(uint4 a, float factor, uint4 w) {
    return {scaled(a.x, factor, w.x), scaled(a.y, factor, w.y), scaled(a.z, factor, w.z), scaled(a.w, factor, w.w)};
}

// Stores a row's sums and returns what its norm multiplies them by. Passes a barrier.
REDRAFT_DEVICE float add_row(const uint4* x, const uint4* part, uint4* total, int features, float eps, float* room) {
    const int parts = features / kAtOnce;
    float sum = 0;
    for (int i = threadIdx.x; i < parts; i += kThreads) {
        const uint4 a = x[i], b = part[i];
        const uint4 both = {add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w)};
        total[i] = both;
        sum += squares(both.x) + squares(both.y) + squares(both.z) + squares(both.w);
    }
    for (int mask = 16; mask; mask /= 2) sum += exchange(sum, mask);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += room[w];
    return 1 / sqrtf(sum / static_cast<float>(features) + eps);
}

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads)
    add_norm(const uint4* x, const uint4* part, const uint4* weight, int features, int eps, uint4* total, uint4* normed) {
    using namespace redraft;
    __shared__ float room[kWarps];
    const int parts = features / kAtOnce;
    const int64_t from = static_cast<int64_t>(blockIdx.x) * parts;
    const float epsilon = as_float(static_cast<uint32_t>(eps));
    const float factor = add_row(x + from, part + from, total + from, features, epsilon, room);
    for (int i = threadIdx.x; i < parts; i += kThreads) normed[from + i] = normed_of(total[from + i], factor, weight[i]);
}

extern "C" __global__ void __launch_bounds__(redraft::kThreads)
    add_norm_quantized(const uint4* x, const uint4* part, const uint4* weight, int features, int eps, uint4* total,
                       uint4* codes, float* scales) {
    using namespace redraft;
    __shared__ float room[kWarps], maxima[kWarps];
    const int parts = features / kAtOnce;
    const int64_t from = static_cast<int64_t>(blockIdx.x) * parts;
    const float epsilon = as_float(static_cast<uint32_t>(eps));
    const float factor = add_row(x + from, part + from, total + from, features, epsilon, room);
    const auto normed = [&](int i) { return normed_of(total[from + i], factor, weight[i]); };
    float largest = 0;
    for (int i = threadIdx.x; i < parts; i += kThreads) largest = e4m3::larger(largest, e4m3::largest_of(normed(i)));
    const float scale = e4m3::scale_of_row<kWarps>(largest, maxima);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    // Normed once more: a row's numbers would not fit into its threads' registers.
    for (int i = threadIdx.x; i < parts / 2; i += kThreads)
        codes[from / 2 + i] = e4m3::codes_of(normed(2 * i), normed(2 * i + 1), scale);
}

#ifndef __CUDACC__
REDRAFT_KERNEL(add_norm)
REDRAFT_KERNEL(add_norm_quantized)
#endif
