// What top-k and top-p keep of each row: see README.md. A block is a row. Radix select finds the smallest key that is kept,
// 11, 11 and 10 bits at a time: of counts for top-k, and of weights for top-p. Among equals it goes on by ids.
#include "limits.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 512, kAtOnce = 8;      // logits that a thread loads at once
constexpr int kBits = 11, kBins = 1 << kBits;
constexpr int kOwn = kBins / kThreads;          // bins that a thread adds up
constexpr int kGroup = 16, kGroups = kThreads / kGroup;  // threads whose sums one thread adds up
constexpr int kAll = 0x7FFFFFFF;
constexpr float kUnit = 0x1p42f;  // of a weight of 1: sums of fewer than 2^22 tokens (see cuda.py) fit 64 bits

// The cut between what is kept and the rest: it falls among the tokens of the places [place, place + 2^shift), which
// hold `held`, and `bound` of that is to be kept.
struct Cut {
    uint32_t place;
    uint64_t bound, held;
};

// Sums by bin. Integers, so the order of the additions does not matter.
struct Histogram {
    uint32_t low[kBins], high[kBins];
    uint64_t sums[kThreads], groups[kGroups];
    Cut cut;

    REDRAFT_DEVICE uint64_t bin(int i) const { return low[i] | static_cast<uint64_t>(high[i]) << 32; }

    REDRAFT_DEVICE void clear() {
        for (int i = threadIdx.x * kOwn; i < (threadIdx.x + 1) * kOwn; ++i) low[i] = high[i] = 0;
    }

    // By 32-bit atomics, which shared memory has: the low word tells by itself when to carry.
    REDRAFT_DEVICE void add(uint32_t i, uint64_t amount) {
        if (!amount) return;
        const uint32_t part = static_cast<uint32_t>(amount), before = atomicAdd(&low[i], part);
        const uint32_t rest = static_cast<uint32_t>(amount >> 32) + (before > 0xFFFFFFFFu - part);
        if (rest) atomicAdd(&high[i], rest);
    }

    // The sum of all bins, after all threads' additions.
    REDRAFT_DEVICE uint64_t total() {
        const int thread = threadIdx.x;
        __syncthreads();
        uint64_t sum = 0;
        for (int i = 0; i < kOwn; ++i) sum += bin(thread * kOwn + i);
        sums[thread] = sum;
        __syncthreads();
        if (thread < kGroups) {
            sum = 0;
            for (int i = 0; i < kGroup; ++i) sum += sums[thread * kGroup + i];
            groups[thread] = sum;
        }
        __syncthreads();
        sum = 0;
        for (int g = 0; g < kGroups; ++g) sum += groups[g];
        return sum;
    }

    // The bin of 2^shift places from `place` on in which the sum reaches `bound`, from 1 to the total. Clears the bins.
    REDRAFT_DEVICE Cut find(uint32_t place, uint64_t bound, int shift) {
        const int thread = threadIdx.x, group = thread / kGroup;
        uint64_t before = 0;
        for (int g = 0; g < group; ++g) before += groups[g];
        for (int t = group * kGroup; t < thread; ++t) before += sums[t];
        if (before < bound && bound <= before + sums[thread]) {
            int i = thread * kOwn;
            for (; before + bin(i) < bound; ++i) before += bin(i);
            cut = {place + (static_cast<uint32_t>(i) << shift), bound - before, bin(i)};
        }
        clear();
        __syncthreads();
        return cut;
    }
};

// Visits the logits of the tokens [begin, end).
template <class F>
REDRAFT_DEVICE void each(const float* logits, int begin, int end, F visit) {
    int token = begin + threadIdx.x;
    for (; token + (kAtOnce - 1) * kThreads < end; token += kAtOnce * kThreads) {
        float loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) loaded[i] = logits[token + i * kThreads];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) visit(token + i * kThreads, loaded[i]);
    }
    for (; token < end; token += kThreads) visit(token, logits[token]);
}

