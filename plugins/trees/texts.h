// Texts that were served, and what followed their tokens: `redraft.decoding.text_store.TextStore`, entry for entry.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "hash.h"

namespace redraft {

inline constexpr size_t kStarts = 3;

// See `redraft.decoding.text_store`, which has the numbers.
struct TextRules {
    std::vector<int64_t> lengths;  // of matches that have chances of their own, ascending
    std::vector<double> chances;   // [lengths, times] of guesses before any was seen
    std::array<int64_t, kStarts> starts;  // lengths that are looked up, the shortest first
    int64_t tries, most_seen;
    double weight;

    int64_t longest() const { return lengths.back(); }
    int64_t times() const { return chances.size() / lengths.size(); }
};

class TextStore {
  public:
    struct Match {
        int32_t token = -1;  // -1: nothing matches
        int64_t length = 0;
        int64_t times = 0;  // that the token followed in a row
    };

    TextStore(int64_t capacity, uint64_t seed, TextRules rules)
        : rules_(std::move(rules)), seed_(seed), places_(capacity), seen_(rules_.chances.size()),
          right_(rules_.chances.size()) {
        for (auto& newest : newest_) newest.assign(std::bit_ceil(static_cast<uint64_t>(capacity)), -1);
    }

    int64_t longest() const { return rules_.longest(); }
    int64_t size() const { return size_; }
    int64_t guesses() const { return guesses_; }
    int64_t hits() const { return hits_; }

    // Begin a text of a scope. Nothing matches from one into another.
    void begin(uint64_t scope) {
        scope_ = scope;
        if (length_) put(-1, 0);
        length_ = 0;
    }

    void read(std::span<const int32_t> tokens) {
        std::vector<int32_t> tail(longest());
        for (const int32_t token : tokens) {
            const int64_t count = std::min(length_, longest());
            for (int64_t back = 1; back <= count; ++back) tail[count - back] = places_[before(next_, back)].token;
            const std::span<const int32_t> end{tail.data(), static_cast<size_t>(count)};
            const Match match = this->match(scope_, end);
            const int64_t times = match.token == token ? std::min(match.times + 1, rules_.times()) : 1;
            const Hashes hashes = this->hashes(scope_, end);
            for (size_t table = 0; table < kStarts && count >= rules_.starts[table]; ++table) {
                int32_t& newest = newest_[table][hashes[table]];
                places_[next_].before[table] = newest == next_ ? -1 : newest;
                newest = static_cast<int32_t>(next_);
            }
            put(token, times);
            ++length_;
        }
    }

    // What followed the longest end of `tail`, of `least` tokens or more, that is found among the newest places, of equal
    // ones the newest.
    Match match(uint64_t scope, std::span<const int32_t> tail, int64_t least = 1) const {
        if (static_cast<int64_t>(tail.size()) > longest()) tail = tail.last(longest());
        const int64_t most = tail.size();
        const Hashes hashes = this->hashes(scope, tail);
        for (size_t table = kStarts; table-- > 0;) {  // the longest first
            const int64_t start = rules_.starts[table];
            if (most < start || start < least) continue;
            Match best;
            int32_t slot = newest_[table][hashes[table]];
            for (int64_t tried = 0; tried < rules_.tries && slot >= 0; ++tried) {
                const Place& place = places_[slot];
                // Another text, or its end, may have taken the place.
                if (place.token >= 0 && place.scope == scope) {
                    const int64_t length = common(slot, tail);
                    if (length >= start && length > best.length) best = {place.token, length, place.times};
                    if (best.length == most) break;
                }
                slot = place.before[table];
            }
            if (best.token >= 0) return best;
        }
        return {};
    }

    double chance(const Match& match) const {
        const int64_t cell = this->cell(match);
        return (right_[cell] + rules_.weight * rules_.chances[cell]) / (seen_[cell] + rules_.weight);
    }

    // Count a guess, and whether it was right.
    void learn(const Match& match, int32_t token) {
        const int64_t cell = this->cell(match);
        const bool right = match.token == token;
        ++guesses_;
        hits_ += right;
        right_[cell] += right;
        if (++seen_[cell] == rules_.most_seen) {  // old ones fade
            seen_[cell] /= 2;
            right_[cell] /= 2;
        }
    }

    // All texts, the oldest first: tokens, with -1 between texts, and their scopes. Returns how many.
    int64_t write(int32_t* tokens, uint64_t* scopes) const {
        int64_t count = 0;
        for (int64_t back = capacity() - 1; back > 0; --back) {
            const int64_t slot = before(next_, back);
            // What is free, or the second of two ends, is no text.
            const Place& place = places_[slot];
            if (place.token < 0 && (!count || tokens[count - 1] < 0)) continue;
            tokens[count] = place.token;
            scopes[count++] = place.scope;
        }
        return count;
    }
    int64_t capacity() const { return places_.size(); }

  private:
    using Hashes = std::array<uint64_t, kStarts>;

    // A token, in one line of the cache with what a look-up reads of it.
    struct alignas(32) Place {
        uint64_t scope = 0;
        int32_t token = -1;
        std::array<int32_t, kStarts> before{-1, -1, -1};  // the place before it that followed the same hash
        uint8_t times = 0;
    };

    int64_t before(int64_t slot, int64_t back) const { return slot >= back ? slot - back : slot - back + capacity(); }

    // Where the tables have what followed the end of `tail`, if that is long enough.
    Hashes hashes(uint64_t scope, std::span<const int32_t> tail) const {
        Hashes hashes{};
        uint64_t hash = mixed(seed_ ^ scope);
        int64_t back = 0;
        for (size_t table = 0; table < kStarts && rules_.starts[table] <= static_cast<int64_t>(tail.size()); ++table) {
            while (back < rules_.starts[table]) hash = mixed(hash ^ static_cast<uint32_t>(tail[tail.size() - ++back]));
            hashes[table] = hash & (newest_[table].size() - 1);
            __builtin_prefetch(&newest_[table][hashes[table]]);  // all at once: they are far apart
        }
        return hashes;
    }

    // How many tokens before a place are the end of `tail`. A place that no text has, or not yet, has -1.
    int64_t common(int64_t slot, std::span<const int32_t> tail) const {
        const int64_t most = tail.size();
        int64_t length = 0;
        while (length < most && places_[before(slot, length + 1)].token == tail[most - 1 - length]) ++length;
        return length;
    }

    int64_t cell(const Match& match) const {
        int64_t index = rules_.lengths.size() - 1;
        while (rules_.lengths[index] > match.length) --index;
        return index * rules_.times() + match.times - 1;
    }

    // Overwrite the oldest place, and mark the next one as the end of what is stored.
    void put(int32_t token, int64_t times) {
        const auto overwrite = [&](int32_t with) {
            size_ += (with >= 0) - (places_[next_].token >= 0);
            places_[next_].token = with;
        };
        overwrite(token);
        places_[next_].scope = scope_;
        places_[next_].times = static_cast<uint8_t>(times);
        next_ = next_ + 1 == capacity() ? 0 : next_ + 1;
        overwrite(-1);
    }

    TextRules rules_;
    uint64_t seed_;
    std::vector<Place> places_;
    std::array<std::vector<int32_t>, kStarts> newest_;  // newest place of each hash
    std::vector<int32_t> seen_, right_;  // guesses of each length and times, and how many of them were right
    uint64_t scope_ = 0;
    int64_t next_ = 0, length_ = 0, size_ = 0, guesses_ = 0, hits_ = 0;
};

}  // namespace redraft
