// BeamStep: see README.md. A block is a sequence.
#include "../../cuda/device.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128;
constexpr int kMost = 2048;  // candidates of a level
constexpr float kNothing = -__builtin_huge_valf();

// NaN is the least likely.
REDRAFT_DEVICE float ranked(float x) { return x == x ? x : kNothing; }
REDRAFT_DEVICE int within(int i, int count) { return i < 0 ? 0 : i < count ? i : count - 1; }

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads)
    beam_step(const float* values, const int* ids, const int* candidates, const float* log_probs, const int* parents,
              const int* expanded, int nodes, int levels, int width, int k, int* next_candidates, float* next_log_probs,
              int* next_parents, int* chosen, int* tokens, int* origins) {
    using namespace redraft;
    __shared__ float sums[kMost];
    const int b = blockIdx.x, level = width * k, before = levels * level, count = nodes * k;
    const int64_t from = static_cast<int64_t>(b) * before, to = static_cast<int64_t>(b) * (before + level);
    for (int i = threadIdx.x; i < before; i += kThreads) {
        next_candidates[to + i] = candidates[from + i];
        next_log_probs[to + i] = log_probs[from + i];
    }
    for (int i = threadIdx.x; i < levels * width; i += kThreads)
        next_parents[b * (levels + 1) * width + i] = parents[b * levels * width + i];
    for (int w = threadIdx.x; w < width; w += kThreads)
        next_parents[(b * (levels + 1) + levels) * width + w] = levels ? expanded[b * width + w] : 0;
    const int64_t row = static_cast<int64_t>(b) * count;
    for (int i = threadIdx.x; i < level; i += kThreads) {
        const int64_t place = to + before + i;
        if (i >= count) {  // of a node that is absent
            next_candidates[place] = 0;
            next_log_probs[place] = kNothing;
            continue;
        }
        const float above = levels ? log_probs[from + before - level + within(expanded[b * width + i / k], level)] : 0;
        sums[i] = above + values[row + i];
        next_candidates[place] = ids[row + i];
        next_log_probs[place] = sums[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const float own = ranked(sums[i]);
        int place = 0;
        for (int j = 0; j < count; ++j) place += ranked(sums[j]) > own || (ranked(sums[j]) == own && j < i);
        if (place < width) {
            chosen[b * width + place] = i;
            tokens[b * width + place] = ids[row + i];
            origins[b * width + place] = b * nodes + i / k;
        }
    }
}

#ifndef __CUDACC__
REDRAFT_KERNEL(beam_step)
#endif