// The fewest tokens that hold `rule.bound(total)` of the total of their amounts: by descending key, equals by ascending
// id. Places ascend where keys descend.
template <class Rule>
REDRAFT_DEVICE Limit select(const float* logits, int vocabulary, Histogram& histogram, const Rule& rule) {
    Cut cut{};
    for (int pass = 0; pass < 3; ++pass) {
        const int shift = pass < 2 ? 32 - (pass + 1) * kBits : 0;
        each(logits, 0, vocabulary, [&](int token, float logit) {
            const uint32_t key = rule.key(logit, token), bin = (~key - cut.place) >> shift;
            if (bin < kBins) histogram.add(bin, rule.amount(key));
        });
        const uint64_t total = histogram.total();
        if (!pass) cut.bound = rule.bound(total);
        if (!total) return {0, kAll};
        cut = histogram.find(cut.place, cut.bound, shift);
    }
    const uint32_t least = ~cut.place;
    if (cut.bound + rule.amount(least) > cut.held) return {least, kAll};
    cut.place = 0;
    for (int shift = kBits; shift >= 0; shift -= kBits) {
        const int begin = cut.place, end = shift || vocabulary - begin < kBins ? vocabulary : begin + kBins;
        each(logits, begin, end, [&](int token, float logit) {
            if (rule.key(logit, token) == least) histogram.add((token - begin) >> shift, rule.amount(least));
        });
        histogram.total();
        cut = histogram.find(cut.place, cut.bound, shift);
    }
    return {least, static_cast<int>(cut.place)};
}

struct TopK {
    int k;

    REDRAFT_DEVICE uint32_t key(float logit, int) const { return logit_key(logit); }
    REDRAFT_DEVICE uint64_t amount(uint32_t) const { return 1; }
    REDRAFT_DEVICE uint64_t bound(uint64_t) const { return k; }
};

// Of the tokens that top-k keeps.
struct TopP {
    double p;
    float top, inverse_temperature;
    Limit top_k;

    REDRAFT_DEVICE uint32_t key(float logit, int token) const {
        return top_k.keeps(logit_key(logit), token) ? weight_key(weight_of(logit, top, inverse_temperature)) : 0;
    }
    REDRAFT_DEVICE uint64_t amount(uint32_t key) const { return static_cast<uint64_t>(as_float(key >> 2) * kUnit); }
    REDRAFT_DEVICE uint64_t bound(uint64_t total) const {
        const double goal = ceil(p * static_cast<double>(total));
        return goal < 1 ? 1 : goal < static_cast<double>(total) ? static_cast<uint64_t>(goal) : total;
    }
};

REDRAFT_DEVICE void filter(const float* logits, const float* maxima, const float* inverse_temperatures,
                           const int* filters, int vocabulary, Limits* limits) {
    __shared__ Histogram histogram;
    const int row = blockIdx.x, k = filters[3 * row];
    const union { int words[2]; double value; } p = {{filters[3 * row + 1], filters[3 * row + 2]}};
    const float* own = logits + static_cast<int64_t>(row) * vocabulary;
    Limits found{{0, kAll}, {0, kAll}};
    histogram.clear();
    __syncthreads();
    if (0 < k && k < vocabulary) found.top_k = select(own, vocabulary, histogram, TopK{k});
    if (p.value < 1) {
        const TopP rule{p.value, maxima[row], inverse_temperatures[row], found.top_k};
        found.top_p = select(own, vocabulary, histogram, rule);
    }
    if (threadIdx.x == 0) limits[row] = found;
}

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads, 2)
    token_filter(const float* logits, const float* maxima, const float* inverse_temperatures, const int* filters,
                 int vocabulary, redraft::Limits* limits) {
    redraft::filter(logits, maxima, inverse_temperatures, filters, vocabulary, limits);
}

#ifndef __CUDACC__
REDRAFT_KERNEL(token_filter)
#endif
