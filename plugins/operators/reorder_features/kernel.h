#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

static void reordered_row(const void* context, int64_t begin, int64_t end, int) {
    const ReorderFeaturesArgs& a = *static_cast<const ReorderFeaturesArgs*>(context);
    for (int64_t r = begin; r < end; ++r) {
        const float* x = a.x + r * a.features;
        float* out = a.out + r * a.features;
        for (int64_t i = 0; i < a.features; ++i) out[i] = x[a.order[i]];
    }
}

static void reorder_features(const ReorderFeaturesArgs& a) {
    PoolLock lock;
    const Phase phase = {reordered_row, a.rows};
    run_phases(&phase, 1, &a);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
