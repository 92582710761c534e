// Cutting and sharing trees: `prune_tree` and `shared_budgets` of `redraft.decoding.token_tree`.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "forest.h"

namespace redraft {

// The best-scored nodes of each tree: at most `budgets` drafted ones, none deeper than `depths` or of a score below
// `least`. A node's score counts at most as much as its parent's. Trees within the limits stay as they are.
class Cutter {
  public:
    void cut(const Trees& trees, const int32_t* budgets, const int32_t* depths, const double* least, Forest& out) {
        for (int64_t b = 0; b < trees.count; ++b) {
            const int64_t size = trees.offsets[b + 1] - trees.offsets[b];
            const int32_t limit = depths ? std::min(budgets[b], depths[b]) : budgets[b];
            if (size - 1 > limit || (least && least[b] > -INFINITY))
                cut(trees, b, budgets[b], depths ? depths[b] : INT32_MAX, least ? least[b] : -INFINITY, out);
            else
                out.add_tree(trees, b);
        }
    }

  private:
    void cut(const Trees& trees, int64_t b, int32_t budget, int32_t most_depth, double least, Forest& out) {
        const int64_t first = trees.offsets[b], size = trees.offsets[b + 1] - first;
        depths_.assign(size, 0);
        scores_.assign(trees.scores + first, trees.scores + first + size);
        kept_.clear();
        for (int32_t node = 1; node < size; ++node) {
            const int32_t parent = trees.parents[first + node];
            depths_[node] = depths_[parent] + 1;
            scores_[node] = std::min(scores_[node], scores_[parent]);
            if (depths_[node] <= most_depth && scores_[node] >= least) kept_.push_back(node);
        }
        if (size - 1 <= budget && size - 1 == static_cast<int64_t>(kept_.size())) return out.add_tree(trees, b);
        if (static_cast<int64_t>(kept_.size()) > budget) {
            std::nth_element(kept_.begin(), kept_.begin() + budget, kept_.end(), [&](int32_t a, int32_t c) {
                return scores_[a] != scores_[c] ? scores_[a] > scores_[c] : a < c;
            });
            kept_.resize(budget);
            std::sort(kept_.begin(), kept_.end());
        }
        index_of_.assign(size, -1);
        index_of_[0] = 0;
        out.add(trees.tokens[first], -1, trees.scores[first]);
        for (size_t index = 0; index < kept_.size(); ++index) {
            const int32_t node = kept_[index];
            index_of_[node] = static_cast<int32_t>(index) + 1;
            out.add(trees.tokens[first + node], index_of_[trees.parents[first + node]], scores_[node]);
        }
        out.end_tree();
    }

    std::vector<int32_t> depths_, kept_, index_of_;
    std::vector<double> scores_;
};

// Per tree, how many of the batch's `total` most likely drafted nodes are its own.
inline void share_nodes(const Trees& trees, int64_t total, int32_t* counts) {
    std::vector<std::pair<double, int32_t>> ranked;
    for (int32_t b = 0; b < trees.count; ++b) {
        counts[b] = 0;
        for (int64_t node = trees.offsets[b] + 1; node < trees.offsets[b + 1]; ++node)
            if (!std::isnan(trees.scores[node])) ranked.emplace_back(-trees.scores[node], b);
    }
    const int64_t taken = std::min<int64_t>(total, ranked.size());
    std::nth_element(ranked.begin(), ranked.begin() + taken, ranked.end());
    for (int64_t index = 0; index < taken; ++index) ++counts[ranked[index].second];
}

}  // namespace redraft
