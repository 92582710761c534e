// Checks of the kernels' arguments, and kernels called with checked arguments.
#pragma once

#include <vector>

#include "kernels.h"

namespace redraft {

// void check(const Args&), for every kernel: throws std::invalid_argument that names a wrong value.
// void run_kernel(const Args&): the kernel of this machine's instruction set, after the check.
#define REDRAFT_CHECKED(name, Args)            \
    void check(const Args& args);              \
    inline void run_kernel(const Args& args) { \
        check(args);                           \
        kernels().name(args);                  \
    }
REDRAFT_KERNELS(REDRAFT_CHECKED)
#undef REDRAFT_CHECKED

// Bytes of a packed weight matrix of `weight_rows` x `in_features` (gated: 2 x out_features rows).
int64_t packed_bytes(int64_t in_features, int64_t out_features, DType dtype, Activation activation);
// The same of weights in blocks. Throws std::invalid_argument for segments that are wrong whatever the rows.
int64_t packed_bytes(int64_t in_features, const std::vector<BlockSegment>& segments);

}  // namespace redraft
