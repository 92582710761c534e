// One step's rows, of trees and then of prompts: `redraft.scheduling.packing.pack`; its `TargetBatch` says what they mean.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>

#include "forest.h"

namespace redraft {

// The next rows of prompts.
struct Prompts {
    int64_t count;
    const int32_t* const* tokens;  // by prompt, those of its rows
    const int32_t *rows, *logits;  // how many there are, and how many of them, the last ones, have logits
};

// What is known of each sequence, those of trees first.
struct Places {
    const int32_t *starts, *commits;  // cached tokens, and how many rows are moved into place
};

// Writes the arrays of a `TargetBatch` back to back: ids, positions, masks, logit rows, row offsets, commit offsets.
class Packer {
  public:
    Packer(const Trees& trees, const Prompts& prompts, const Places& places, int64_t words, int32_t* packed)
        : starts_(places.starts), words_(words) {
        const int64_t nodes = trees.offsets[trees.count], sequences = trees.count + prompts.count;
        const int64_t rows = std::accumulate(prompts.rows, prompts.rows + prompts.count, nodes);
        const int64_t logits = std::accumulate(prompts.logits, prompts.logits + prompts.count, nodes);
        ids_ = packed;
        positions_ = ids_ + rows;
        masks_ = positions_ + rows;
        logit_rows_ = masks_ + rows * words;
        row_offsets_ = logit_rows_ + logits;
        *row_offsets_++ = 0;
        int32_t* commit_offsets = row_offsets_ + sequences;
        commit_offsets[0] = 0;
        std::partial_sum(places.commits, places.commits + sequences, commit_offsets + 1);
        for (int64_t b = 0; b < trees.count; ++b) add_tree(trees, b);
        for (int64_t p = 0; p < prompts.count; ++p) add_prompt(prompts.tokens[p], prompts.rows[p], prompts.logits[p]);
    }

  private:
    // A row at its depth below the root, which sees its own path.
    void add_tree(const Trees& trees, int64_t b) {
        const int64_t first = trees.offsets[b], size = trees.offsets[b + 1] - first;
        if (size > words_ * 32)
            throw std::invalid_argument(std::to_string(size) + " tree nodes do not fit " + std::to_string(words_) +
                                        " mask words of 32 bits");
        for (int64_t node = 0; node < size; ++node) {
            int32_t* mask = masks_ + node * words_;
            const int64_t parent = trees.parents[first + node];
            if (parent < 0) {
                std::fill_n(mask, words_, 0);
                positions_[node] = *starts_;
            } else {
                std::copy_n(masks_ + parent * words_, words_, mask);
                positions_[node] = positions_[parent] + 1;
            }
            mask[node / 32] = static_cast<int32_t>(static_cast<uint32_t>(mask[node / 32]) | 1u << node % 32);
        }
        end_sequence(trees.tokens + first, size, size);
    }

    // Rows that see all before them.
    void add_prompt(const int32_t* tokens, int64_t rows, int64_t logits) {
        std::iota(positions_, positions_ + rows, *starts_);
        std::fill_n(masks_, rows * words_, 0);
        end_sequence(tokens, rows, logits);
    }

    void end_sequence(const int32_t* tokens, int64_t rows, int64_t logits) {
        ids_ = std::copy_n(tokens, rows, ids_);
        rows_ += rows;
        std::iota(logit_rows_, logit_rows_ + logits, static_cast<int32_t>(rows_ - logits));
        *row_offsets_++ = static_cast<int32_t>(rows_);
        positions_ += rows;
        masks_ += rows * words_;
        logit_rows_ += logits;
        ++starts_;
    }

    const int32_t* starts_;
    int64_t words_, rows_ = 0;
    int32_t *ids_, *positions_, *masks_, *logit_rows_, *row_offsets_;  // where the next sequence begins
};

}  // namespace redraft
