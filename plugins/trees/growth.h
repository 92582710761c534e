// Draft trees from a drafter's candidates, alone or together with n-grams: `redraft.decoding.construction.best_first`
// and `redraft.decoding.growth.grow_trees`, node for node and bit for bit.
#pragma once

#include <cmath>
#include <stdexcept>
#include <tuple>

#include "forest.h"
#include "ngrams.h"

namespace redraft {

// One sequence's `DraftCandidates`: `levels` of `width` expanded nodes with `per_node` candidates each.
struct Candidates {
    const int32_t* tokens;   // [levels, width, per_node]
    const float* log_probs;  // [levels, width, per_node]
    const int32_t* parents;  // [levels, width]
    int64_t levels, width, per_node;

    int64_t level_size() const { return width * per_node; }
    Candidates of(int64_t sequence) const {
        const int64_t nodes = sequence * levels * width;
        return {tokens + nodes * per_node, log_probs + nodes * per_node, parents + nodes, levels, width, per_node};
    }
    // The expanded node of a level that is candidate `flat` of the level before; -1: none. The root is the only one of
    // level 0.
    int64_t expanded(int64_t level, int64_t flat) const {
        if (level >= levels) return -1;
        if (level == 0) return flat == 0 ? 0 : -1;
        const int32_t* row = parents + level * width;
        const int64_t index = std::find(row, row + width, flat) - row;
        return index == width ? -1 : index;
    }
};

// What trees are grown by; see `redraft.decoding.growth`.
struct Growth {
    int64_t budget;
    double least, most;        // a node's least chance, and a drafter's most
    const double* chances;     // [lengths, times] of n-gram guesses
    int64_t times;
    double ngram_factor, joint_factor;

    double joint_odds(double ngram, double neural) const {
        const double odds = ngram / (1 - ngram);
        return ngram_factor * odds + (1 + joint_factor * std::sqrt(odds)) * neural / (1 - neural);
    }
    double chance(const NgramIndex::Match& match) const {
        return chances[match.length * times + std::min<int64_t>(match.times, times) - 1];
    }
};

// What may follow a node, by n-grams; token -1: nothing is known.
struct Guess {
    int32_t token = -1;
    double chance = 0;

    double with_odds(double factor) const {
        if (factor == 1) return chance;
        const double odds = factor * chance / (1 - chance);
        return odds / (1 + odds);
    }
};

class Grower {
  public:
    // Grow the tree of one sequence below `root`; its odds of n-gram guesses are multiplied by `factor`. `texts`, if
    // any, guess by those of `scope`.
    void grow(const Growth& growth, const Candidates& drafts, NgramIndex& index, TextStore* texts, uint64_t scope,
              int32_t root, double factor, Forest& forest) {
        const int64_t first_node = forest.size(), longest = texts ? texts->longest() : index.longest();
        const auto history = index.tail(longest);
        const TextStore::Match first = texts ? texts->match(scope, history, index.least()) : TextStore::Match{};
        if (texts && factor == 1) index.expect(*texts, first);
        offers_.assign(1, {-1.0, -1, root, 0, 0, 0.0});
        tails_.clear();
        while (!offers_.empty()) {
            std::pop_heap(offers_.begin(), offers_.end(), later);
            const Offer offer = offers_.back();
            offers_.pop_back();
            const int64_t node = forest.size() - first_node;
            forest.add(offer.token, offer.parent, std::log(-offer.negative));
            if (node == growth.budget) break;
            const auto tail = add_tail(node, offer, history, longest);
            const NgramIndex::Match match = index.match(tail);
            Guess guess;
            if (match.length >= 0) guess = {match.token, growth.chance(match)};
            if (texts) {
                const TextStore::Match other = node ? texts->match(scope, tail, index.least()) : first;
                if (other.token >= 0 && texts->chance(other) > guess.chance)
                    guess = {other.token, texts->chance(other)};
            }
            offer_children(growth, drafts, offer, node, {guess.token, guess.with_odds(factor)});
        }
        forest.end_tree();
    }

  private:
    // A node that waits, by the candidate that it is (`flat` of its level; -1: a guess of n-grams only) and that
    // candidate's log-probability. The best is the least in the order of its fields.
    struct Offer {
        double negative;  // its chance, below 0
        int64_t parent;
        int32_t token;
        int64_t level, flat;
        double above;
        auto key() const { return std::tie(negative, parent, token, level, flat, above); }
    };
    static bool later(const Offer& a, const Offer& b) { return b.key() < a.key(); }

