#pragma once

#include <cmath>

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// 1 / sqrt(mean(x^2) + eps), summed in a fixed order.
static inline float inverse_rms(const float* x, int64_t n, float eps) {
    f32x16 squares[2] = {zero(), zero()};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const f32x16 a = load(x + i), b = load(x + i + 16);
        squares[0] = fma(a, a, squares[0]);
        squares[1] = fma(b, b, squares[1]);
    }
    for (; i < n; i += 16) {
        const f32x16 a = load_first(x + i, n - i);
        squares[0] = fma(a, a, squares[0]);
    }
    return 1.0f / __builtin_sqrtf(sum(add(squares[0], squares[1])) / static_cast<float>(n) + eps);
}

static void rms_norm_row(const void* context, int64_t begin, int64_t end, int) {
    const RMSNormArgs& a = *static_cast<const RMSNormArgs*>(context);
    for (int64_t r = begin; r < end; ++r) {
        const float* x = a.x + r * a.features;
        const f32x16 inverse = set1(inverse_rms(x, a.features, a.eps));
        for (int64_t i = 0; i < a.features; i += 16) {
            const int64_t n = a.features - i, at = r * a.features + i;
            const f32x16 normalized = mul(mul(load_first(x + i, n), inverse), load_first(a.weight + i, n));
            store_first(a.out + at, a.residual ? add(load_first(a.residual + at, n), normalized) : normalized, n);
        }
    }
}

static void rms_norm(const RMSNormArgs& a) {
    PoolLock lock;
    const Phase phase = {rms_norm_row, a.rows};
    run_phases(&phase, 1, &a);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
