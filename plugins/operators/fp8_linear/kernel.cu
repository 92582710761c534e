// Fp8Linear's quantization of rows: see README.md. A block is a row.
#include "../../cuda/e4m3.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kAtOnce = 16;  // numbers that a thread loads, and stores as 16 bytes

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads)
    quantize_rows(const uint4* x, int features, uint4* codes, float* scales) {
    using namespace redraft;
    __shared__ float room[kWarps];
    const int parts = features / kAtOnce;
    const uint4* row = x + static_cast<int64_t>(blockIdx.x) * parts * 2;
    float largest = 0;
    for (int i = threadIdx.x; i < parts * 2; i += kThreads) largest = e4m3::larger(largest, e4m3::largest_of(row[i]));
    const float scale = e4m3::scale_of_row<kWarps>(largest, room);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (int i = threadIdx.x; i < parts; i += kThreads)
        codes[static_cast<int64_t>(blockIdx.x) * parts + i] = e4m3::codes_of(row[2 * i], row[2 * i + 1], scale);
}

#ifndef __CUDACC__
REDRAFT_KERNEL(quantize_rows)
#endif
