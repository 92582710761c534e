// The sizes of the kernels' argument structures, which plugins/headers.py compares with those it read from kernels.h.
#include "kernels.h"

#define REDRAFT_BYTES(name, Args) \
    extern "C" int64_t redraft_##name##_bytes() { return sizeof(redraft::Args); }
REDRAFT_KERNELS(REDRAFT_BYTES)
