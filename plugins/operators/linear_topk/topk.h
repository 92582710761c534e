#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"

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

// The k most probable columns of every row. Threads reduce chunks of columns, then rows are merged: the sums do not
// depend on threads nor on other rows.
struct TopK {
    int64_t rows, columns, k;
    const int32_t* ids;  // [columns] or null
    float* values;       // [rows, k]
    int32_t* indices;    // [rows, k]
    int64_t lists;       // where a thread's lists of the best begin in its scratch
    int64_t chunks, stride;  // of rows of the arrays below: whole vectors
    int threads;
    float* maxima = nullptr;  // [rows, stride]
    float* sums = nullptr;    // [rows, stride], of exp(logit - maximum)

    TopK(int64_t rows, int64_t columns, int64_t k, const int32_t* ids, float* values, int32_t* indices, int64_t lists)
        : rows(rows), columns(columns), k(k), ids(ids), values(values), indices(indices), lists(lists),
          chunks((columns + kChunk - 1) / kChunk), stride((chunks + 15) / 16 * 16), threads(thread_count()) {}

    int64_t lists_bytes() const { return rows * (k * (sizeof(float) + sizeof(int32_t)) + sizeof(int64_t)); }
    int64_t shared_bytes() const { return 2 * rows * stride * static_cast<int64_t>(sizeof(float)); }
    // Once scratch is reserved, before any phase.
    void begin(void* shared) {
        maxima = static_cast<float*>(shared);
        sums = maxima + rows * stride;
        for (int t = 0; t < threads; ++t)
            for (int64_t r = 0; r < rows; ++r) *best(t, r).count = 0;
    }
    Best best(int thread, int64_t row) const {
        int64_t* counts = reinterpret_cast<int64_t*>(static_cast<char*>(thread_scratch(thread)) + lists);
        float* all = reinterpret_cast<float*>(counts + rows);
        int32_t* places = reinterpret_cast<int32_t*>(all + rows * k);
        return {all + row * k, places + row * k, counts + row, k};
    }

    // One chunk of `width` columns of row r: its maximum and sum of exponentials, and candidates for the row's best.
    // `logits` is room for it, panel i / kPanel at i / kPanel * panel_stride; `value(at, i, n)` gives 16 logits of
    // which the first n count, of columns chunk * kChunk + i and up, with their room at `at`.
    template <class F>
    void reduce(int64_t chunk, int64_t r, float* logits, int64_t panel_stride, int64_t width, int thread, F value) const {
        const int64_t first = chunk * kChunk;
        f32x16 top = set1(-__builtin_inff());
        for (int64_t i = 0; i < width; i += 16) {
            float* at = logits + i / kPanel * panel_stride + i % kPanel;
            const int64_t n = columns - first - i;
            if (n > 0) store(at, value(at, i, n));
            for (int64_t j = n < 0 ? 0 : n; j < 16; ++j) at[j] = -__builtin_inff();
            top = max(top, load(at));
        }
        const float maximum_logit = maximum(top);
        f32x16 total = zero();
        const Best found = best(thread, r);
        for (int64_t i = 0; i < width; i += 16) {
            const float* at = logits + i / kPanel * panel_stride + i % kPanel;
            const f32x16 v = load(at);
            total = add(total, exp(sub(v, set1(maximum_logit))));
            const float limit = *found.count == k ? found.values[k - 1] : -3.4e38f;
            for (uint32_t hits = at_least(v, set1(limit)); hits; hits &= hits - 1) {
                const int lane = __builtin_ctz(hits);
                found.offer(at[lane], static_cast<int32_t>(first + i + lane));
            }
        }
        maxima[r * stride + chunk] = maximum_logit;
        sums[r * stride + chunk] = sum(total);
    }

    void merge(int64_t r) const {
        const Best found = best(0, r);
        for (int t = 1; t < threads; ++t) {
            const Best other = best(t, r);
            for (int64_t i = 0; i < *other.count; ++i) found.offer(other.values[i], other.columns[i]);
        }
        f32x16 total = zero();
        for (int64_t c = 0; c < chunks; c += 16) {
            const float* tops = maxima + r * stride + c;
            const f32x16 weights = exp(sub(load_first(tops, chunks - c), set1(found.values[0])));
            total = fma(weights, load_first(sums + r * stride + c, chunks - c), total);
        }
        const double log_total = found.values[0] + __builtin_log(static_cast<double>(sum(total)));
        for (int64_t i = 0; i < k; ++i) {
            if (i >= *found.count) {  // only NaN logits leave places empty
                values[r * k + i] = __builtin_nanf("");
                indices[r * k + i] = 0;
                continue;
            }
            values[r * k + i] = static_cast<float>(found.values[i] - log_total);
            indices[r * k + i] = ids ? ids[found.columns[i]] : found.columns[i];
        }
    }
};

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
