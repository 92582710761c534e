// The race of tokens: see README.md. Block (part of the vocabulary, row): rows of one key stand together, and the blocks of
// their first row do them all, so a part's noise is made once for every row that shares it.
#include "../../noise.h"
#include "limits.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kBlocks = 4;                        // Philox blocks of a thread
constexpr int kPart = kThreads * kBlocks * 4;     // tokens of a block
constexpr float kNever = __builtin_huge_valf();

// The earlier of two arrivals; of equal ones the lower token's.
struct Arrival {
    float time;
    int token;

    REDRAFT_DEVICE void offer(float other_time, int other_token) {
        if (other_time < time || (other_time == time && other_token < token)) {
            time = other_time;
            token = other_token;
        }
    }
};

REDRAFT_DEVICE bool same_key(const int* keys, int a, int b) {
    return keys[3 * a] == keys[3 * b] && keys[3 * a + 1] == keys[3 * b + 1] && keys[3 * a + 2] == keys[3 * b + 2];
}

REDRAFT_DEVICE void race(const float* logits, const float* maxima, const float* inverse_temperatures, const int* keys,
                         const Limits* limits, int rows, int vocabulary, float* times, int* tokens) {
    __shared__ float warp_times[kWarps];
    __shared__ int warp_tokens[kWarps];
    const int part = blockIdx.x, first = blockIdx.y, thread = threadIdx.x;
    if (first && same_key(keys, first - 1, first)) return;
    const uint64_t seed = static_cast<uint32_t>(keys[3 * first]) |
                          static_cast<uint64_t>(static_cast<uint32_t>(keys[3 * first + 1])) << 32;
    const uint32_t position = static_cast<uint32_t>(keys[3 * first + 2]);
    const int begin = part * kPart + 4 * thread;  // of the thread's first block; the others follow 4 kThreads apart
    float noise[kBlocks][4];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        const noise::Words words = noise::token_words(seed, position, static_cast<uint32_t>(begin / 4 + b * kThreads));
#pragma unroll
        for (int i = 0; i < 4; ++i) noise[b][i] = noise::exponential(words.x[i]);
    }
    for (int row = first; row < rows && same_key(keys, first, row); ++row) {
        const float* own = logits + static_cast<int64_t>(row) * vocabulary;
        const float top = maxima[row], scale = inverse_temperatures[row];
        const Limits kept = limits[row];
        Arrival found{kNever, part * kPart};
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = begin + 4 * kThreads * b + i;
                if (token >= vocabulary) continue;
                const float weight = weight_of(own[token], top, scale);
                if (kept.keeps(own[token], weight, token)) found.offer(noise[b][i] / weight, token);
            }
        for (int mask = 16; mask; mask /= 2) {
            const float time = exchange(found.time, mask);
            found.offer(time, static_cast<int>(as_bits(exchange(as_float(static_cast<uint32_t>(found.token)), mask))));
        }
        if (thread % 32 == 0) {
            warp_times[thread / 32] = found.time;
            warp_tokens[thread / 32] = found.token;
        }
        __syncthreads();
        if (thread == 0) {
            for (int w = 1; w < kWarps; ++w) found.offer(warp_times[w], warp_tokens[w]);
            times[static_cast<int64_t>(row) * gridDim.x + part] = found.time;
            tokens[static_cast<int64_t>(row) * gridDim.x + part] = found.token;
        }
        __syncthreads();
    }
}

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads, 8)
    token_race(const float* logits, const float* maxima, const float* inverse_temperatures, const int* keys,
               const redraft::Limits* limits, int rows, int vocabulary, float* times, int* tokens) {
    redraft::race(logits, maxima, inverse_temperatures, keys, limits, rows, vocabulary, times, tokens);
}

#ifndef __CUDACC__
REDRAFT_KERNEL(token_race)
#endif
