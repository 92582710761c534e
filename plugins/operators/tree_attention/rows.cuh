// What TreeAttention is in every precision: the commit and the writing of new rows, and the sum of the splits. T is an
// element of qkv, caches and out: uint16_t for bf16, float.
#pragma once

#include "../../cuda/device.cuh"

namespace redraft {

constexpr int kThreads = 128, kWarps = 4;
constexpr int kWriteRows = 64;  // rows that a block of commit_write writes
constexpr float kNone = -INFINITY;
constexpr int kMostPlace = 1 << 29;  // sums of three are within an int

// Of scores in base 2: log2(e) / sqrt(D).
template <int D>
constexpr float kScale = 1.4426950408889634f * (D == 64   ? 0.125f
                                                : D == 96  ? 0.10206207261596577f
                                                : D == 128 ? 0.08838834764831845f
                                                           : 0.0625f);

REDRAFT_DEVICE int least(int a, int b) { return a < b ? a : b; }
REDRAFT_DEVICE int most(int a, int b) { return a > b ? a : b; }
REDRAFT_DEVICE int within(int x, int low, int high) { return least(most(x, low), high); }

// The row of a place in a cache, which may be a ring in a layer with a window.
REDRAFT_DEVICE int row_of(int place, int cache_rows) { return place < cache_rows ? place : place % cache_rows; }

// A sequence's rows and its places in a cache, whose rows lie within the tensors whatever the inputs hold: TensorRT may run
// a kernel on inputs of its own while it builds.
struct Span {
    int begin, count, context, start, slot;
};
REDRAFT_DEVICE Span span_of(int sequence, const int* row_offsets, const int* slots, const int* cache_lengths,
                            const int* starts, int rows, int cache_slots, int cache_rows) {
    const int begin = within(row_offsets[sequence], 0, rows), end = within(row_offsets[sequence + 1], begin, rows);
    const int start = within(starts[sequence], 0, kMostPlace);
    return {begin, least(end - begin, cache_rows), within(cache_lengths[sequence], 0, start), start,
            within(slots[sequence], 0, cache_slots - 1)};
}
template <class T>
REDRAFT_DEVICE uint4 load16(const T* from) { return *reinterpret_cast<const uint4*>(from); }
template <class T>
REDRAFT_DEVICE void store16(T* to, uint4 x) { *reinterpret_cast<uint4*>(to) = x; }

// 16 bytes of elements, in float.
template <class T>
struct Piece {
    static constexpr int kCount = 16 / sizeof(T);
    float x[kCount];

    explicit REDRAFT_DEVICE Piece(uint4 words) {
        set(0, words.x, T{});
        set(1, words.y, T{});
        set(2, words.z, T{});
        set(3, words.w, T{});
    }
    REDRAFT_DEVICE uint4 words() const { return {word(0, T{}), word(1, T{}), word(2, T{}), word(3, T{})}; }

  private:
    REDRAFT_DEVICE void set(int i, uint32_t word, uint16_t) {
        x[2 * i] = low(word);
        x[2 * i + 1] = high(word);
    }
    REDRAFT_DEVICE void set(int i, uint32_t word, float) { x[i] = as_float(word); }
    REDRAFT_DEVICE uint32_t word(int i, uint16_t) const { return pair(x[2 * i], x[2 * i + 1]); }
    REDRAFT_DEVICE uint32_t word(int i, float) const { return as_bits(x[i]); }
};

// One over the root mean square of a head. Every thread of a head sums all of its elements, which lie in the L1 cache, in
// one order: bits are the head's own.
template <class T, int D>
REDRAFT_DEVICE float inverse_rms(const T* head, float eps) {
    float sum = 0.0f;
#pragma unroll 2
    for (int i = 0; i < D; i += Piece<T>::kCount) {
        const Piece<T> piece(load16(head + i));
#pragma unroll
        for (int e = 0; e < Piece<T>::kCount; ++e) sum = fmaf(piece.x[e], piece.x[e], sum);
    }
    return 1.0f / sqrtf(sum / D + eps);
}
template <class T>
REDRAFT_DEVICE void scale(Piece<T>& piece, const float* weights, float by) {
    constexpr int kAtOnce = Piece<float>::kCount;
#pragma unroll
    for (int from = 0; from < Piece<T>::kCount; from += kAtOnce) {
        const Piece<float> own(load16(weights + from));
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) piece.x[from + e] *= own.x[e] * by;
    }
}

