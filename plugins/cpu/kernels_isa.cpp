// All kernels for one instruction set: compiled once each with -DREDRAFT_ISA_NAMESPACE=avx2, avxvnni, avx512,
// avx512vnni, avx512bf16 and amx and the matching -m flags.
#include "../operators/all_reduce/kernel.h"
#include "../operators/beam_step/kernel.h"
#include "../operators/draw_step/kernel.h"
#include "../operators/embedding/kernel.h"
#include "../operators/linear/kernel.h"
#include "../operators/linear_topk/kernel.h"
#include "../operators/norm/kernel.h"
#include "../operators/perturbed_topk/kernel.h"
#include "../operators/reorder_features/kernel.h"
#include "../operators/sampling/kernel.h"
#include "../operators/token_info_topk/kernel.h"
#include "../operators/tree_attention/kernel.h"
#include "kernels.h"

#define REDRAFT_STRING(x) #x
#define REDRAFT_EXPAND(x) REDRAFT_STRING(x)

namespace redraft::REDRAFT_ISA_NAMESPACE {

extern const Kernels table;
const Kernels table = {
    REDRAFT_EXPAND(REDRAFT_ISA_NAMESPACE),
#define REDRAFT_ENTRY(name, Args) name,
    REDRAFT_KERNELS(REDRAFT_ENTRY)};

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
