// How many nodes to verify, and of which trees: `choose_nodes` of `redraft.budgets.choice`, where
// the formula is explained.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "forest.h"

namespace redraft {

// Seconds of a step by how many nodes it verifies, as `redraft.budgets.cost.TimesByNodes` has them.
struct StepTimes {
    const int64_t* table_rows;
    const double* table_seconds;
    int64_t table_count;
    bool padded;
    int64_t rows;
    double factor, more_s;

    // With 0 to `most` nodes.
    void up_to(int64_t most, std::vector<double>& result) const {
        result.clear();
        const int64_t last = table_count - 1;
        int64_t above = 0;
        double high = table_seconds[0], low = high;  // the most up to `above`, and up to the entry before it
        for (int64_t count = rows; count <= rows + most; ++count) {
            while (above < last && table_rows[above] < count) {
                low = high;
                high = std::max(high, table_seconds[++above]);
            }
            double seconds = high;
            if (!padded && above > 0 && count < table_rows[above]) {
                const int64_t first = table_rows[above - 1];
                seconds = low + (high - low) * (count - first) / (table_rows[above] - first);
            }
            seconds *= std::max(static_cast<double>(count) / table_rows[last], 1.0);
            result.push_back(seconds * factor + more_s);
        }
    }
};

// Chooses among all nodes of a batch's trees; keeps its memory for the next ones.
class Chooser {
  public:
    // Writes how many nodes of each tree to verify to `counts`, and the fields of `Choice` after these to `choice`.
    void choose(const Trees& trees, const double* ratios, double tokens, const StepTimes& times, bool probes,
                int32_t* counts, double* choice) {
        nodes_.clear();
        for (int32_t b = 0; b < trees.count; ++b) {
            counts[b] = 0;
            for (int64_t node = trees.offsets[b] + 1; node < trees.offsets[b + 1]; ++node) {
                const double score = std::exp(trees.scores[node]);
                if (score > 0)
                    nodes_.push_back({std::min(score * ratios[b], 1.0), score, b, static_cast<int32_t>(node)});
            }
        }
        std::sort(nodes_.begin(), nodes_.end());
        times.up_to(nodes_.size(), seconds_);
        int64_t count = best_count(&Node::chance, tokens);
        if (probes) {
            const int64_t hoped = best_count(&Node::score, tokens);
            count = std::min<int64_t>(std::max({hoped, count, int64_t{1}}), nodes_.size());
        }
        double expected = 0, promised = 0;
        for (int64_t index = 0; index < count; ++index) {
            expected += nodes_[index].chance;
            promised += nodes_[index].score;
            ++counts[nodes_[index].tree];
        }
        choice[0] = expected;
        choice[1] = promised;
        choice[2] = seconds_[count];
    }

  private:
    struct Node {
        double chance, score;
        int32_t tree, position;
        // The best first, and of equal ones the first.
        bool operator<(const Node& other) const {
            return chance != other.chance ? chance > other.chance : position < other.position;
        }
    };

    // The count that makes the most tokens per second, by one of a node's two chances.
    int64_t best_count(double Node::*chance, double tokens) const {
        double expected = tokens, best_rate = expected / seconds_[0];
        int64_t best = 0;
        for (size_t index = 0; index < nodes_.size(); ++index) {
            expected += nodes_[index].*chance;
            const double rate = expected / seconds_[index + 1];
            if (rate > best_rate) {
                best_rate = rate;
                best = index + 1;
            }
        }
        return best;
    }

    std::vector<Node> nodes_;
    std::vector<double> seconds_;
};

// The sum of each tree's nodes' chances by their scores.
inline void promised_nodes(const Trees& trees, double* promised) {
    for (int64_t b = 0; b < trees.count; ++b) {
        promised[b] = 0;
        for (int64_t node = trees.offsets[b] + 1; node < trees.offsets[b + 1]; ++node)
            promised[b] += std::exp(trees.scores[node]);
    }
}

}  // namespace redraft
