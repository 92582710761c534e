// The operators: the one list that the kernel table, its dispatch, the C ABI, the OpenVINO extension and Python
// (plugins/headers.py) read.
#pragma once

// X(name): operators of networks, by their ONNX names.
#define REDRAFT_OPERATORS(X) \
    X(AllReduce)             \
    X(BeamStep)              \
    X(DraftRows)             \
    X(DrawStep)              \
    X(Embedding)             \
    X(Experts)               \
    X(Linear)                \
    X(LinearTopK)            \
    X(Norm)                  \
    X(PairRows)              \
    X(PerturbedTopK)         \
    X(ReorderFeatures)       \
    X(Stack)                 \
    X(TokenInfoTopK)         \
    X(TreeAttention)

// X(name, Args): CPU kernels and the structures of their arguments, which cpu/kernels.h defines.
#define REDRAFT_KERNELS(X)                   \
    X(beam_step, BeamStepArgs)               \
    X(choose, ChooseArgs)                    \
    X(distribution, DistributionArgs)        \
    X(draw_step, DrawStepArgs)               \
    X(embedding, EmbeddingArgs)              \
    X(linear, LinearArgs)                    \
    X(linear_topk, LinearTopKArgs)           \
    X(norm, NormArgs)                        \
    X(perturbed_topk, PerturbedTopKArgs)     \
    X(race, RaceArgs)                        \
    X(reorder_features, ReorderFeaturesArgs) \
    X(sum_ranks, SumRanksArgs)               \
    X(token_info_topk, TokenInfoTopKArgs)    \
    X(tree_attention, TreeAttentionArgs)
