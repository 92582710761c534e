#pragma once

#include "../linear/panels.h"
#include "topk.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

struct LinearTopKJob {
    Prepared prepared;
    TopK topk;
};

static void topk_prepare(const void* context, int64_t begin, int64_t end, int thread) {
    const LinearTopKJob& job = *static_cast<const LinearTopKJob*>(context);
    for (int64_t r = begin; r < end; ++r) job.prepared.prepare_row(r, thread);
}

static void topk_enter(const void* context, int thread) {
    static_cast<const LinearTopKJob*>(context)->prepared.enter(thread);
}

static void topk_leave(const void* context, int) { static_cast<const LinearTopKJob*>(context)->prepared.leave(); }

static void topk_chunk(const void* context, int64_t begin, int64_t end, int thread) {
    const LinearTopKJob& job = *static_cast<const LinearTopKJob*>(context);
    const Projection& p = job.prepared.p;
    const int64_t all = (p.out_features + kPanel - 1) / kPanel;
    float* logits = job.prepared.results(thread);  // [panels, rows, 32]
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = chunk * kChunkPanels;
        const int64_t panels = all - first < kChunkPanels ? all - first : kChunkPanels;
        for (int64_t i = 0; i < panels; ++i)
            job.prepared.multiply(first + i, thread, logits + i * p.rows * kPanel, true);
        const auto value = [&](const float* at, int64_t i, int64_t n) {
            return p.bias ? add(load(at), load_first(p.bias + first * kPanel + i, n)) : load(at);
        };
        for (int64_t r = 0; r < p.rows; ++r)
            job.topk.reduce(chunk, r, logits + r * kPanel, p.rows * kPanel, panels * kPanel, thread, value);
    }
}

static void topk_merge(const void* context, int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) static_cast<const LinearTopKJob*>(context)->topk.merge(r);
}

static void linear_topk(const LinearTopKArgs& a) {
    if (!a.p.rows) return;
    PoolLock lock;
    LinearTopKJob job{Prepared(a.p), TopK(a.p.rows, a.p.out_features, a.k, a.ids, a.values, a.indices, 0)};
    Prepared& prepared = job.prepared;
    char* scratch = static_cast<char*>(lock.shared_scratch(prepared.shared_bytes() + job.topk.shared_bytes()));
    prepared.shared = reinterpret_cast<float*>(scratch);
    job.topk.lists = prepared.scratch_bytes(kChunkPanels);
    lock.reserve_thread_scratch(prepared.scratch_bytes(kChunkPanels, job.topk.lists_bytes()));
    job.topk.begin(scratch + prepared.shared_bytes());
    const bool own = prepared.own_rows();
    const Phase multiply{topk_chunk, job.topk.chunks, topk_enter, topk_leave};
    const Phase phases[] = {{topk_prepare, a.p.rows}, multiply, {topk_merge, a.p.rows}};
    run_phases(phases + own, 3 - own, &job);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
