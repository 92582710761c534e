// Checks of the operators' arguments; each throws std::invalid_argument naming the value.
#pragma once

#include "kernels.h"

namespace redraft {

void check(const LinearArgs& args);
void check(const TokenInfoTopKArgs& args);
void check(const LinearTopKArgs& args);
void check(const EmbeddingArgs& args);
void check(const BeamStepArgs& args);
void check(const DrawStepArgs& args);
void check(const TreeAttentionArgs& args);

// Bytes of a packed weight matrix of `weight_rows` x `in_features` (with swiglu: 2 x out_features rows).
int64_t packed_bytes(int64_t in_features, int64_t out_features, DType dtype, Activation activation);

}  // namespace redraft
