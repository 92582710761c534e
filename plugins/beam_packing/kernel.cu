// A draft tree from the beams of a sequence, one block each: README.md. On a GPU: not run.
#include "../cuda/device.cuh"

namespace redraft {
namespace {

constexpr int kPackThreads = 128;
constexpr int kMostDrafted = 1024;

REDRAFT_DEVICE void pack_beams(const int* roots, const int* beams, const float* log_probs, const int* cache_lengths,
                               int width, int length, int words, int* tokens, int* parents, int* positions,
                               uint32_t* masks, float* scores, int* sizes) {
    __shared__ int first_beam[kMostDrafted];  // the first beam with the same prefix
    __shared__ int node_of[kMostDrafted];     // nodes up to here in beam order; of an element with a node: that node
    __shared__ bool unique[kMostDrafted];
    const int drafted = width * length, sequence = blockIdx.x, context = cache_lengths[sequence];
    beams += sequence * drafted;
    log_probs += sequence * drafted;
    for (int item = threadIdx.x; item < drafted; item += kPackThreads) {
        const int beam = item / length, depth = item % length;
        int first = 0;
        for (bool same = false; !same; first += !same) {
            same = true;
            for (int k = 0; k <= depth; ++k) same = same && beams[first * length + k] == beams[beam * length + k];
        }
        first_beam[item] = first;
        unique[item] = first == beam && log_probs[beam * length + length - 1] > -INFINITY;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < drafted; item += kPackThreads) {
        int count = 0;
        for (int i = 0; i <= item; ++i) count += unique[i];
        node_of[item] = count;
    }
    __syncthreads();
    const int size = 1 + node_of[drafted - 1];
    const int64_t base = static_cast<int64_t>(sequence) * (drafted + 1);
    const auto write = [&](int node, int token, int parent, int position, float score) {
        tokens[base + node] = token;
        parents[base + node] = parent;
        positions[base + node] = position;
        scores[base + node] = score;
        for (int w = 0; w < words; ++w) masks[(base + node) * words + w] = 0;
    };
    const auto see = [&](int node, int other) { masks[(base + node) * words + other / 32] |= 1u << (other % 32); };
    if (threadIdx.x == 0) {
        sizes[sequence] = size;
        write(0, roots[sequence], -1, context, 0.0f);
        see(0, 0);
    }
    for (int item = threadIdx.x; item < drafted; item += kPackThreads) {
        if (!unique[item]) continue;
        const int depth = item % length, node = node_of[item], beam = item - depth;
        const auto at_depth = [&](int k) { return node_of[first_beam[beam + k] * length + k]; };
        write(node, beams[item], depth ? at_depth(depth - 1) : 0, context + depth + 1, log_probs[item]);
        see(node, 0);
        for (int k = 0; k <= depth; ++k) see(node, at_depth(k));
    }
    for (int node = size + threadIdx.x; node <= drafted; node += kPackThreads) write(node, 0, -1, 0, -INFINITY);
}

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kPackThreads)
    pack_beams(const int* roots, const int* beams, const float* log_probs, const int* cache_lengths, int width, int length,
               int words, int* tokens, int* parents, int* positions, uint32_t* masks, float* scores, int* sizes) {
    redraft::pack_beams(roots, beams, log_probs, cache_lengths, width, length, words, tokens, parents, positions, masks,
                        scores, sizes);
}

#ifndef __CUDACC__
REDRAFT_KERNEL(pack_beams)
#endif