    // The last tokens of a node's text.
    std::span<const int32_t> add_tail(int64_t node, const Offer& offer, std::span<const int32_t> root, int64_t longest) {
        tails_.resize(tails_.size() + longest);
        lengths_.resize(node + 1);
        int32_t* tail = tails_.data() + node * longest;
        if (node == 0) {
            std::copy(root.begin(), root.end(), tail);
            lengths_[0] = root.size();
        } else {
            const int64_t length = lengths_[offer.parent], kept = std::min(length, longest - 1);
            const int32_t* above = tails_.data() + offer.parent * longest;
            std::copy(above + length - kept, above + length, tail);
            tail[kept] = offer.token;
            lengths_[node] = kept + 1;
        }
        return {tail, static_cast<size_t>(lengths_[node])};
    }

    // Offer what may follow a node: the drafter's candidates, and after them the n-grams' guess if it is another.
    void offer_children(const Growth& growth, const Candidates& drafts, const Offer& above, int64_t node,
                        const Guess& guess) {
        const double least = growth.least / -above.negative;
        const auto push = [&](int32_t token, double chance, int64_t flat, double log) {
            if (chance > least) {
                offers_.push_back({above.negative * chance, node, token, above.level + 1, flat, log});
                std::push_heap(offers_.begin(), offers_.end(), later);
            }
        };
        const int64_t expanded = drafts.expanded(above.level, above.flat);
        if (expanded < 0) {
            if (guess.token >= 0) push(guess.token, guess.chance, -1, 0.0);
            return;
        }
        const int64_t first = expanded * drafts.per_node;
        const int32_t* tokens = drafts.tokens + above.level * drafts.level_size() + first;
        const float* logs = drafts.log_probs + above.level * drafts.level_size() + first;
        chances_.resize(drafts.per_node);
        for (int64_t k = 0; k < drafts.per_node; ++k)
            chances_[k] = above.above == -INFINITY ? 0.0 : std::exp(static_cast<double>(logs[k]) - above.above);
        if (guess.token >= 0) {
            const int64_t same = std::find(tokens, tokens + drafts.per_node, guess.token) - tokens;
            const bool drafted = same < drafts.per_node;
            const double neural = drafted ? std::min(chances_[same], growth.most) : 0.0;
            const double odds = growth.joint_odds(guess.chance, neural);
            const double joint = odds / (1 + odds), left = 1 / (1 + odds) / (1 - neural);
            for (int64_t k = 0; k < drafts.per_node; ++k)
                chances_[k] = tokens[k] == guess.token ? joint : chances_[k] * left;
            if (!drafted) push(guess.token, joint, -1, 0.0);
        }
        for (int64_t k = 0; k < drafts.per_node; ++k) push(tokens[k], chances_[k], first + k, logs[k]);
    }

    std::vector<Offer> offers_;
    std::vector<int32_t> tails_;
    std::vector<int64_t> lengths_;
    std::vector<double> chances_;
};

// The `budget` candidates of highest cumulative probability, over all levels, in the order of the levels.
class Ranker {
  public:
    void choose(const Candidates& drafts, int32_t root, int64_t budget, Forest& forest) {
        const int64_t level_size = drafts.level_size(), size = drafts.levels * level_size;
        const float* scores = drafts.log_probs;
        ranked_.clear();
        for (int64_t flat = 0; flat < size; ++flat)
            if (scores[flat] > -INFINITY) ranked_.push_back(flat);
        const int64_t count = std::min<int64_t>(budget, ranked_.size());
        std::partial_sort(ranked_.begin(), ranked_.begin() + count, ranked_.end(), [&](int64_t a, int64_t b) {
            return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
        });
        std::sort(ranked_.begin(), ranked_.begin() + count);
        node_of_.assign(size, -1);
        forest.add(root, -1, 0.0);
        for (int64_t node = 1; node <= count; ++node) {
            const int64_t flat = ranked_[node - 1], level = flat / level_size, within = flat % level_size;
            node_of_[flat] = node;
            const int64_t row = level * drafts.width + within / drafts.per_node;
            const int64_t parent = level ? node_of_.at((level - 1) * level_size + drafts.parents[row]) : 0;
            if (parent < 0) throw std::invalid_argument("a candidate is likelier than the parent that it stands below");
            forest.add(drafts.tokens[flat], parent, scores[flat]);
        }
        forest.end_tree();
    }

  private:
    std::vector<int64_t> ranked_, node_of_;
};

}  // namespace redraft
