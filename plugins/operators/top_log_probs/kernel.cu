// TopLogProbs: see README.md. A block is a row.
#include "../../cuda/device.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kAtOnce = 8;   // neighbouring columns that a thread loads as 16 bytes
constexpr int kPieces = 4, kStep = kThreads * kAtOnce;  // such loads at a time, and columns between them
constexpr int kRoom = 2048;  // columns that are collected, twice the most that are asked for
constexpr uint32_t kNothing = 0xFF80u;  // minus infinity

REDRAFT_DEVICE float larger(float a, float b) { return a > b ? a : b; }
REDRAFT_DEVICE float added(float a, float b) { return a + b; }

// Larger for a larger logit; zeros of both signs are equal.
REDRAFT_DEVICE uint32_t key_of(uint32_t logit) {
    if (logit == 0x8000u) logit = 0;
    return logit & 0x8000u ? ~logit & 0xFFFFu : logit | 0x8000u;
}
REDRAFT_DEVICE float logit_of(uint32_t key) {
    return as_float((key & 0x8000u ? key & 0x7FFFu : ~key & 0xFFFFu) << 16);
}

// What is chosen: columns of larger keys, and of this one those before `bound`.
struct Limit {
    uint32_t key;
    int bound;

    REDRAFT_DEVICE bool keeps(uint32_t key_of_column, int column) const {
        return key_of_column > key || (key_of_column == key && column < bound);
    }
};

struct Row {
    const uint16_t* logits;
    int vocabulary;

    // The logits of eight columns; minus infinity beyond the row's.
    REDRAFT_DEVICE uint4 piece(int from) const {
        if (from + kAtOnce <= vocabulary && reinterpret_cast<uintptr_t>(logits) % sizeof(uint4) == 0)
            return *reinterpret_cast<const uint4*>(logits + from);
        const auto logit = [&](int column) { return column < vocabulary ? logits[column] : kNothing; };
        const auto two = [&](int column) { return logit(column) | logit(column + 1) << 16; };
        return {two(from), two(from + 2), two(from + 4), two(from + 6)};
    }

    // Visits keys and columns of this thread. Which they are does not depend on where the row begins in memory.
    template <class F>
    REDRAFT_DEVICE void each(F visit) const {
        for (int first = threadIdx.x * kAtOnce; first < vocabulary; first += kPieces * kStep) {
            uint4 loaded[kPieces];  // before any is visited: a load takes longer than a visit
#pragma unroll
            for (int p = 0; p < kPieces; ++p) loaded[p] = piece(first + p * kStep);
#pragma unroll
            for (int p = 0; p < kPieces; ++p) {
                const uint32_t pairs[] = {loaded[p].x, loaded[p].y, loaded[p].z, loaded[p].w};
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int column = first + p * kStep + i;
                    if (column < vocabulary) visit(key_of(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xFFFFu), column);
                }
            }
        }
    }
};

struct Block {
    float sums[kWarps];
    uint32_t maxima[kThreads], limit, count;
    uint32_t keys[kRoom];
    int columns[kRoom];

    // What all threads are given, of one number of each, added up in one order.
    template <class F>
    REDRAFT_DEVICE float together(float x, F join) {
        for (int mask = 16; mask; mask /= 2) x = join(x, exchange(x, mask));
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
        __syncthreads();
        x = sums[0];
        for (int w = 1; w < kWarps; ++w) x = join(x, sums[w]);
        __syncthreads();
        return x;
    }

    // A key that at least k of the row's reach: the k-th largest of the threads' own maxima. 0 where threads are fewer.
    REDRAFT_DEVICE uint32_t reached_by(int k, uint32_t own) {
        const int thread = threadIdx.x;
        maxima[thread] = own;
        if (thread == 0) limit = 0;
        __syncthreads();
        int place = 0;
        for (int t = 0; t < kThreads; ++t) place += maxima[t] > own || (maxima[t] == own && t < thread);
        if (place == k - 1) limit = own;
        __syncthreads();
        return limit;
    }

    // How many of the row's columns fulfil it; below 2^24, so that a float holds it.
    template <class F>
    REDRAFT_DEVICE int count_where(const Row& row, F fulfils) {
        int found = 0;
        row.each([&](uint32_t key, int column) { found += fulfils(key, column); });
        return static_cast<int>(together(static_cast<float>(found), added));
    }

    REDRAFT_DEVICE void collect(uint32_t key, int column) {
        const uint32_t place = atomicAdd(&count, 1u);
        if (place < kRoom) {
            keys[place] = key;
            columns[place] = column;
        }
    }

    // The limit that exactly k columns reach.
    REDRAFT_DEVICE Limit exact(const Row& row, int k) {
        uint32_t low = 0, high = 0xFFFFu;
        while (low < high) {
            const uint32_t middle = (low + high + 1) / 2;
            if (count_where(row, [=](uint32_t key, int) { return key >= middle; }) >= k)
                low = middle;
            else
                high = middle - 1;
        }
        int first = 0, last = row.vocabulary;
        while (first < last) {
            const Limit tried{low, (first + last) / 2};
            if (count_where(row, [=](uint32_t key, int column) { return tried.keeps(key, column); }) >= k)
                last = tried.bound;
            else
                first = tried.bound + 1;
        }
        return {low, first};
    }
};

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads, 2)
    top_log_probs(const uint16_t* logits, const int* ids, int vocabulary, int k, float* log_probs, int* tokens) {
    using namespace redraft;
    __shared__ Block block;
    const Row row{logits + static_cast<int64_t>(blockIdx.x) * vocabulary, vocabulary};
    uint32_t largest = 0;
    row.each([&](uint32_t key, int) { largest = key > largest ? key : largest; });
    Limit limit{block.reached_by(k, largest), vocabulary};
    // Keys, since a thread without any column has none of a number's; a float holds them.
    const float top = logit_of(static_cast<uint32_t>(block.together(static_cast<float>(largest), larger)));
    if (threadIdx.x == 0) block.count = 0;
    __syncthreads();
    float sum = 0;
    row.each([&](uint32_t key, int column) {
        sum += expf(logit_of(key) - top);
        if (limit.keeps(key, column)) block.collect(key, column);
    });
    const float log_sum = logf(block.together(sum, added));
    if (block.count > kRoom) {
        limit = block.exact(row, k);
        if (threadIdx.x == 0) block.count = 0;
        __syncthreads();
        row.each([&](uint32_t key, int column) {
            if (limit.keeps(key, column)) block.collect(key, column);
        });
        __syncthreads();
    }
    const int count = static_cast<int>(block.count);
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const uint32_t key = block.keys[i];
        const int column = block.columns[i];
        int place = 0;
        for (int j = 0; j < count; ++j)
            place += block.keys[j] > key || (block.keys[j] == key && block.columns[j] < column);
        if (place < k) {
            log_probs[static_cast<int64_t>(blockIdx.x) * k + place] = logit_of(key) - top - log_sum;
            tokens[static_cast<int64_t>(blockIdx.x) * k + place] = ids[column];
        }
    }
}

#ifndef __CUDACC__
REDRAFT_KERNEL(top_log_probs)
#endif
