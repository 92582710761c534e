#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/token_noise.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kGroup = TokenNoise::kTokens;  // tokens whose largest weight decides whether one of them can win

// Floats in the order of integers, -0 just below 0.
static inline int32_t key_of(float x) {
    const int32_t bits = static_cast<int32_t>(noise::bits_of(x));
    return bits ^ (bits >> 31 & 0x7fffffff);
}
static inline float of_key(int32_t key) {
    return noise::of_bits(static_cast<uint32_t>(key ^ (key >> 31 & 0x7fffffff)));
}

// The largest float of [low, high] for which `enough` holds; it holds for `low`, and for all floats below one of these.
template <class F>
static float largest(float low, float high, F enough) {
    int64_t least = key_of(low), most = key_of(high);
    while (least < most) {
        const int64_t middle = least + (most - least + 1) / 2;
        if (enough(of_key(static_cast<int32_t>(middle))))
            least = middle;
        else
            most = middle - 1;
    }
    return of_key(static_cast<int32_t>(least));
}

// How many of n values are at least `limit`.
static int64_t count_from(const float* values, int64_t n, float limit) {
    const f32x16 least = set1(limit);
    int64_t count = 0, i = 0;
    for (; i + 16 <= n; i += 16) count += __builtin_popcount(at_least(load(values + i), least));
    if (i < n) count += __builtin_popcount(at_least(load_first(values + i, n - i), least) & ((1u << (n - i)) - 1));
    return count;
}

// The sum of those of n weights that are at least `limit`: blocks in float32, their sums in float64.
static double mass_from(const float* weights, int64_t n, float limit) {
    constexpr int64_t kBlock = 128;
    double total = 0;
    for (int64_t block = 0; block < n; block += kBlock) {
        const int64_t end = block + kBlock < n ? block + kBlock : n;
        f32x16 part = zero();
        for (int64_t i = block; i < end; i += 16) {
            const f32x16 x = load_first(weights + i, end - i);
            part = add(part, where_at_least(x, limit, x));
        }
        total += sum(part);
    }
    return total;
}

// Of n ascending ids (null: 0, 1, ...) and their values, moves those above `least` and the first `equals` of the equal
// ones to the front of `kept` and of `values`; returns how many.
static int64_t keep(const int32_t* ids, float* values, int64_t n, float least, int64_t equals, int32_t* kept) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16) {
        uint32_t hits = at_least(load_first(values + i, n - i), set1(least));
        if (n - i < 16) hits &= (1u << (n - i)) - 1;
        for (; hits; hits &= hits - 1) {
            const int64_t at = i + __builtin_ctz(hits);
            if (values[at] == least && equals-- <= 0) continue;
            kept[count] = ids ? ids[at] : static_cast<int32_t>(at);
            values[count++] = values[at];
        }
    }
    return count;
}

// The maxima of groups of logits, and the largest of all.
struct Groups {
    const float* logits;
    int64_t vocabulary, count;
    float* maxima;  // [padded(vocabulary)]
    float last[kGroup];  // the last group's logits, filled up
    float top = -kInfinity;
    int64_t first = 0;  // a group that has it

    static int64_t padded(int64_t vocabulary) { return (vocabulary + kGroup - 1) / kGroup + 16; }

    Groups(const float* logits, int64_t vocabulary, float* maxima)
        : logits(logits), vocabulary(vocabulary), count((vocabulary + kGroup - 1) / kGroup), maxima(maxima) {
        const int64_t begin = (count - 1) * kGroup;
        for (int64_t i = 0; i < kGroup; ++i) last[i] = begin + i < vocabulary ? logits[begin + i] : -kInfinity;
        for (int64_t g = 0; g < count; ++g) {
            const float* own = of(g);
            maxima[g] = maximum(max(load(own), load(own + 16)));
            if (maxima[g] > top) {
                top = maxima[g];
                first = g;
            }
        }
        for (int64_t g = count; g < padded(vocabulary); ++g) maxima[g] = -kInfinity;
    }
    const float* of(int64_t group) const { return group + 1 < count ? logits + group * kGroup : last; }
    // The first of the largest; 0 where no number is one.
    int32_t largest() const {
        for (int64_t i = first * kGroup; i < vocabulary && i < (first + 1) * kGroup; ++i)
            if (logits[i] == top) return static_cast<int32_t>(i);
        return 0;
    }
};

