// How many nodes to verify, and of which trees: `choose_nodes` and `promised_nodes` of `redraft.budgets.choice`, where
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
    std::vector<double> up_to(int64_t most) const {
        std::vector<double> result;
        result.reserve(most + 1);
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
        return result;
    }
};

struct Choice {
    double expected, promised, seconds;
};

struct RankedNode {
    double chance, score;
    int32_t tree, position;
    // The best first, and of equal ones the first.
    bool operator<(const RankedNode& other) const {
        return chance != other.chance ? chance > other.chance : position < other.position;
    }
};

// The count that makes the most tokens per second, by one of a node's two chances.
inline int64_t best_count(const std::vector<RankedNode>& nodes, double RankedNode::*chance, double tokens,
                          const std::vector<double>& seconds) {
    double expected = tokens, best_rate = expected / seconds[0];
    int64_t best = 0;
    for (size_t index = 0; index < nodes.size(); ++index) {
        expected += nodes[index].*chance;
        const double rate = expected / seconds[index + 1];
        if (rate > best_rate) {
            best_rate = rate;
            best = index + 1;
        }
    }
    return best;
}

// Writes how many nodes of each tree to verify to `counts`.
inline Choice choose_nodes(const Trees& trees, const double* ratios, double tokens, const StepTimes& times, bool probes,
                           int32_t* counts) {
    std::vector<RankedNode> nodes;
    for (int32_t b = 0; b < trees.count; ++b) {
        counts[b] = 0;
        for (int64_t node = trees.offsets[b] + 1; node < trees.offsets[b + 1]; ++node) {
            const double score = std::exp(trees.scores[node]);
            if (score > 0) nodes.push_back({std::min(score * ratios[b], 1.0), score, b, static_cast<int32_t>(node)});
        }
    }
    std::sort(nodes.begin(), nodes.end());
    const auto seconds = times.up_to(nodes.size());
    int64_t count = best_count(nodes, &RankedNode::chance, tokens, seconds);
    if (probes) {
        const int64_t hoped = best_count(nodes, &RankedNode::score, tokens, seconds);
        count = std::min<int64_t>(std::max({hoped, count, int64_t{1}}), nodes.size());
    }
    Choice choice{0, 0, seconds[count]};
    for (int64_t index = 0; index < count; ++index) {
        choice.expected += nodes[index].chance;
        choice.promised += nodes[index].score;
        ++counts[nodes[index].tree];
    }
    return choice;
}

// The sum of each tree's nodes' chances by their scores.
inline void promised_nodes(const Trees& trees, double* promised) {
    for (int64_t b = 0; b < trees.count; ++b) {
        promised[b] = 0;
        for (int64_t node = trees.offsets[b] + 1; node < trees.offsets[b + 1]; ++node)
            promised[b] += std::exp(trees.scores[node]);
    }
}

}  // namespace redraft
