// Texts that were served, and what followed their tokens: `redraft.decoding.text_store.TextStore`, entry for entry.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "hash.h"

namespace redraft {

// See `redraft.decoding.text_store`, which has the numbers.
struct TextRules {
    std::vector<int64_t> lengths;  // of matches that have chances of their own, ascending
    std::vector<double> chances;   // [lengths, times] of guesses before any was seen
    std::vector<int64_t> starts;   // lengths that are looked up, the longest first
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
        : rules_(std::move(rules)), seed_(seed), tokens_(capacity, -1), scopes_(capacity), times_(capacity),
          tables_(rules_.starts.size()), seen_(rules_.chances.size()), right_(rules_.chances.size()) {
        for (Table& table : tables_) {
            table.newest.assign(std::bit_ceil(static_cast<uint64_t>(capacity)), -1);
            table.before.assign(capacity, -1);
        }
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
            for (int64_t back = 1; back <= count; ++back) tail[count - back] = tokens_[before(next_, back)];
            const std::span<const int32_t> end{tail.data(), static_cast<size_t>(count)};
            const Match match = this->match(scope_, end);
            const int64_t times = match.token == token ? std::min(match.times + 1, rules_.times()) : 1;
            for (size_t table = 0; table < tables_.size(); ++table) {
                if (count < rules_.starts[table]) continue;
                int32_t& newest = tables_[table].newest[place(table, scope_, end)];
                tables_[table].before[next_] = newest == next_ ? -1 : newest;
                newest = static_cast<int32_t>(next_);
            }
            put(token, times);
            ++length_;
        }
    }

    // What followed the longest end of `tail` that is found among the newest places, of equal ones the newest.
    Match match(uint64_t scope, std::span<const int32_t> tail) const {
        if (static_cast<int64_t>(tail.size()) > longest()) tail = tail.last(longest());
        const int64_t most = tail.size();
        for (size_t table = 0; table < tables_.size(); ++table) {
            const int64_t start = rules_.starts[table];
            if (most < start) continue;
            Match best;
            int32_t slot = tables_[table].newest[place(table, scope, tail)];
            for (int64_t tried = 0; tried < rules_.tries && slot >= 0; ++tried) {
                // The token is looked at first: the place may have been taken by the end of another text.
                if (tokens_[slot] >= 0 && scopes_[slot] == scope) {
                    const int64_t length = common(slot, tail);
                    if (length >= start && length > best.length) best = {tokens_[slot], length, times_[slot]};
                    if (best.length == most) break;
                }
                slot = tables_[table].before[slot];
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
            if (tokens_[slot] < 0 && (!count || tokens[count - 1] < 0)) continue;
            tokens[count] = tokens_[slot];
            scopes[count++] = scopes_[slot];
        }
        return count;
    }
    int64_t capacity() const { return tokens_.size(); }

  private:
    struct Table {
        std::vector<int32_t> newest;  // place of the newest token that followed a match, by the match's hash
        std::vector<int32_t> before;  // for each place, the one before it with the same hash
    };

    int64_t before(int64_t slot, int64_t back) const { return slot >= back ? slot - back : slot - back + capacity(); }

    uint64_t place(size_t table, uint64_t scope, std::span<const int32_t> tail) const {
        uint64_t hash = mixed(seed_ ^ scope);
        for (int64_t back = 1; back <= rules_.starts[table]; ++back)
            hash = mixed(hash ^ static_cast<uint32_t>(tail[tail.size() - back]));
        return hash & (tables_[table].newest.size() - 1);
    }

    // How many tokens before a place are the end of `tail`. A place that no text has, or not yet, has -1.
    int64_t common(int64_t slot, std::span<const int32_t> tail) const {
        const int64_t most = tail.size();
        int64_t length = 0;
        while (length < most && tokens_[before(slot, length + 1)] == tail[most - 1 - length]) ++length;
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
            size_ += (with >= 0) - (tokens_[next_] >= 0);
            tokens_[next_] = with;
        };
        overwrite(token);
        scopes_[next_] = scope_;
        times_[next_] = static_cast<uint8_t>(times);
        next_ = next_ + 1 == capacity() ? 0 : next_ + 1;
        overwrite(-1);
    }

    TextRules rules_;
    uint64_t seed_;
    std::vector<int32_t> tokens_;
    std::vector<uint64_t> scopes_;
    std::vector<uint8_t> times_;
    std::vector<Table> tables_;
    std::vector<int32_t> seen_, right_;  // guesses of each length and times, and how many of them were right
    uint64_t scope_ = 0;
    int64_t next_ = 0, length_ = 0, size_ = 0, guesses_ = 0, hits_ = 0;
};

}  // namespace redraft