// exp((logit - top) * inverse_temperature) of 16 logits.
static inline f32x16 weights_of(const float* logits, float top, float inverse_temperature) {
    return exp(mul(sub(load(logits), set1(top)), set1(inverse_temperature)));
}

// The earliest arrival so far; of equal ones the lower token's. -1 where none arrives: infinite logits have no weights.
struct Winner {
    float time = kInfinity;
    int64_t token = -1;

    void offer(float noise, float weight, int64_t id) {
        const float arrival = noise / weight;
        if (arrival < time || (arrival == time && id < token)) {
            time = arrival;
            token = id;
        }
    }
};

// The race of all tokens. Noise e is at least its word's u = (word + 0.5) 2^-32, so only words up to the earliest arrival
// times the weight can win: where no word of a group is as small as its largest weight allows, the logarithm and the
// weights are never computed. `bounds` are the groups' largest weights, and `weights(group, out)` all of a group's.
template <class F>
static int64_t race_of_all(const TokenNoise& noise, int64_t tokens, const float* bounds, int64_t first, F weights) {
    constexpr float kSlack = 1.0f + 0x1p-16f;  // for what is rounded here
    const int64_t groups = (tokens + kGroup - 1) / kGroup;
    Winner winner;
    const auto run = [&](int64_t group) {
        const float most = winner.time * bounds[group] * kSlack * 0x1p32f;
        if (most < 0.5f) return;
        const uint32_t limit = most < 0x1p32f ? static_cast<uint32_t>(static_cast<int64_t>(most)) : 0xffffffffu;
        i32x16 low, high;
        noise.words(ascending(static_cast<uint64_t>(group * TokenNoise::kBlocks)), low, high);
        uint32_t hits = at_most(low, limit) | at_most(high, limit) << 16;
        if (!hits) return;
        int32_t words[kGroup];
        float own[kGroup];
        store(words, low);
        store(words + 16, high);
        weights(group, own);
        for (; hits; hits &= hits - 1) {
            const int64_t at = __builtin_ctz(hits), token = 4 * (at % 16 / 2) + at / 16 * 2 + at % 2;
            const uint32_t word = static_cast<uint32_t>(words[at]);
            const float limited = winner.time * own[token] * kSlack * 0x1p32f;
            if (group * kGroup + token < tokens && static_cast<float>(word) <= limited)
                winner.offer(noise::exponential(word), own[token], group * kGroup + token);
        }
    };
    run(first);
    for (int64_t group = 0; group < groups; ++group) run(group);
    return winner.token;
}

// The race of some tokens.
static int64_t race_of(const TokenNoise& noise, const int32_t* ids, const float* weights, int64_t count) {
    constexpr int64_t kPart = 64;
    Winner winner;
    for (int64_t begin = 0; begin < count; begin += kPart) {
        const int64_t n = count - begin < kPart ? count - begin : kPart;
        float own[kPart];
        noise.of_tokens(ids + begin, n, own);
        for (int64_t i = 0; i < n; ++i) winner.offer(own[i], weights[begin + i], ids[begin + i]);
    }
    return winner.token;
}

static inline bool keeps_all(const TokenFilter& f) { return (f.top_k < 1 || f.top_k >= f.vocabulary) && f.top_p >= 1; }

// The ids and logits of the k most likely tokens, ascending by id: k of the groups' maxima are as large as the k-th
// largest of them, so none of the k logits is smaller.
static int64_t most_likely(const Groups& groups, int64_t k, int32_t* ids, float* logits) {
    const auto kth = [k, top = groups.top](const float* values, int64_t n) {
        return largest(-kInfinity, top, [=](float limit) { return count_from(values, n, limit) >= k; });
    };
    const float bound = k <= groups.count ? kth(groups.maxima, groups.count) : -kInfinity;
    int64_t count = 0;
    for (int64_t g = 0; g < groups.count; ++g) {
        if (!(groups.maxima[g] >= bound)) continue;
        const float* own = groups.of(g);
        for (int64_t i = 0; i < kGroup && g * kGroup + i < groups.vocabulary; ++i) {
            if (!(own[i] >= bound)) continue;
            ids[count] = static_cast<int32_t>(g * kGroup + i);
            logits[count++] = own[i];
        }
    }
    const float least = kth(logits, count);
    const int64_t above = least < groups.top ? count_from(logits, count, of_key(key_of(least) + 1)) : 0;
    return keep(ids, logits, count, least, k - above, ids);
}

