// Draft trees on the host with a C ABI, for `native.py`, which reads the functions' arguments from this text. Where a
// function returns a message, it is valid until the thread's next call; null: it did not fail.
#include "../cpu/guarded.h"
#include "draft.h"
#include "pack.h"
#include "walk.h"

using namespace redraft;

static thread_local TreeMaker maker;

static void read_all(void* const* indices, int64_t count, const int32_t* tokens, const int64_t* ends) {
    int64_t start = 0;
    for (int64_t b = 0; b < count; start = ends[b++])
        static_cast<NgramIndex*>(indices[b])->read({tokens + start, static_cast<size_t>(ends[b] - start)});
}

extern "C" {

void* redraft_ngrams_new(const int64_t* lengths, int64_t count, int64_t least) {
    NgramIndex* index = nullptr;
    guarded([&] { index = new NgramIndex({lengths, static_cast<size_t>(count)}, least); });
    return index;  // null: no memory
}
void redraft_ngrams_free(void* index) { delete static_cast<NgramIndex*>(index); }
int64_t redraft_ngrams_tail(const void* index, int64_t most, int32_t* tokens) {
    const auto tail = static_cast<const NgramIndex*>(index)->tail(most);
    std::copy(tail.begin(), tail.end(), tokens);
    return tail.size();
}
int64_t redraft_ngrams_match(void* index, const int32_t* tail, int64_t count, int32_t* token_and_times) {
    const auto match = static_cast<NgramIndex*>(index)->match({tail, static_cast<size_t>(count)});
    token_and_times[0] = match.token;
    token_and_times[1] = match.times;
    return match.length;
}
const char* redraft_ngrams_read(void* const* indices, int64_t count, const int32_t* tokens, const int64_t* ends) {
    return guarded([&] { read_all(indices, count, tokens, ends); });
}

void* redraft_texts_new(int64_t capacity, int64_t seed, const int64_t* lengths, int64_t count, const double* chances,
                        int64_t times, int64_t start, int64_t longer, int64_t longest, int64_t tries,
                        int64_t most_seen, double weight) {
    TextStore* texts = nullptr;
    guarded([&] {
        TextRules rules{{lengths, lengths + count}, {chances, chances + count * times}, {start, longer, longest}, tries,
                        most_seen, weight};
        texts = new TextStore(capacity, static_cast<uint64_t>(seed), std::move(rules));
    });
    return texts;  // null: no memory
}
void redraft_texts_free(void* texts) { delete static_cast<TextStore*>(texts); }
void redraft_texts_begin(void* texts, int64_t scope) { static_cast<TextStore*>(texts)->begin(scope); }
const char* redraft_texts_read(void* texts, const int32_t* tokens, int64_t count) {
    return guarded([&] { static_cast<TextStore*>(texts)->read({tokens, static_cast<size_t>(count)}); });
}
// The token of the best match, -1: none; and its length, times and chance.
int64_t redraft_texts_match(const void* texts, int64_t scope, const int32_t* tail, int64_t count, int64_t least,
                            int64_t* length_and_times, double* chance) {
    const auto& store = *static_cast<const TextStore*>(texts);
    const auto match = store.match(scope, {tail, static_cast<size_t>(count)}, least);
    length_and_times[0] = match.length;
    length_and_times[1] = match.times;
    if (match.token >= 0) *chance = store.chance(match);
    return match.token;
}
void redraft_texts_expect(void* texts, int64_t scope, void* index) {
    auto& store = *static_cast<TextStore*>(texts);
    auto& ngrams = *static_cast<NgramIndex*>(index);
    ngrams.expect(store, store.match(scope, ngrams.tail(store.longest()), ngrams.least()));
}
// Tokens, guesses that were learned from, and those of them that were right.
void redraft_texts_counts(const void* texts, int64_t* counts) {
    const auto& store = *static_cast<const TextStore*>(texts);
    counts[0] = store.size();
    counts[1] = store.guesses();
    counts[2] = store.hits();
}
int64_t redraft_texts_write(const void* texts, int32_t* tokens, int64_t* scopes) {
    return static_cast<const TextStore*>(texts)->write(tokens, reinterpret_cast<uint64_t*>(scopes));
}

// A drafter's candidates as trees: grown with n-grams, which first read what is unread, where `indices` are given, and
// with texts, for sequences that have a scope; whole where `nodes` are null.
const char* redraft_trees_draft(const int32_t* tokens, const float* log_probs, const int32_t* parents, int64_t levels,
                                int64_t width, int64_t per_node, const int32_t* roots, int64_t count, int64_t budget,
                                void* const* indices, const int32_t* unread, const int64_t* ends,
                                const double* odds, void* texts, const int64_t* scopes, const double* chances, int64_t times, double least, double most, double ngram_factor, double joint_factor,
                                const int32_t* nodes, const int32_t* depths, const double* scores, int64_t total,
                                const double* ratios, double sure, int64_t probes, const int64_t* table_rows,
                                const double* table_seconds, int64_t table_count, int64_t padded, int64_t rows,
                                double factor, double more_s, int32_t* counts, double* choice, int32_t* out_offsets,
                                int32_t* out_tokens, int32_t* out_parents, double* out_scores, double* out_promises) {
    return guarded([&] {
        const Candidates drafts{tokens, log_probs, parents, levels, width, per_node};
        const Growth growth{budget, least, most, chances, times, ngram_factor, joint_factor};
        if (indices) read_all(indices, count, unread, ends);
        const Trees trees = indices ? maker.grow(drafts, roots, count, growth, indices, odds,
                                                 static_cast<TextStore*>(texts), scopes)
                                    : maker.rank(drafts, roots, count, budget);
        const StepTimes seconds{table_rows, table_seconds, table_count, padded != 0, rows, factor, more_s};
        const Cut by{nodes, depths, scores, total, ratios, sure, probes != 0, seconds};
        maker.cut(trees, by, counts, choice, {out_offsets, out_tokens, out_parents, out_scores});
        promised_nodes({count, out_offsets, out_tokens, out_parents, out_scores}, out_promises);
    });
}
// The same of trees that are there already.
const char* redraft_trees_cut(int64_t count, const int32_t* offsets, const int32_t* tokens, const int32_t* parents,
                              const double* tree_scores, const int32_t* nodes, const int32_t* depths,
                              const double* scores, int64_t total, const double* ratios, double sure, int64_t probes,
                              const int64_t* table_rows, const double* table_seconds, int64_t table_count,
                              int64_t padded, int64_t rows, double factor, double more_s, int32_t* counts,
                              double* choice, int32_t* out_offsets, int32_t* out_tokens, int32_t* out_parents,
                              double* out_scores, double* out_promises) {
    return guarded([&] {
        const StepTimes seconds{table_rows, table_seconds, table_count, padded != 0, rows, factor, more_s};
        const Cut by{nodes, depths, scores, total, ratios, sure, probes != 0, seconds};
        maker.cut({count, offsets, tokens, parents, tree_scores}, by, counts, choice,
                  {out_offsets, out_tokens, out_parents, out_scores});
        promised_nodes({count, out_offsets, out_tokens, out_parents, out_scores}, out_promises);
    });
}
const char* redraft_rows_pack(int64_t count, const int32_t* offsets, const int32_t* tokens, const int32_t* parents,
                              int64_t prompts, const void* prompt_tokens, const int32_t* prompt_rows,
                              const int32_t* prompt_logits, const int32_t* starts, const int32_t* commits,
                              int64_t words, int32_t* packed) {
    return guarded([&] {
        const Prompts chunks{prompts, static_cast<const int32_t* const*>(prompt_tokens), prompt_rows, prompt_logits};
        Packer({count, offsets, tokens, parents, nullptr}, chunks, {starts, commits}, words, packed);
    });
}
// Over the tokens `chosen`, else over logits. Paths are at most as long as the trees are large: the first row of `walked`
// has them, the second the tokens.
const char* redraft_trees_walk(int64_t count, const int32_t* offsets, const int32_t* tokens, const int32_t* parents,
                               const int32_t* chosen, const float* logits, int64_t vocabulary, const void* draws,
                               const int64_t* positions, void* choose, const int32_t* ends, const int32_t* end_offsets,
                               int32_t* path_offsets, int32_t* walked) {
    return guarded([&] {
        const Trees trees{count, offsets, tokens, parents, nullptr};
        const auto walk = [&](const auto& chooser) {
            walk_trees(trees, chooser, ends, end_offsets, path_offsets, walked, walked + offsets[count]);
        };
        if (chosen)
            walk([&](int64_t, int64_t row, int64_t) { return chosen[row]; });
        else
            walk(LogitChooser{logits, vocabulary, static_cast<const ChooseArgs* const*>(draws), positions,
                              reinterpret_cast<const char* (*)(const ChooseArgs*)>(choose)});
    });
}
}
