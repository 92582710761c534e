// What followed the last tokens of one sequence most recently: `redraft.decoding.ngram.NgramIndex`, entry for entry.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "hash.h"
#include "texts.h"

namespace redraft {

class NgramIndex {
  public:
    struct Match {
        int32_t token;
        int64_t length;  // index of the matched length; -1: nothing matches
        int32_t times;   // that the token followed in a row
    };

    // The lengths that are matched, ascending, and the least that texts' matches need.
    NgramIndex(std::span<const int64_t> lengths, int64_t least)
        : lengths_(lengths.begin(), lengths.end()), hashes_(lengths.size()), slots_(64), least_(least) {}

    int64_t longest() const { return lengths_.back(); }
    int64_t least() const { return least_; }

    // The last `most` tokens of the history, or all.
    std::span<const int32_t> tail(size_t most) const {
        const auto count = std::min(history_.size(), most);
        return {history_.data() + history_.size() - count, count};
    }

    // Have the texts learn from the next token whether they guess it so.
    void expect(TextStore& texts, const TextStore::Match& match) {
        if (match.token >= 0) texts_ = &texts, expected_ = match;
    }

    void read(std::span<const int32_t> tokens) {
        if (texts_ && !tokens.empty()) std::exchange(texts_, nullptr)->learn(expected_, tokens[0]);
        for (const int32_t token : tokens) {
            for_ends(tail(longest()), [&](uint32_t hash, std::span<const int32_t> end, size_t) {
                Slot& slot = find(hash, end);
                if (!slot.length) {
                    slot = {hash, static_cast<int32_t>(history_.size()), token, static_cast<uint16_t>(end.size()), 0};
                    ++used_;
                }
                const uint16_t before = slot.successor == token ? slot.times : 0;
                slot.times = std::max<uint16_t>(before, before + 1);  // the most that it holds is enough
                slot.successor = token;
                return true;
            });
            history_.push_back(token);
            // Half of the slots stay free: `find` ends at one, and soon.
            if (2 * (used_ + lengths_.size()) > slots_.size()) grow();
        }
    }

    // What followed the longest known end of `tail`.
    Match match(std::span<const int32_t> tail) {
        Match longest{-1, -1, 0};
        for_ends(tail, [&](uint32_t hash, std::span<const int32_t> end, size_t index) {
            const Slot& slot = find(hash, end);
            if (!slot.length) return false;  // what never occurred did not occur after other tokens either
            longest = {slot.successor, static_cast<int64_t>(index), slot.times};
            return true;
        });
        return longest;
    }

  private:
    // A match's successor. The match itself is the `length` tokens of the history before `end`; length 0: a free slot.
    // Four share a line of the cache, which a look-up in a long text misses.
    struct Slot {
        uint32_t hash = 0;
        int32_t end = 0;
        int32_t successor = 0;
        uint16_t length = 0;
        uint16_t times = 0;
    };

    // Call `use` with each end of `tail` that can be matched, the shortest first, until it returns false.
    template <class F>
    void for_ends(std::span<const int32_t> tail, F use) {
        uint64_t hash = seed();
        size_t hashed = 0, count = 0;
        for (; count < lengths_.size() && lengths_[count] <= tail.size(); ++count) {
            for (; hashed < lengths_[count]; ++hashed)
                hash = mixed(hash ^ static_cast<uint32_t>(tail[tail.size() - 1 - hashed]));
            hashes_[count] = static_cast<uint32_t>(hash);
            __builtin_prefetch(&slots_[first_slot(hashes_[count])]);  // all at once: they are far apart
        }
        for (size_t index = 0; index < count; ++index)
            if (!use(hashes_[index], tail.last(lengths_[index]), index)) return;
    }

    // A number of this process, so that nobody can write a prompt whose matches all belong in one slot.
    static uint64_t seed() {
        static const uint64_t seed = std::random_device{}() | static_cast<uint64_t>(std::random_device{}()) << 32;
        return seed;
    }

    size_t first_slot(uint32_t hash) const { return hash & (slots_.size() - 1); }
    size_t next_slot(size_t index) const { return (index + 1) & (slots_.size() - 1); }

    // The slot of a match, or the free one where it belongs.
    Slot& find(uint32_t hash, std::span<const int32_t> match) {
        size_t index = first_slot(hash);
        while (slots_[index].length && !holds(slots_[index], hash, match)) index = next_slot(index);
        return slots_[index];
    }

    bool holds(const Slot& slot, uint32_t hash, std::span<const int32_t> match) const {
        return slot.hash == hash && slot.length == match.size() &&
               std::equal(match.begin(), match.end(), history_.begin() + (slot.end - slot.length));
    }

    void grow() {
        std::vector<Slot> old(2 * slots_.size());
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (!slot.length) continue;
            size_t index = first_slot(slot.hash);
            while (slots_[index].length) index = next_slot(index);
            slots_[index] = slot;
        }
    }

    std::vector<size_t> lengths_;
    std::vector<uint32_t> hashes_;  // of a tail's ends
    std::vector<int32_t> history_;
    std::vector<Slot> slots_;  // a power of two of them, at most half of them used
    size_t used_ = 0;
    int64_t least_;
    TextStore* texts_ = nullptr;
    TextStore::Match expected_;
};

}  // namespace redraft
