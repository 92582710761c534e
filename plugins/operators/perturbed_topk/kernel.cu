// PerturbedTopK: see README.md. A block is a node; its m tokens lie in shared memory.
#include "../../cuda/device.cuh"
#include "../../noise.h"

namespace redraft {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMost = 1024;  // tokens of a node
constexpr float kNothing = -__builtin_huge_valf();

// What all threads of a block are given, of one number of each; `room` is one of its own.
template <class F>
REDRAFT_DEVICE float together(float x, float* room, F join) {
    for (int mask = 16; mask; mask /= 2) x = join(x, exchange(x, mask));
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = room[0];
    for (int w = 1; w < kWarps; ++w) x = join(x, room[w]);
    __syncthreads();
    return x;
}
REDRAFT_DEVICE float larger(float a, float b) { return a > b ? a : b; }
REDRAFT_DEVICE float added(float a, float b) { return a + b; }

struct Node {
    const float* values;
    const int* ids;
    float* next_values;
    int* next_ids;
    int m, k;
};

REDRAFT_DEVICE void copy(const Node& node) {
    for (int i = threadIdx.x; i < node.k; i += kThreads) {
        node.next_values[i] = node.values[i];
        node.next_ids[i] = node.ids[i];
    }
}

// How many tokens top-k and top-p leave, whose weights [m] descend.
REDRAFT_DEVICE int left_over(const Node& node, const float* weights, int top_k, float top_p) {
    const int limit = top_k > 0 && top_k < node.m ? top_k : node.m;
    int left = limit;
    if (top_p < 1) {
        float total = 0, kept = 0;
        for (int i = 0; i < limit; ++i) total += weights[i];
        for (left = 0; left < limit && kept < top_p * total; ++left) kept += weights[left];
    }
    while (left > 0 && !(node.values[left - 1] > kNothing)) --left;
    return left;
}

REDRAFT_DEVICE void choose(const Node& node, uint64_t seed, uint32_t position, float temperature, int top_k,
                           float top_p, float sharpness) {
    __shared__ float scores[kMost];
    __shared__ float room[kWarps];
    __shared__ int shared_left;
    const int thread = threadIdx.x;
    const float top = node.values[0], inverse = 1 / temperature;
    for (int i = thread; i < node.m; i += kThreads) scores[i] = expf((node.values[i] - top) * inverse);
    __syncthreads();
    if (thread == 0) shared_left = left_over(node, scores, top_k, top_p);
    __syncthreads();
    const int left = shared_left;
    float best = kNothing, total = 0;
    for (int i = thread; i < left; i += kThreads) {
        const float noise = noise::race(seed, position, static_cast<uint32_t>(node.ids[i]));
        scores[i] = sharpness * ((node.values[i] - top) * inverse - logf(noise));
        best = larger(best, scores[i]);
    }
    best = together(best, room, larger);
    for (int i = thread; i < left; i += kThreads) total += expf(scores[i] - best);
    const float log_total = best + logf(together(total, room, added));
    for (int i = thread; i < left; i += kThreads) {
        int place = 0;
        for (int j = 0; j < left; ++j) place += scores[j] > scores[i] || (scores[j] == scores[i] && j < i);
        if (place < node.k) {
            node.next_values[place] = scores[i] - log_total;
            node.next_ids[place] = node.ids[i];
        }
    }
    for (int i = left + thread; i < node.k; i += kThreads) {
        node.next_values[i] = kNothing;
        node.next_ids[i] = node.ids[i];
    }
}

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads, 8)
    perturbed_topk(const float* values, const int* ids, const int* seeds, const int* positions,
                   const float* temperature, const int* top_k, const float* top_p, const float* sharpness, int rows, int m,
                   int sequences, int level, int k, float* next_values, int* next_ids) {
    using namespace redraft;
    const int row = blockIdx.x, b = row / (rows / sequences);
    const int64_t from = static_cast<int64_t>(row) * m, to = static_cast<int64_t>(row) * k;
    const Node node{values + from, ids + from, next_values + to, next_ids + to, m, k};
    if (!(temperature[b] > 0)) return copy(node);
    const uint64_t seed = static_cast<uint32_t>(seeds[2 * b]) |
                          static_cast<uint64_t>(static_cast<uint32_t>(seeds[2 * b + 1])) << 32;
    choose(node, seed, static_cast<uint32_t>(positions[b] + level), temperature[b], top_k[b], top_p[b], sharpness[b]);
}

#ifndef __CUDACC__
REDRAFT_KERNEL(perturbed_topk)
#endif
