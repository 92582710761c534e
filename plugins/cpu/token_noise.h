// The noise of plugins/noise.h for many tokens of one output position.
#pragma once

#include "../noise.h"
#include "simd.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// Philox of eight counters at a time. `words` says where the word of a token is that stands in them.
class TokenNoise {
  public:
    static constexpr int64_t kBlocks = 8, kTokens = 4 * kBlocks;

    TokenNoise(uint64_t seed, uint32_t position) : seed_(seed), position_(position) {}

    // The words of the tokens of eight blocks: tokens 4 b and 4 b + 1 of lane i's block b at 2 i and 2 i + 1 of `first`,
    // its other two in `second`.
    void words(u64x8 blocks, i32x16& first, i32x16& second) const {
        const u64x8 multiplier0 = set1_wide(noise::kMultiplier0), multiplier2 = set1_wide(noise::kMultiplier2);
        u64x8 c0 = set1_wide(position_), c1 = blocks, c2 = set1_wide(0), c3 = set1_wide(noise::kTokenNoise);
        uint32_t k0 = static_cast<uint32_t>(seed_), k1 = static_cast<uint32_t>(seed_ >> 32);
        for (int round = 0; round < noise::kRounds; ++round) {
            const u64x8 low = product(c0, multiplier0), high = product(c2, multiplier2);
            c0 = exclusive_or(exclusive_or(high_halves(high), c1), set1_wide(k0));
            c1 = high;
            c2 = exclusive_or(exclusive_or(high_halves(low), c3), set1_wide(k1));
            c3 = low;
            k0 += noise::kKeyStep0;
            k1 += noise::kKeyStep1;
        }
        first = interleave(c0, c1);
        second = interleave(c2, c3);
    }
    // Where the word of the token `rest` of lane i's block stands in the 16 words of `first` and then the 16 of `second`.
    static int64_t place(int64_t lane, int64_t rest) { return rest / 2 * 16 + 2 * lane + rest % 2; }

    // The noise of any tokens.
    void of_tokens(const int32_t* tokens, int64_t count, float* out) const {
        constexpr int64_t kPart = 8 * kBlocks;
        for (int64_t begin = 0; begin < count; begin += kPart) {
            const int64_t n = count - begin < kPart ? count - begin : kPart;
            uint32_t blocks[kPart] = {}, chosen[kPart];
            for (int64_t i = 0; i < n; ++i) blocks[i] = static_cast<uint32_t>(tokens[begin + i]) >> 2;
            for (int64_t i = 0; i < n; i += kBlocks) {
                int32_t all[kTokens];
                i32x16 first, second;
                words(widen(blocks + i), first, second);
                store(all, first);
                store(all + 16, second);
                for (int64_t j = i; j < n && j < i + kBlocks; ++j)
                    chosen[j] = static_cast<uint32_t>(all[place(j - i, tokens[begin + j] & 3)]);
            }
            for (int64_t i = 0; i < n; ++i) out[begin + i] = noise::exponential(chosen[i]);
        }
    }

  private:
    uint64_t seed_;
    uint32_t position_;
};

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
