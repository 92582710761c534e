// The kernels of weights in blocks behind a C ABI; with this folder before the compiler's, over its immintrin.h.
#include <immintrin.h>

#include "operators/embedding/kernel.h"
#include "operators/linear/kernel.h"

extern "C" {
void linear(const redraft::LinearArgs* args) { redraft::REDRAFT_ISA_NAMESPACE::linear(*args); }
void embedding(const redraft::EmbeddingArgs* args) { redraft::REDRAFT_ISA_NAMESPACE::embedding(*args); }
}
