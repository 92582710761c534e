#pragma once

#include "../../cpu/kernels.h"
#include "../../cpu/pool.h"
#include "../../cpu/simd.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

constexpr int64_t kChunkPanels = 8;  // panels whose logits are held in cache and summed together
constexpr int64_t kChunk = kChunkPanels * kPanel;

// Floats in the order of their bits, and back: a larger float is a larger integer.
static inline int32_t ordered(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof(bits));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}
static inline float from_ordered(int32_t bits) {
    bits ^= (bits >> 31) & 0x7fffffff;
    float x;
    __builtin_memcpy(&x, &bits, sizeof(x));
    return x;
}

// Columns of one row that one thread has seen, without those that cannot be among its k best; ties by lower column. They
// are in no order, and are thinned out where their room is full, so that a column costs about the same for any k.
struct Best {
    struct State {
        int64_t count;
        float limit;  // what is less is not among the k best
    };
    float* values;  // [room]
    int32_t* columns;
    State* state;
    int64_t k, room;

    static constexpr int64_t kSpare = 16;  // beyond k, where only few need to leave
    static int64_t room_for(int64_t k) { return (2 * k + 4 * kSpare) / 16 * 16; }

    // The lanes of 16 columns that may be among the k best.
    void take(f32x16 v, i32x16 of_columns, uint32_t lanes) const {
        append(v, of_columns, lanes & at_least(v, set1(state->limit)));
        if (state->count > room - 16) thin_out(kSpare);
    }
    void take(const Best& other) const {
        for (int64_t i = 0; i < other.state->count; i += 16)
            take(load(other.values + i), load(other.columns + i), lanes_left(other.state->count - i));
    }

    // At most k + spare stay, all of the k best among them; of equal ones for the last places, the lowest columns.
    void thin_out(int64_t spare) const {
        if (state->count <= k + spare) return;
        f32x16 top = zero();
        for (int64_t i = 0; i < state->count; i += 16) top = max(top, load_first(values + i, state->count - i));
        int32_t low = ordered(state->limit), high = ordered(maximum(top));
        int64_t left = state->count;
        while (low < high && left > k + spare) {  // `low`: as large as it may be for k columns to reach it
            const int32_t middle = static_cast<int32_t>(high - (static_cast<int64_t>(high) - low) / 2);
            if (const int64_t reached = count_at_least(from_ordered(middle)); reached >= k) {
                low = middle;
                left = reached;
            } else {
                high = middle - 1;
            }
        }
        state->limit = from_ordered(low);
        const int64_t before = state->count;
        state->count = 0;
        for (int64_t i = 0; i < before; i += 16) {
            const f32x16 v = load(values + i);
            append(v, load(columns + i), lanes_left(before - i) & at_least(v, set1(state->limit)));
        }
        while (state->count > k + spare) {
            int64_t last = -1;
            for (int64_t i = 0; i < state->count; ++i)
                if (values[i] == state->limit && (last < 0 || columns[i] > columns[last])) last = i;
            values[last] = values[--state->count];
            columns[last] = columns[state->count];
        }
    }

    // How many come before the i-th.
    int64_t place(int64_t i) const {
        int64_t before = 0, equal = 0;
        const f32x16 own = set1(values[i]);
        for (int64_t j = 0; j < state->count; j += 16) {
            const uint32_t lanes = lanes_left(state->count - j);
            const f32x16 others = load(values + j);
            const uint32_t above = lanes & ~at_least(own, others);
            before += __builtin_popcount(above);
            equal += __builtin_popcount(lanes & ~above & at_least(others, own));
        }
        for (int64_t j = 0; equal > 1 && j < state->count; ++j)
            before += values[j] == values[i] && columns[j] < columns[i];
        return before;
    }

  private:
    static uint32_t lanes_left(int64_t n) { return n < 16 ? (1u << n) - 1 : 0xffff; }

    void append(f32x16 v, i32x16 of_columns, uint32_t lanes) const {
        if (!lanes) return;
        store_lanes(values + state->count, v, lanes);
        store_lanes(columns + state->count, of_columns, lanes);
        state->count += __builtin_popcount(lanes);
    }
    int64_t count_at_least(float limit) const {
        int64_t found = 0;
        for (int64_t i = 0; i < state->count; i += 16)
            found += __builtin_popcount(at_least(load(values + i), set1(limit)) & lanes_left(state->count - i));
        return found;
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

    int64_t room() const { return Best::room_for(k); }
    int64_t lists_bytes() const { return rows * (room() * (sizeof(float) + sizeof(int32_t)) + sizeof(Best::State)); }
    int64_t shared_bytes() const { return 2 * rows * stride * static_cast<int64_t>(sizeof(float)); }
    // Once scratch is reserved, before any phase.
    void begin(void* shared) {
        maxima = static_cast<float*>(shared);
        sums = maxima + rows * stride;
        for (int t = 0; t < threads; ++t)
            for (int64_t r = 0; r < rows; ++r) *best(t, r).state = {0, -3.4e38f};
    }
    Best best(int thread, int64_t row) const {
        Best::State* states = reinterpret_cast<Best::State*>(static_cast<char*>(thread_scratch(thread)) + lists);
        float* all = reinterpret_cast<float*>(states + rows);
        int32_t* places = reinterpret_cast<int32_t*>(all + rows * room());
        return {all + row * room(), places + row * room(), states + row, k, room()};
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
            found.take(v, count_from(static_cast<int32_t>(first + i)), 0xffff);
        }
        maxima[r * stride + chunk] = maximum_logit;
        sums[r * stride + chunk] = sum(total);
    }

    void merge(int64_t r) const {
        const Best found = best(0, r);
        for (int t = 1; t < threads; ++t) found.take(best(t, r));
        found.thin_out(0);
        const int64_t count = found.state->count;
        float top = -__builtin_inff();
        for (int64_t i = 0; i < count; ++i) top = found.values[i] > top ? found.values[i] : top;
        f32x16 total = zero();
        for (int64_t c = 0; c < chunks; c += 16) {
            const float* tops = maxima + r * stride + c;
            const f32x16 weights = exp(sub(load_first(tops, chunks - c), set1(top)));
            total = fma(weights, load_first(sums + r * stride + c, chunks - c), total);
        }
        const double log_total = top + __builtin_log(static_cast<double>(sum(total)));
        for (int64_t i = 0; i < count; ++i) {
            const int64_t to = r * k + found.place(i);
            values[to] = static_cast<float>(found.values[i] - log_total);
            indices[to] = ids ? ids[found.columns[i]] : found.columns[i];
        }
        for (int64_t to = r * k + count; to < (r + 1) * k; ++to) {  // only NaN logits leave places empty
            values[to] = __builtin_nanf("");
            indices[to] = 0;
        }
    }
};

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
