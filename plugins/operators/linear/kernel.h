#pragma once

#include "panels.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

struct LinearJob {
    const LinearArgs& a;
    Prepared prepared;
};

// One half panel's results of weight rows [from, from + 16), the bias added.
static inline f32x16 biased(const Projection& p, const float* sums, int64_t from, int64_t n) {
    return p.bias ? add(load(sums), load_first(p.bias + from, n)) : load(sums);
}

static inline void write_linear(const LinearArgs& a, int64_t r, int64_t column, f32x16 v, int64_t n) {
    const int64_t residual_row = a.residual_ids ? a.residual_ids[r] : r;
    if (a.activation == Activation::silu) v = silu(v);
    if (a.activation == Activation::relu) v = max(zero(), v);  // in this order NaN stays
    if (a.residual) v = add(load_first(a.residual + residual_row * a.p.out_features + column, n), v);
    if (a.activation == Activation::silu_last) v = silu(v);
    store_first(a.out + r * a.p.out_features + column, v, n);
}

static void linear_prepare(const void* context, int64_t begin, int64_t end, int thread) {
    const LinearJob& job = *static_cast<const LinearJob*>(context);
    for (int64_t r = begin; r < end; ++r) job.prepared.prepare_row(r, thread);
}

static void linear_enter(const void* context, int thread) {
    static_cast<const LinearJob*>(context)->prepared.enter(thread);
}

static void linear_leave(const void* context, int) { static_cast<const LinearJob*>(context)->prepared.leave(); }

static void linear_panel(const void* context, int64_t begin, int64_t end, int thread) {
    const LinearJob& job = *static_cast<const LinearJob*>(context);
    const Projection& p = job.prepared.p;
    float* sums = job.prepared.results(thread);
    for (int64_t panel = begin; panel < end; ++panel) {
        job.prepared.multiply(panel, thread, sums, false);
        const int64_t columns = is_gated(job.a.activation) ? 16 : kPanel;
        for (int64_t r = 0; r < p.rows; ++r) {
            job.prepared.fetch(panel, r);
            const float* row = sums + r * kPanel;
            const int64_t c = panel * columns, n = p.out_features - c;
            if (is_gated(job.a.activation)) {
                const f32x16 gate = biased(p, row, c, n), up = biased(p, row + 16, p.out_features + c, n);
                write_linear(job.a, r, c, mul(job.a.activation == Activation::swiglu ? silu(gate) : gelu(gate), up), n);
            } else {
                write_linear(job.a, r, c, biased(p, row, c, n), n);
                if (n > 16) write_linear(job.a, r, c + 16, biased(p, row + 16, c + 16, n - 16), n - 16);
            }
        }
    }
}

static void linear(const LinearArgs& a) {
    if (!a.p.rows) return;
    LinearJob job{a, Prepared(a.p, is_gated(a.activation))};
    const int64_t columns = is_gated(a.activation) ? 16 : kPanel;
    PoolLock lock;
    job.prepared.shared = static_cast<float*>(lock.shared_scratch(job.prepared.shared_bytes()));
    lock.reserve_thread_scratch(job.prepared.scratch_bytes(1));
    const bool own = job.prepared.own_rows();
    const int64_t panels = (a.p.out_features + columns - 1) / columns;
    const Phase phases[] = {{linear_prepare, a.p.rows}, {linear_panel, panels, linear_enter, linear_leave}};
    run_phases(phases + own, 2 - own, &job);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
