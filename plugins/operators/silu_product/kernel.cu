// SiluProduct: see README.md.
#include "../../cuda/device.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128;
constexpr int kAtOnce = 8;  // numbers of a thread

REDRAFT_DEVICE float silu(float x) { return x / (1 + expf(-x)); }
REDRAFT_DEVICE uint32_t gated(uint32_t gate, uint32_t up) {
    const uint32_t rounded = pair(silu(low(gate)), silu(high(gate)));
    return pair(low(rounded) * low(up), high(rounded) * high(up));
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
    out[row * parts + i] = {gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w)};
}

#ifndef __CUDACC__
REDRAFT_KERNEL(silu_product)
#endif
