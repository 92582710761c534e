// A batch's trees back to back, as `redraft.decoding.token_tree.TokenTree` has them.
#pragma once

#include <cstdint>

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
    void end_tree() { offsets_[++trees_] = static_cast<int32_t>(nodes_); }

  private:
    int32_t *offsets_, *tokens_, *parents_;
    double* scores_;
    int64_t nodes_ = 0, trees_ = 0;
};

}  // namespace redraft