// x0 cos - x1 sin and x1 cos + x0 sin.
template <class T>
REDRAFT_DEVICE void rope(Piece<T>& first, Piece<T>& second, const float* cosine, const float* sine) {
#pragma unroll
    for (int e = 0; e < Piece<T>::kCount; ++e) {
        const float x0 = first.x[e], x1 = second.x[e];
        first.x[e] = x0 * cosine[e] - x1 * sine[e];
        second.x[e] = x1 * cosine[e] + x0 * sine[e];
    }
}

// Block (KV head, sequence, rows 64 z to 64 z + 63). Rows whose places are still sources of the commit are written by
// the block that commits, z = 0, behind its barrier. `eps` is the bits of a float; 0: there are no norms, and their
// weights are not read.
template <class T, int D>
REDRAFT_DEVICE void commit_write(const T* qkv, const int* positions, const int* row_offsets, const int* slots,
                                 const int* cache_lengths, const int* starts, const int* commit_src,
                                 const int* commit_offsets, const float* rope_table, const float* q_norm, const float* k_norm,
                                 int all_rows, int all_commits, int commit_bounds, int max_positions, int cache_slots,
                                 int cache_rows, int heads, int kv_heads, int eps, T* q, T* k_cache, T* v_cache) {
    constexpr int kEach = Piece<T>::kCount;
    constexpr int kPieces = D / (2 * kEach);  // of 2 x kEach elements, i and i + D / 2
    const int head = blockIdx.x, sequence = blockIdx.y, part = blockIdx.z, group = heads / kv_heads;
    const auto [begin, rows, context, start, slot] =
        span_of(sequence, row_offsets, slots, cache_lengths, starts, all_rows, cache_slots, cache_rows);
    int first_commit = 0, commits = 0;
    if (sequence + 1 < commit_bounds) {
        first_commit = within(commit_offsets[sequence], 0, all_commits);
        commits = least(within(commit_offsets[sequence + 1], first_commit, all_commits) - first_commit, context);
    }
    const int base = context - commits;
    const auto source = [=](int commit) { return base + within(commit_src[first_commit + commit], 0, cache_rows); };
    const int64_t place = (static_cast<int64_t>(slot) * kv_heads + head) * cache_rows;
    T* keys = k_cache + place * D;
    T* values = v_cache + place * D;
    const int sources = commits ? most(0, source(commits - 1) + 1 - start) : 0;

    if (part == 0) {
        constexpr int kWide = 2 * D / kEach, kAtOnce = kThreads / kWide;
        const int own = threadIdx.x / kWide, piece = threadIdx.x % kWide * kEach;
        T* cache = piece < D ? keys + piece : values + piece - D;
        for (int next = 0; next < commits; next += kAtOnce) {
            const int j = next + own;
            const bool moves = own < kAtOnce && j < commits;
            uint4 moved;
            if (moves) moved = load16(cache + static_cast<int64_t>(row_of(source(j), cache_rows)) * D);
            __syncthreads();
            if (moves) store16(cache + static_cast<int64_t>(row_of(base + j, cache_rows)) * D, moved);
        }
    }
    const int from = part == 0 ? 0 : most(part * kWriteRows, sources);
    const int to = least(rows, part == 0 ? most(kWriteRows, sources) : (part + 1) * kWriteRows);
    for (int item = threadIdx.x; item < (to - from) * (group + 2) * kPieces; item += kThreads) {
        const int i = item % kPieces * kEach, vector = item / kPieces % (group + 2);
        const int row = from + item / kPieces / (group + 2);
        const int64_t at = begin + row;
        const int column = vector < group ? head * group + vector : heads + (vector - group) * kv_heads + head;
        const T* x = qkv + (at * (heads + 2 * kv_heads) + column) * D + i;
        T* out = vector < group ? q + (at * heads + column) * D
                                : (vector == group ? keys : values) +
                                      static_cast<int64_t>(row_of(start + row, cache_rows)) * D;
        uint4 x0 = load16(x), x1 = load16(x + D / 2);
        if (vector <= group) {
            Piece<T> first(x0), second(x1);
            const float* cosine = rope_table + static_cast<int64_t>(within(positions[at], 0, max_positions - 1)) * D + i;
            if (eps) {
                const float inverse = inverse_rms<T, D>(x - i, as_float(eps));
                const float* weights = (vector < group ? q_norm : k_norm) + i;
                scale(first, weights, inverse);
                scale(second, weights + D / 2, inverse);
            }
            rope(first, second, cosine, cosine + D / 2);
            x0 = first.words();
            x1 = second.words();
        }
        store16(out + i, x0);
        store16(out + i + D / 2, x1);
    }
}

