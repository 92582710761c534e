// A batch's trees back to back, as `redraft.decoding.token_tree.TokenTree` has them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace redraft {

// Trees that are read.
struct Trees {
    int64_t count;
    const int32_t* offsets;  // [count + 1]
    const int32_t* tokens;   // [offsets[count]]
    const int32_t* parents;  // within the tree, -1 at the root
    const double* scores;
};

// Trees that are written, node by node, into arrays that are large enough.
class Forest {
  public:
    Forest(int32_t* offsets, int32_t* tokens, int32_t* parents, double* scores)
        : offsets_(offsets), tokens_(tokens), parents_(parents), scores_(scores) {
        offsets_[0] = 0;
    }
    int64_t size() const { return nodes_; }
    void add(int32_t token, int64_t parent, double score) {
        tokens_[nodes_] = token;
        parents_[nodes_] = static_cast<int32_t>(parent);
        scores_[nodes_++] = score;
    }
    // A tree as it is.
    void add_tree(const Trees& trees, int64_t b) {
        const int64_t first = trees.offsets[b], size = trees.offsets[b + 1] - first;
        std::copy_n(trees.tokens + first, size, tokens_ + nodes_);
        std::copy_n(trees.parents + first, size, parents_ + nodes_);
        std::copy_n(trees.scores + first, size, scores_ + nodes_);
        nodes_ += size;
        end_tree();
    }
    void end_tree() { offsets_[++trees_] = static_cast<int32_t>(nodes_); }

  private:
    int32_t *offsets_, *tokens_, *parents_;
    double* scores_;
    int64_t nodes_ = 0, trees_ = 0;
};

// Trees that are written and then read; the memory stays for the next ones.
class ScratchTrees {
  public:
    Forest write(int64_t count, int64_t nodes) {
        count_ = count;
        offsets_.resize(count + 1);
        tokens_.resize(nodes);
        parents_.resize(nodes);
        scores_.resize(nodes);
        return {offsets_.data(), tokens_.data(), parents_.data(), scores_.data()};
    }
    Trees read() const { return {count_, offsets_.data(), tokens_.data(), parents_.data(), scores_.data()}; }

  private:
    int64_t count_ = 0;
    std::vector<int32_t> offsets_, tokens_, parents_;
    std::vector<double> scores_;
};

}  // namespace redraft
