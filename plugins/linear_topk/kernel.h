#pragma once

#include "../linear/panels.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

constexpr int64_t kChunkPanels = 8;  // panels whose logits are held in cache and summed together
constexpr int64_t kChunk = kChunkPanels * kPanel;

// The k best columns of one row that one thread has seen, best first; ties by lower column.
struct Best {
    float* values;
    int32_t* columns;
    int64_t* count;
    int64_t k;

    bool before(float v, int32_t c, int64_t at) const { return v > values[at] || (v == values[at] && c < columns[at]); }
    void offer(float v, int32_t c) const {
        int64_t at = *count;
        if (at == k) {
            if (!before(v, c, k - 1)) return;
            --at;
        } else {
            ++*count;
        }
        for (; at > 0 && before(v, c, at - 1); --at) {
            values[at] = values[at - 1];
            columns[at] = columns[at - 1];
        }
        values[at] = v;
        columns[at] = c;
    }
};

struct TopKJob {
    const LinearTopKArgs& a;
    Prepared prepared;
    int64_t chunks, stride;  // of rows of the arrays below: whole vectors
    int threads;
    float* maxima;  // [rows, stride]
    float* sums;    // [rows, stride], of exp(logit - maximum)

    int64_t best_bytes() const { return a.p.rows * (a.k * (sizeof(float) + sizeof(int32_t)) + sizeof(int64_t)); }
    Best best(int thread, int64_t row) const {
        int64_t* counts = reinterpret_cast<int64_t*>(prepared.behind(thread, kChunkPanels));
        float* values = reinterpret_cast<float*>(counts + a.p.rows);
        int32_t* columns = reinterpret_cast<int32_t*>(values + a.p.rows * a.k);
        return {values + row * a.k, columns + row * a.k, counts + row, a.k};
    }
};

static void topk_prepare(const void* context, int64_t begin, int64_t end, int thread) {
    const TopKJob& job = *static_cast<const TopKJob*>(context);
    for (int64_t r = begin; r < end; ++r) job.prepared.prepare_row(r, thread);
}

static void topk_enter(const void* context, int thread) {
    static_cast<const TopKJob*>(context)->prepared.prepare_own(thread);
}

// Logits of one chunk: the row's maximum and sum of exponentials, and candidates for its best.
static void reduce_chunk(const TopKJob& job, int64_t chunk, int64_t r, float* logits, int64_t stride, int64_t panels,
                         int thread) {
    const Projection& p = job.prepared.p;
    const int64_t first = chunk * kChunk;
    f32x16 top = set1(-__builtin_inff());
    for (int64_t i = 0; i < panels * kPanel; i += 16) {
        float* at = logits + i / kPanel * stride + i % kPanel;
        const int64_t n = p.out_features - first - i;
        if (n > 0) {
            f32x16 v = load(at);
            if (has_scale(p.dtype)) v = mul(v, load_first(p.scale + first + i, n));
            if (p.bias) v = add(v, load_first(p.bias + first + i, n));
            store(at, v);
        }
        for (int64_t j = n < 0 ? 0 : n; j < 16; ++j) at[j] = -__builtin_inff();
        top = max(top, load(at));
    }
    const float maximum_logit = maximum(top);
    f32x16 total = zero();
    const Best best = job.best(thread, r);
    for (int64_t i = 0; i < panels * kPanel; i += 16) {
        const float* at = logits + i / kPanel * stride + i % kPanel;
        const f32x16 v = load(at);
        total = add(total, exp(sub(v, set1(maximum_logit))));
        const float limit = *best.count == job.a.k ? best.values[job.a.k - 1] : -3.4e38f;
        for (uint32_t hits = at_least(v, set1(limit)); hits; hits &= hits - 1) {
            const int lane = __builtin_ctz(hits);
            best.offer(at[lane], static_cast<int32_t>(first + i + lane));
        }
    }
    job.maxima[r * job.stride + chunk] = maximum_logit;
    job.sums[r * job.stride + chunk] = sum(total);
}

static void topk_chunk(const void* context, int64_t begin, int64_t end, int thread) {
    const TopKJob& job = *static_cast<const TopKJob*>(context);
    const int64_t rows = job.prepared.p.rows, all = (job.prepared.p.out_features + kPanel - 1) / kPanel;
    float* logits = job.prepared.results(thread);  // [panels, rows, 32]
    char* widened = job.prepared.widened(thread, kChunkPanels);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = chunk * kChunkPanels;
        const int64_t panels = all - first < kChunkPanels ? all - first : kChunkPanels;
        for (int64_t i = 0; i < panels; ++i)
            job.prepared.multiply(first + i, thread, logits + i * rows * kPanel, widened);
        for (int64_t r = 0; r < rows; ++r)
            reduce_chunk(job, chunk, r, logits + r * kPanel, rows * kPanel, panels, thread);
    }
}

static void topk_merge(const void* context, int64_t begin, int64_t end, int) {
    const TopKJob& job = *static_cast<const TopKJob*>(context);
    for (int64_t r = begin; r < end; ++r) {
        const Best best = job.best(0, r);
        for (int t = 1; t < job.threads; ++t) {
            const Best other = job.best(t, r);
            for (int64_t i = 0; i < *other.count; ++i) best.offer(other.values[i], other.columns[i]);
        }
        f32x16 total = zero();
        for (int64_t c = 0; c < job.chunks; c += 16) {
            const float* maxima = job.maxima + r * job.stride + c;
            const f32x16 weights = exp(sub(load_first(maxima, job.chunks - c), set1(best.values[0])));
            total = fma(weights, load_first(job.sums + r * job.stride + c, job.chunks - c), total);
        }
        const double log_total = best.values[0] + __builtin_log(static_cast<double>(sum(total)));
        for (int64_t i = 0; i < job.a.k; ++i) {
            if (i >= *best.count) {  // only NaN logits leave places empty
                job.a.values[r * job.a.k + i] = __builtin_nanf("");
                job.a.indices[r * job.a.k + i] = 0;
                continue;
            }
            job.a.values[r * job.a.k + i] = static_cast<float>(best.values[i] - log_total);
            job.a.indices[r * job.a.k + i] = job.a.ids ? job.a.ids[best.columns[i]] : best.columns[i];
        }
    }
}

static void linear_topk(const LinearTopKArgs& a) {
    const Prepared prepared(a.p);
    PoolLock lock;
    const int64_t chunks = (a.p.out_features + kChunk - 1) / kChunk;
    TopKJob job{a, prepared, chunks, (chunks + 15) / 16 * 16, thread_count(), nullptr, nullptr};
    char* scratch = static_cast<char*>(lock.shared_scratch(prepared.shared_bytes() + 8 * a.p.rows * job.stride));
    job.prepared.shared = reinterpret_cast<float*>(scratch);
    job.maxima = reinterpret_cast<float*>(scratch + prepared.shared_bytes());
    job.sums = job.maxima + a.p.rows * job.stride;
    lock.reserve_thread_scratch(prepared.scratch_bytes(kChunkPanels, job.best_bytes()));
    for (int t = 0; t < job.threads; ++t)
        for (int64_t r = 0; r < a.p.rows; ++r) *job.best(t, r).count = 0;
    const bool own = prepared.own_rows();
    const Phase multiply{topk_chunk, chunks, own ? topk_enter : nullptr};
    const Phase phases[] = {{topk_prepare, a.p.rows}, multiply, {topk_merge, a.p.rows}};
    run_phases(phases + own, 3 - own, &job);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