// Of n tokens, the fewest that hold `top_p` of their weight. Mostly a few do, far above the rest.
static int64_t nucleus(const int32_t* ids, float* weights, int64_t n, double top_p, int32_t* kept) {
    const double total = mass_from(weights, n, 0), goal = top_p * total;
    const double floors[] = {1e-4, 1e-6};
    for (const double floor : floors) {
        const float limit = static_cast<float>(floor * total);
        if (mass_from(weights, n, limit) < goal) continue;
        n = keep(ids, weights, n, limit, n, kept);
        ids = kept;
        break;
    }
    const float least = largest(0, 1, [=](float limit) { return mass_from(weights, n, limit) >= goal; });
    double held = least < 1 ? mass_from(weights, n, of_key(key_of(least) + 1)) : 0;
    int64_t equals = 0;
    for (; held < goal && equals < n; ++equals) held += least;
    return keep(ids, weights, n, least, equals, kept);
}

// Ids, ascending, and weights of the tokens that the filters keep; ids are not written where all are kept.
static int64_t filtered(const TokenFilter& f, const Groups& groups, int32_t* ids, float* weights) {
    const bool some = f.top_k > 0 && f.top_k < f.vocabulary;
    int64_t count = f.vocabulary;
    const float* logits = f.logits;
    if (some) {
        count = most_likely(groups, f.top_k, ids, weights);
        logits = weights;
    }
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(weights + i, weights_of(logits + i, groups.top, f.inverse_temperature));
    if (i < count) {
        float rest[16] = {};
        for (int64_t j = i; j < count; ++j) rest[j - i] = logits[j];
        store_first(weights + i, weights_of(rest, groups.top, f.inverse_temperature), count - i);
    }
    return f.top_p < 1 ? nucleus(some ? ids : nullptr, weights, count, f.top_p, ids) : count;
}

// One core: a draw takes less time than waking another.
static void choose(const ChooseArgs& a) {
    const TokenFilter& f = a.f;
    const TokenNoise noise(static_cast<uint64_t>(a.seed), static_cast<uint32_t>(a.position));
    const int64_t padded = Groups::padded(f.vocabulary);
    PoolLock lock;
    float* maxima = static_cast<float*>(lock.shared_scratch((padded + 2 * f.vocabulary) * sizeof(float)));
    const Groups groups(f.logits, f.vocabulary, maxima);
    int64_t token;
    if (keeps_all(f)) {
        for (int64_t g = 0; g < groups.count; g += 16)
            store(maxima + g, weights_of(maxima + g, groups.top, f.inverse_temperature));
        const auto weights = [&](int64_t group, float* out) {
            for (int64_t i = 0; i < kGroup; i += 16)
                store(out + i, weights_of(groups.of(group) + i, groups.top, f.inverse_temperature));
        };
        token = race_of_all(noise, f.vocabulary, maxima, groups.first, weights);
    } else {
        float* weights = maxima + padded;
        int32_t* ids = reinterpret_cast<int32_t*>(weights + f.vocabulary);
        token = race_of(noise, ids, weights, filtered(f, groups, ids, weights));
    }
    *a.token = token < 0 ? groups.largest() : static_cast<int32_t>(token);
}

static void distribution(const DistributionArgs& a) {
    PoolLock lock;
    const Groups groups(a.f.logits, a.f.vocabulary,
                        static_cast<float*>(lock.shared_scratch(Groups::padded(a.f.vocabulary) * sizeof(float))));
    *a.count = filtered(a.f, groups, a.ids, a.weights);
    *a.total = mass_from(a.weights, *a.count, 0);
}

static void race(const RaceArgs& a) {
    const TokenNoise noise(static_cast<uint64_t>(a.seed), static_cast<uint32_t>(a.position));
    int64_t token;
    if (a.ids) {
        token = race_of(noise, a.ids, a.weights, a.count);
    } else {
        PoolLock lock;
        float* bounds = static_cast<float*>(lock.shared_scratch(Groups::padded(a.count) * sizeof(float)));
        const Groups groups(a.weights, a.count, bounds);
        const auto weights = [&](int64_t group, float* out) {
            for (int64_t i = 0; i < kGroup; i += 16) store(out + i, load(groups.of(group) + i));
        };
        token = race_of_all(noise, a.count, bounds, groups.first, weights);
    }
    *a.token = token >= 0 ? static_cast<int32_t>(token) : a.ids ? a.ids[0] : 0;
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
