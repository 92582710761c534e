#include "check.h"

#include "../operators/linear/block_forms.h"

#include <stdexcept>
#include <string>

namespace redraft {
namespace {

void expect(bool holds, const char* what, int64_t value, const char* expectation) {
    if (!holds) throw std::invalid_argument(std::string(what) + " " + std::to_string(value) + ": expected " + expectation);
}

void expect_below(const char* what, int64_t value, int64_t bound) {
    if (value < 0 || value >= bound)
        throw std::invalid_argument(std::string(what) + " " + std::to_string(value) + ": expected 0 to " +
                                    std::to_string(bound - 1));
}

void check(const BlockSegment& s) {
    expect_below("block form", s.form, kBlockFormCount);
    expect(s.rows > 0, "rows of a segment", s.rows, "at least 1");
    expect(kBlockForms[s.form].span || (s.span > 0 && s.span % kBlockGroup == 0), "span of a segment", s.span,
           "a multiple of 32");
}

// Segments hold `rows` rows, and none ends within a half-panel, but at the end and, if `gated`, in the middle.
void check_segments(const BlockSegment* segments, int64_t count, int64_t rows, bool gated) {
    int64_t end = 0;
    for (const BlockSegment* s = segments; s < segments + count; ++s) {
        check(*s);
        end += s->rows;
        expect(s->rows % kHalfPanel == 0 || end == rows || (gated && end == rows / 2), "rows of a segment", s->rows,
               "a multiple of 16");
        expect(!gated || end <= rows / 2 || end - s->rows >= rows / 2, "rows of a segment", s->rows,
               "gate rows or up rows only");
    }
    expect(end == rows, "rows of all segments", end, "as many as the weight has");
}

// int8 is a table of token info only.
void check_weight(DType dtype) {
    expect(dtype == DType::fp32 || dtype == DType::bf16 || dtype == DType::blocks, "dtype", static_cast<int64_t>(dtype),
           "fp32, bf16 or blocks");
}

void check(const Projection& p, bool gated = false) {
    check_weight(p.dtype);
    expect(p.in_features > 0, "in_features", p.in_features, "at least 1");
    expect(p.out_features > 0, "out_features", p.out_features, "at least 1");
    if (p.dtype == DType::blocks)
        check_segments(p.segments, p.segment_count, gated ? 2 * p.out_features : p.out_features, gated);
    for (int64_t r = 0; p.row_ids && r < p.rows; ++r) expect_below("row id", p.row_ids[r], p.x_rows);
}

void check(const TokenFilter& f) {
    expect(f.vocabulary >= 1 && f.vocabulary < int64_t{1} << 31, "vocabulary", f.vocabulary, "1 to 2^31 - 1");
    expect(f.top_k >= 0, "top_k", f.top_k, "at least 0");
}

void check_position(int64_t position) {
    expect(position >= 0 && position < int64_t{1} << 32, "position", position, "0 to 2^32 - 1");
}

}  // namespace

void check(const ChooseArgs& a) {
    check(a.f);
    check_position(a.position);
}

void check(const DistributionArgs& a) { check(a.f); }

void check(const RaceArgs& a) {
    expect(a.count >= 1, "count", a.count, "at least 1");
    check_position(a.position);
}

void check(const LinearArgs& args) {
    check(args.p, is_gated(args.activation));
    if (!args.residual) return;
    if (!args.residual_ids) expect(args.residual_rows == args.p.rows, "residual rows", args.residual_rows, "a row each");
    for (int64_t r = 0; args.residual_ids && r < args.p.rows; ++r)
        expect_below("residual row id", args.residual_ids[r], args.residual_rows);
}

void check(const LinearTopKArgs& args) {
    check(args.p);
    expect(args.k >= 1 && args.k <= args.p.out_features, "k", args.k, "1 to out_features");
}

void check(const TokenInfoTopKArgs& a) {
    expect(a.k >= 1 && a.k <= a.columns, "k", a.k, "1 to the number of columns");
    expect_below("level", a.level, a.levels);
    for (int64_t r = 0; r < a.rows; ++r) expect_below("sequence", a.sequences[r], a.logit_rows / a.levels);
    if (!a.table) return;
    expect(a.kept <= a.columns, "columns of the table", a.kept, "at most those of the logits");
    if (!a.row_of) expect(a.entries == a.rows, "rows of token info", a.entries, "a row for each node");
    for (int64_t r = 0; a.row_of && r < a.rows; ++r) {
        expect_below("token id", a.tokens[r], a.vocabulary);
        expect_below("row of the table", a.row_of[a.tokens[r]], a.entries);
    }
}

void check(const EmbeddingArgs& args) {
    check_weight(args.dtype);
    const int64_t bound = args.clamped ? int64_t{1} << 31 : args.out_features;
    for (int64_t r = 0; r < args.rows; ++r) expect_below("token id", args.ids[r], bound);
    if (args.dtype == DType::blocks) check_segments(args.segments, args.segment_count, args.out_features, false);
}

void check(const NormArgs& a) { expect(a.features >= 1, "features", a.features, "at least 1"); }

void check(const SumRanksArgs& a) { expect(a.ranks >= 1, "ranks", a.ranks, "at least 1"); }

void check(const BeamStepArgs& a) {
    const int64_t nodes = a.levels ? a.width : 1;
    expect(a.width >= 1 && a.width <= nodes * a.k, "width", a.width, "1 to the number of candidates of a level");
    expect(a.rows == a.sequences * nodes, "rows of values", a.rows, "those of every sequence's nodes");
    for (int64_t i = 0; a.levels && i < a.sequences * a.width; ++i)
        expect_below("chosen candidate", a.chosen[i], a.width * a.k);
}

void check(const DrawStepArgs& a) {
    const int64_t nodes = draw_nodes(a), used = a.rule == DrawRule::independent ? a.drawn + a.count : a.expanded + nodes;
    expect(a.support >= 1, "support", a.support, "at least 1");
    expect(a.count >= 1, "count", a.count, "at least 1");
    expect(nodes >= 1, "nodes of a level", nodes, "at least 1");
    expect(a.rows == a.sequences * nodes, "rows of values", a.rows, "those of every sequence's nodes");
    expect(a.noise_rows >= used, "rows of noise", a.noise_rows, "a row for each that the levels so far use");
    expect(a.rule != DrawRule::independent || nodes == 1 || nodes == a.count, "nodes of independent sequences", nodes,
           "1, or one for each draw");
}

void check(const PerturbedTopKArgs& a) {
    expect(a.k >= 1 && a.k <= a.m, "k", a.k, "1 to the number of tokens of a node");
    expect(a.level >= 0, "level", a.level, "0 or more");
    expect(a.sequences >= 1 && a.rows % a.sequences == 0, "rows of values", a.rows, "as many for every sequence");
}

void check(const ReorderFeaturesArgs& a) {
    expect(a.features >= 1, "features", a.features, "at least 1");
    const uint64_t end = a.features;
    bool within = true;  // without a branch for each: this runs before every product of such a weight
    for (int64_t i = 0; i < a.features; ++i) within &= static_cast<uint32_t>(a.order[i]) < end;
    for (int64_t i = 0; !within && i < a.features; ++i) expect_below("feature", a.order[i], a.features);
}

void check(const TreeAttentionArgs& a) {
    expect(a.head_size % 32 == 0 && a.head_size > 0, "head_size", a.head_size, "a multiple of 32");
    expect(a.kv_heads > 0 && a.heads % a.kv_heads == 0, "num_heads", a.heads, "a multiple of num_kv_heads");
    expect(a.window >= 0, "window", a.window, "at least 0");
    expect(a.row_offsets[0] == 0, "row_offsets[0]", a.row_offsets[0], "0");
    for (int64_t s = 0; s < a.sequences; ++s) {
        const int64_t rows = static_cast<int64_t>(a.row_offsets[s + 1]) - a.row_offsets[s];
        const int64_t length = a.cache_lengths[s], start = a.starts ? a.starts[s] : length, end = start + rows;
        // The first place that a row may see: the cache holds it and all after it at once.
        const int64_t first = a.window && length >= a.window ? length + 1 - a.window : 0;
        expect(rows >= 0, "rows of a sequence", rows, "row_offsets that ascend");
        expect(a.row_offsets[s + 1] <= a.rows, "row_offsets", a.row_offsets[s + 1], "at most the number of rows");
        expect_below("slot", a.slots[s], a.cache_slots);
        expect(length >= 0 && end - first <= a.cache_rows, "cache length and rows", end, "at most the cache's rows");
        expect(end <= a.cache_rows || a.cache_rows % kKeys == 0, "cache rows", a.cache_rows,
               "a multiple of 32 in a ring");
        expect(start >= length, "start", start, "at least the cache length");
        if (!a.commit_offsets) continue;
        const int64_t commits = static_cast<int64_t>(a.commit_offsets[s + 1]) - a.commit_offsets[s];
        expect(commits >= 0 && commits <= length, "committed rows", commits, "at most the cache length");
        expect(a.commit_offsets[s] >= 0 && a.commit_offsets[s + 1] <= a.commits, "commit_offsets",
               a.commit_offsets[s + 1], "within commit_src");
        int64_t last = -1;
        for (int64_t c = a.commit_offsets[s]; c < a.commit_offsets[s + 1]; ++c) {
            expect(a.commit_src[c] > last && length - commits + a.commit_src[c] - first < a.cache_rows, "commit_src",
                   a.commit_src[c], "ascending rows within the cache");
            last = a.commit_src[c];
        }
    }
    for (int64_t r = 0; r < a.row_offsets[a.sequences]; ++r) expect_below("position", a.positions[r], a.max_positions);
}

int64_t packed_bytes(int64_t in_features, const std::vector<BlockSegment>& segments) {
    int64_t bytes = 0;
    for (const BlockSegment& s : segments) {
        check(s);
        bytes += half_panels(s.rows) * half_panel_bytes(s, in_features);
    }
    return bytes;
}

int64_t packed_bytes(int64_t in_features, int64_t out_features, DType dtype, Activation activation) {
    const int64_t columns = is_gated(activation) ? kPanel / 2 : kPanel;
    const int64_t panels = (out_features + columns - 1) / columns;
    const int64_t group = feature_group(dtype), groups = (in_features + group - 1) / group;
    return panels * groups * kStepBytes;
}

}  // namespace redraft