REDRAFT_DEVICE void store_pair(uint16_t* to, float even, float odd) {
    *reinterpret_cast<uint32_t*>(to) = pair(even, odd);
}
REDRAFT_DEVICE void store_pair(float* to, float even, float odd) {
    to[0] = even;
    to[1] = odd;
}

// The partial results of a row under a head: `count`, at places from `first` on, `stride` apart.
struct Parts {
    int64_t first, stride;
    int count;
};

// Warp: one row under one head, or one of its parts of 128 columns, with the partial results that parts_of names. Those
// without a visible key have sum 0 and no values.
template <class T, int D, class PartsOf>
REDRAFT_DEVICE void combine(const float* partial, const float* stats, int rows, int heads, PartsOf parts_of, T* out) {
    constexpr int kColumns = D == 64 ? 2 : 4, kParts = D > 128 ? D / 128 : 1;
    constexpr int kAtOnce = 16;  // splits whose values are on their way together
    struct alignas(4 * kColumns) Columns { float x[kColumns]; };
    __shared__ Columns staged[kAtOnce][kThreads];
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int64_t at = warp / kParts;
    if (at >= static_cast<int64_t>(rows) * heads) return;
    const Parts parts = parts_of(at);
    const int lane = threadIdx.x % 32, several = parts.count > 1 ? parts.count : 0;
    const int column = least((warp % kParts * 32 + lane) * kColumns, D - kColumns);  // lanes may share the last
    float maximum = kNone, sum = 0.0f, values[kColumns] = {};
    if (parts.count == 1 && (sum = stats[2 * parts.first + 1]) != 0.0f) {
        const Columns only = *reinterpret_cast<const Columns*>(partial + parts.first * D + column);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) values[c] = only.x[c];
    }
    const auto place = [=](int part) { return parts.first + part * parts.stride; };
    for (int s = lane; s < several; s += 32) maximum = fmaxf(maximum, stats[2 * place(s)]);
    for (int step = 16; step; step /= 2) maximum = fmaxf(maximum, exchange(maximum, step));
    for (int first = 0; first < several; first += 32) {  // a lane has the factor of a split
        const float* own = stats + 2 * place(least(first + lane, several - 1));
        const float weight = first + lane < several ? own[1] : 0.0f;
        const float factor = weight == 0.0f ? 0.0f : exp2f(own[0] - maximum);
        for (int next = 0; next < least(32, several - first); next += kAtOnce) {
            const int count = least(kAtOnce, several - first - next);
#pragma unroll 4
            for (int i = 0; i < count; ++i)
                if (broadcast(factor, next + i) != 0.0f)
                    copy_async(&staged[i][threadIdx.x], partial + place(first + next + i) * D + column);
            end_copies();
            wait_copies<0>();
#pragma unroll 4
            for (int i = 0; i < count; ++i) {
                const float share = broadcast(factor, next + i);
                sum += share * broadcast(weight, next + i);
                if (share == 0.0f) continue;
#pragma unroll
                for (int c = 0; c < kColumns; ++c) values[c] += share * staged[i][threadIdx.x].x[c];
            }
        }
    }
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) store_pair(out + at * D + column + i, values[i] * scale, values[i + 1] * scale);
}

}  // namespace redraft
