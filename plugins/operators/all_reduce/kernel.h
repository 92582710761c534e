#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

constexpr int64_t kSumBlock = 4096;  // elements that one thread sums at a time

static void sum_ranks_block(const void* context, int64_t begin, int64_t end, int) {
    const SumRanksArgs& a = *static_cast<const SumRanksArgs*>(context);
    const int64_t last = end * kSumBlock < a.elements ? end * kSumBlock : a.elements;
    for (int64_t i = begin * kSumBlock; i < last; i += 16) {
        const int64_t n = last - i;
        f32x16 sum = load_first(a.parts + i, n);
        for (int64_t rank = 1; rank < a.ranks; ++rank) sum = add(sum, load_first(a.parts + rank * a.elements + i, n));
        store_first(a.out + i, sum, n);
    }
}

static void sum_ranks(const SumRanksArgs& a) {
    PoolLock lock;
    const Phase phase = {sum_ranks_block, (a.elements + kSumBlock - 1) / kSumBlock};
    run_phases(&phase, 1, &a);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
