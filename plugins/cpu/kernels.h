// The kernels' arguments, and the table of one instruction set's kernels. Shapes are row-major; the operators' README.md
// files say what each computes. check.h checks arguments. Python reads the structures from this text
// (plugins/headers.py): one field a line, an integer, a float, an enumeration, a pointer or a structure.
#pragma once

#include <cstdint>

#include "../operators/list.h"

namespace redraft {

enum class DType : int { fp32 = 0, bf16 = 1, int8 = 2, blocks = 3 };
// Features of a weight row that lie together.
constexpr int64_t feature_group(DType dtype) { return dtype == DType::fp32 ? 1 : dtype == DType::bf16 ? 2 : 32; }
enum class Activation : int { none = 0, swiglu = 1, silu = 2, silu_last = 3, geglu = 4, relu = 5 };
// Whether an output is an activated projection times a second one, whose weight rows follow the first's.
constexpr bool is_gated(Activation a) { return a == Activation::swiglu || a == Activation::geglu; }

constexpr int64_t kPanel = 32;  // weight rows that are stored and multiplied together
// One step of a dot product reads so many bytes of a panel: 32 floats of one feature, or 32 pairs of bf16 of two features.
constexpr int64_t kStepBytes = 128;
constexpr int64_t kKeys = 32;  // cached keys that attention scores together

// Weight rows in blocks of one form, kBlockForms[form]; `span` is of forms that have none of their own.
struct BlockSegment {
    int32_t form;
    int32_t rows;
    int32_t span;
};

// Rows to multiply and packed weights to multiply them with.
struct Projection {
    const float* x;        // [x_rows, in_features]
    int64_t x_rows;
    const int32_t* row_ids;  // [rows] or null: row r is x[row_ids[r]]
    int64_t rows;
    const void* weight;    // packed, see linear/README.md
    const float* bias;     // [weight rows] or null
    const float* norm;     // [in_features] or null: the norm's weight
    const float* norm_bias;  // [in_features] or null: RMS norm, not LayerNorm
    float norm_eps;
    int64_t in_features;
    int64_t out_features;
    DType dtype;           // fp32, bf16 or blocks
    const BlockSegment* segments;  // [segment_count], of blocks only: all weight rows
    int64_t segment_count;
};

struct LinearArgs {
    Projection p;
    Activation activation;
    const float* residual;  // [residual_rows, out_features] or null
    int64_t residual_rows;
    const int32_t* residual_ids;  // [rows] or null: row r takes residual[residual_ids[r]]
    float* out;             // [rows, out_features]
};

struct LinearTopKArgs {
    Projection p;
    const int32_t* ids;  // [out_features] or null
    int64_t k;
    float* values;       // [rows, k]
    int32_t* indices;    // [rows, k]
};

struct TokenInfoTopKArgs {
    const float* logits;  // [logit_rows, columns]: row s * levels + l predicts level l of sequence s
    int64_t logit_rows;
    int64_t columns;
    int64_t level;
    int64_t levels;
    const int32_t* sequences;  // [rows]
    const int32_t* tokens;     // [rows]
    int64_t rows;
    const int32_t* ids;     // [columns]
    const int32_t* row_of;  // [vocabulary], or null: entry r is row r's
    int64_t vocabulary;
    const void* table;  // [entries, kept] or null
    DType dtype;        // of the table: fp32, bf16 or int8
    int64_t entries;
    int64_t kept;
    const float* scales;  // [entries], or null: 1
    int64_t k;
    float* values;     // [rows, k]
    int32_t* indices;  // [rows, k]
};

struct EmbeddingArgs {
    const int32_t* ids;  // [rows]
    int64_t rows;
    const void* weight;
    int64_t in_features;
    int64_t out_features;
    DType dtype;            // fp32, bf16 or blocks
    const BlockSegment* segments;  // [segment_count], of blocks only
    int64_t segment_count;
    float factor;           // of the rows
    int64_t clamped;        // 1: ids beyond the last row take it
    const float* residual;  // [rows, in_features] or null
    float* out;             // [rows, in_features]
};

struct NormArgs {
    const float* x;
    int64_t rows;
    int64_t features;
    const float* weight;
    const float* bias;  // [features] or null: RMS norm, not LayerNorm
    float eps;
    const float* residual;  // [rows, features] or null
    float* out;
};

// Tensors of a draft have `levels` levels, 0 at the first step; those of its continuation one more.
struct BeamStepArgs {
    const float* values;  // [rows, k]
    const int32_t* ids;   // [rows, k]
    int64_t rows;         // sequences * (levels ? width : 1)
    int64_t k;
    int64_t sequences;
    int64_t levels;
    int64_t width;
    const int32_t* candidates;  // [sequences, levels, width, k]
    const float* log_probs;     // [sequences, levels, width, k]
    const int32_t* parents;     // [sequences, levels, width]
    const int32_t* chosen;      // [sequences, width]
    int32_t* next_candidates;
    float* next_log_probs;
    int32_t* next_parents;
    int32_t* next_chosen;
    int32_t* tokens;   // [sequences * width]
    int32_t* origins;  // [sequences * width]
};

enum class DrawRule : int { gumbel_top_k = 0, stochastic_beam = 1, independent = 2 };

// Tensors of a draft have `expanded` nodes and `drawn` draws, 0 at the first step; those of its continuation
// draw_nodes() and draw_count() more.
struct DrawStepArgs {
    const float* values;  // [rows, support], descending
    const int32_t* ids;   // [rows, support]
    int64_t rows;         // sequences * draw_nodes()
    int64_t support;
    int64_t sequences;
    const float* noise;  // [sequences, noise_rows, support]
    int64_t noise_rows;
    const float* temperature;  // [sequences]
    const int32_t* top_k;      // [sequences]
    const float* top_p;        // [sequences]
    DrawRule rule;
    int64_t count;
    int64_t expanded;
    int64_t drawn;
    const int32_t* ids_before;      // [sequences, expanded, support]
    const float* log_probs_before;  // [sequences, expanded, support]
    const int32_t* draws_before;    // [sequences, drawn]
    const float* totals;            // [sequences, draw_nodes()], stochastic_beam only
    const float* gumbels;           // [sequences, draw_nodes()], stochastic_beam only
    int32_t* next_ids;
    float* next_log_probs;
    int32_t* next_draws;
    float* next_totals;   // [sequences, draw_count()], stochastic_beam only
    float* next_gumbels;  // [sequences, draw_count()], stochastic_beam only
    int32_t* tokens;       // [sequences * draw_count()]
    int32_t* origins;      // [sequences * draw_count()]
    int32_t* sequence_of;  // [sequences * draw_count()]
};
// Nodes that a level expands, and the draws that it makes.
inline int64_t draw_nodes(const DrawStepArgs& a) { return a.drawn + 1 - a.expanded; }
inline int64_t draw_count(const DrawStepArgs& a) {
    return a.rule == DrawRule::gumbel_top_k ? draw_nodes(a) * a.count : a.count;
}

// Nodes of a sequence stand back to back.
struct PerturbedTopKArgs {
    const float* values;  // [rows, m], descending
    const int32_t* ids;   // [rows, m]
    int64_t rows;
    int64_t m;
    int64_t sequences;
    const int32_t* seeds;      // [sequences, 2]
    const int32_t* positions;  // [sequences]
    const float* temperature;  // [sequences]
    const int32_t* top_k;      // [sequences]
    const float* top_p;        // [sequences]
    const float* sharpness;    // [sequences]
    int64_t level;
    int64_t k;
    float* next_values;  // [rows, k]
    int32_t* next_ids;   // [rows, k]
};

struct ReorderFeaturesArgs {
    const float* x;  // [rows, features]
    int64_t rows;
    int64_t features;
    const int32_t* order;  // [features]: feature i of a result is feature order[i] of x
    float* out;            // [rows, features], not x
};

struct TreeAttentionArgs {
    const float* qkv;              // [rows, (heads + 2 kv_heads) * head_size]
    int64_t rows;
    const int32_t* positions;      // [rows]
    const int32_t* row_offsets;    // [sequences + 1]
    int64_t sequences;
    const int32_t* slots;          // [sequences]
    const int32_t* cache_lengths;  // [sequences]
    const int32_t* tree_mask;      // [rows, mask_words]
    int64_t mask_words;
    const int32_t* commit_src;
    int64_t commits;
    const int32_t* commit_offsets;  // [sequences + 1] or null: nothing is committed
    const int32_t* starts;          // [sequences] or null: cache_lengths
    const float* rope_table;        // [max_positions, head_size]
    int64_t max_positions;
    void* k_cache;                  // [cache_slots, kv_heads, cache_rows, head_size], place p in row p % cache_rows
    void* v_cache;
    DType cache_dtype;              // fp32 or bf16
    int64_t cache_slots;
    int64_t cache_rows;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_size;
    int64_t window;                 // rows of its path that a row sees at most, 0: all
    const float* q_norm;            // [head_size] or null: RMS norm's weight, for query heads before RoPE
    const float* k_norm;            // [head_size] or null, for key heads
    float norm_eps;
    float* out;                     // [rows, heads * head_size]
};

// Logits of one row and what is drawn from: exp((logit - the largest) * inverse_temperature) of the top_k most likely
// tokens and, of these, the fewest that hold top_p of the sum; of equal ones the lower ids.
struct TokenFilter {
    const float* logits;  // [vocabulary]
    int64_t vocabulary;
    float inverse_temperature;
    int64_t top_k;  // 0: all
    double top_p;   // 1: all
};

struct ChooseArgs {
    TokenFilter f;
    int64_t seed;      // 64 bits, as they are
    int64_t position;  // below 2^32
    int32_t* token;    // [1]
};

struct DistributionArgs {
    TokenFilter f;
    int32_t* ids;    // [vocabulary], the first `count` ascending; not written where all tokens are kept
    float* weights;  // [vocabulary]
    int64_t* count;  // [1]
    double* total;   // [1]
};

struct RaceArgs {
    const float* weights;  // [count]
    const int32_t* ids;    // [count], ascending, or null: 0, 1, ...
    int64_t count;
    int64_t seed;
    int64_t position;
    int32_t* token;  // [1]
};

struct SumRanksArgs {
    const float* parts;  // [ranks, elements]
    int64_t ranks;
    int64_t elements;
    float* out;          // [elements]
};

struct Kernels {
    const char* isa;
#define REDRAFT_KERNEL(name, Args) void (*name)(const Args&);
    REDRAFT_KERNELS(REDRAFT_KERNEL)
#undef REDRAFT_KERNEL
};

// The kernels of this machine's best instruction set, or of the one that REDRAFT_ISA or select_isa
// names: avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx. Throws std::invalid_argument for one that is unknown or that
// the machine lacks.
const Kernels& kernels();
void select_isa(const char* name);

}  // namespace redraft
