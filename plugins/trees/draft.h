// From a drafter's candidates, or trees that were made in another way, to the nodes that a step verifies, in one pass:
// `cut_trees` of `redraft.drafting.cutting`, after `growth.h` where there are candidates.
#pragma once

#include "choice.h"
#include "growth.h"
#include "shape.h"

namespace redraft {

// What trees are cut by: `redraft.drafting.cutting.TreeLimits`, and what the nodes within them are chosen by, or how
// many there are for all trees.
struct Cut {
    const int32_t *nodes, *depths;
    const double* scores;
    int64_t total;
    const double* ratios;  // null: the nodes are shared
    double tokens;
    bool probes;
    StepTimes times;
};

// Makes trees; keeps its memory for the next ones.
class TreeMaker {
  public:
    // The best candidates of the drafter. Their trees have up to `budget` nodes.
    Trees rank(const Candidates& drafts, const int32_t* roots, int64_t count, int64_t budget) {
        Forest forest = grown_.write(count, count * (std::min(budget, drafts.levels * drafts.level_size()) + 1));
        for (int64_t b = 0; b < count; ++b) ranker_.choose(drafts.of(b), roots[b], budget, forest);
        return grown_.read();
    }

    // Of drafter and n-grams, and of texts of each sequence's scope, where there are `texts`.
    Trees grow(const Candidates& drafts, const int32_t* roots, int64_t count, const Growth& growth,
               void* const* indices, const double* odds, TextStore* texts, const int64_t* scopes) {
        Forest forest = grown_.write(count, count * (growth.budget + 1));
        for (int64_t b = 0; b < count; ++b)
            grower_.grow(growth, drafts.of(b), *static_cast<NgramIndex*>(indices[b]), scopes[b] ? texts : nullptr,
                         static_cast<uint64_t>(scopes[b]), roots[b], odds[b], forest);
        return grown_.read();
    }

    // Writes how many nodes of each tree are left, and what is expected of them: see `Choice`.
    void cut(const Trees& trees, const Cut& by, int32_t* counts, double* choice, Forest out) {
        if (!by.nodes) {
            for (int64_t b = 0; b < trees.count; ++b) out.add_tree(trees, b);
            return;
        }
        Forest within = within_.write(trees.count, trees.offsets[trees.count]);
        cutter_.cut(trees, by.nodes, by.depths, by.scores, within);
        const Trees left = within_.read();
        if (by.ratios)
            chooser_.choose(left, by.ratios, by.tokens, by.times, by.probes, counts, choice);
        else
            share_nodes(left, by.total, counts);
        cutter_.cut(left, counts, nullptr, nullptr, out);
    }

  private:
    ScratchTrees grown_, within_;
    Grower grower_;
    Ranker ranker_;
    Cutter cutter_;
    Chooser chooser_;
};

}  // namespace redraft
