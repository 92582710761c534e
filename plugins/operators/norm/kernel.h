#pragma once

#include <cmath>

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

// What `add_to` adds up of n floats, 16 at a time, in a fixed order: (sum so far, floats, how many of these there are).
template <class F>
static inline float total(const float* x, int64_t n, F add_to) {
    f32x16 sums[2] = {zero(), zero()};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        sums[0] = add_to(sums[0], load(x + i), 16);
        sums[1] = add_to(sums[1], load(x + i + 16), 16);
    }
    for (; i < n; i += 16) sums[0] = add_to(sums[0], load_first(x + i, n - i), n - i);
    return sum(add(sums[0], sums[1]));
}

static inline float inverse_root(float squares, int64_t n, float eps) {
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
}

// 1 / sqrt(mean(x^2) + eps)
static inline float inverse_rms(const float* x, int64_t n, float eps) {
    return inverse_root(total(x, n, [](f32x16 sum, f32x16 a, int64_t) { return fma(a, a, sum); }), n, eps);
}

// One row's norm: RMS norm, or LayerNorm where there is a bias; without a weight none.
struct RowNorm {
    const float* weight;
    const float* bias;
    f32x16 mean = zero();
    f32x16 inverse = zero();

    RowNorm(const float* x, int64_t n, const float* weight, const float* bias, float eps) : weight(weight), bias(bias) {
        if (!weight) return;
        if (!bias) {
            inverse = set1(inverse_rms(x, n, eps));
            return;
        }
        const float all = total(x, n, [](f32x16 sum, f32x16 a, int64_t) { return add(sum, a); });
        mean = set1(all / static_cast<float>(n));
        const auto add_square = [this](f32x16 sum, f32x16 a, int64_t count) {
            const f32x16 off = first(sub(a, mean), count);
            return fma(off, off, sum);
        };
        inverse = set1(inverse_root(total(x, n, add_square), n, eps));
    }
    // Of the row's elements from i on, the first n of `x`.
    f32x16 operator()(f32x16 x, int64_t i, int64_t n) const {
        if (!weight) return x;
        if (!bias) return mul(mul(x, inverse), load_first(weight + i, n));
        return fma(mul(sub(x, mean), inverse), load_first(weight + i, n), load_first(bias + i, n));
    }
};

static void norm_row(const void* context, int64_t begin, int64_t end, int) {
    const NormArgs& a = *static_cast<const NormArgs*>(context);
    for (int64_t r = begin; r < end; ++r) {
        const float* x = a.x + r * a.features;
        const RowNorm normalized(x, a.features, a.weight, a.bias, a.eps);
        for (int64_t i = 0; i < a.features; i += 16) {
            const int64_t n = a.features - i, at = r * a.features + i;
            const f32x16 v = normalized(load_first(x + i, n), i, n);
            store_first(a.out + at, a.residual ? add(load_first(a.residual + at, n), v) : v, n);
        }
    }
}

static void norm(const NormArgs& a) {
    PoolLock lock;
    const Phase phase = {norm_row, a.rows};
    run_phases(&phase, 1, &a);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
