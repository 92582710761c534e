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
    int64_t chunks, threads;
    float* maxima;  // [chunks, rows]
    float* sums;    // [chunks, rows], of exp(logit - maximum)
    float* values;  // [threads, rows, k]
    int32_t* columns;
    int64_t* counts;  // [threads, rows]

    Best best(int64_t thread, int64_t row) const {
        const int64_t list = thread * a.p.rows + row;
        return {values + list * a.k, columns + list * a.k, counts + list, a.k};
    }
};

static void topk_prepare(const void* context, int64_t begin, int64_t end, int) {
    const TopKJob& job = *static_cast<const TopKJob*>(context);
    for (int64_t r = begin; r < end; ++r) {
        job.prepared.prepare_row(r);
        for (int64_t t = 0; t < job.threads; ++t) *job.best(t, r).count = 0;
    }
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
    job.maxima[chunk * p.rows + r] = maximum_logit;
    job.sums[chunk * p.rows + r] = sum(total);
}

static void topk_chunk(const void* context, int64_t begin, int64_t end, int thread) {
    const TopKJob& job = *static_cast<const TopKJob*>(context);
    const int64_t rows = job.prepared.p.rows, all = (job.prepared.p.out_features + kPanel - 1) / kPanel;
    float* logits = static_cast<float*>(thread_scratch(thread));  // [panels, rows, 32]
    char* widened = reinterpret_cast<char*>(logits + kChunkPanels * rows * kPanel);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = chunk * kChunkPanels;
        const int64_t panels = all - first < kChunkPanels ? all - first : kChunkPanels;
        for (int64_t i = 0; i < panels; ++i)
            job.prepared.multiply(first + i, 0, rows, logits + i * rows * kPanel, widened);
        for (int64_t r = 0; r < rows; ++r) reduce_chunk(job, chunk, r, logits + r * kPanel, rows * kPanel, panels, thread);
    }
}

static void topk_merge(const void* context, int64_t begin, int64_t end, int) {
    const TopKJob& job = *static_cast<const TopKJob*>(context);
    for (int64_t r = begin; r < end; ++r) {
        const Best best = job.best(0, r);
        for (int64_t t = 1; t < job.threads; ++t) {
            const Best other = job.best(t, r);
            for (int64_t i = 0; i < *other.count; ++i) best.offer(other.values[i], other.columns[i]);
        }
        const int64_t rows = job.prepared.p.rows;
        double total = 0;
        for (int64_t c = 0; c < job.chunks; ++c)
            total += job.sums[c * rows + r] * __builtin_exp(static_cast<double>(job.maxima[c * rows + r]) - best.values[0]);
        const double log_total = best.values[0] + __builtin_log(total);
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
    const int64_t panels = (a.p.out_features + kPanel - 1) / kPanel, rows = a.p.rows, threads = thread_count();
    const int64_t chunks = (panels + kChunkPanels - 1) / kChunkPanels;
    char* scratch = static_cast<char*>(
        lock.shared_scratch(prepared.x_bytes() + 8 * (chunks * rows + threads * rows * (a.k + 1))));
    TopKJob job{a, prepared, chunks, threads, nullptr, nullptr, nullptr, nullptr, nullptr};
    job.prepared.x = reinterpret_cast<float*>(scratch);
    job.counts = reinterpret_cast<int64_t*>(scratch + prepared.x_bytes());
    job.maxima = reinterpret_cast<float*>(job.counts + threads * rows);
    job.sums = job.maxima + chunks * rows;
    job.values = job.sums + chunks * rows;
    job.columns = reinterpret_cast<int32_t*>(job.values + threads * rows * a.k);
    lock.reserve_thread_scratch(prepared.tile_bytes(kChunkPanels * rows));
    const Phase phases[] = {{topk_prepare, rows}, {topk_chunk, chunks}, {topk_merge, rows}};
    run_phases(phases, 3, &job);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
