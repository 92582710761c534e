// Kernels for weights in blocks, compiled for AVX-512 over this folder's immintrin.h, behind a C ABI.
#include <immintrin.h>

#include "../../../redraft/plugins/operators/embedding/kernel.h"
#include "../../../redraft/plugins/operators/linear/kernel.h"

extern "C" {
void emulated_linear(const redraft::LinearArgs* args) { redraft::emulated_isa::linear(*args); }
void emulated_embedding(const redraft::EmbeddingArgs* args) { redraft::emulated_isa::embedding(*args); }
}
