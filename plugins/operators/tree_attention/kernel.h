// A row's result depends on the keys that it sees, in the order of its path, alone: not on other rows, nor on how the work
// is divided.
#pragma once

#include "lanes.h"
#include "tiled.h"

namespace redraft::REDRAFT_ISA_NAMESPACE {

constexpr int64_t kKeyChunk = 128;  // keys of one item where scores are shared out by keys

template <class Way>
static void attend_block(const void* context, int64_t begin, int64_t end, int thread) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const Way way(job, thread);
    for (int64_t item = begin; item < end; ++item) {
        const Block& b = job.blocks[item];
        way.score_keys(b, job.first_key(b), job.keys(b), way.scores);
        way.attend(b, way.scores, 0, job.a.head_size);
    }
}

template <class Way>
static void score_chunk(const void* context, int64_t begin, int64_t end, int thread) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const Way way(job, thread);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t block = item / job.key_chunks, from = item % job.key_chunks * kKeyChunk;
        const Block& b = job.blocks[block];
        const int64_t keys = job.keys(b), to = keys < from + kKeyChunk ? keys : from + kKeyChunk;
        const int64_t first = job.first_key(b) > from ? job.first_key(b) : from;
        if (first < to) way.score_keys(b, first, to, job.scores + block * job.queries * job.padded);
    }
}

template <class Way>
static void value_chunk(const void* context, int64_t begin, int64_t end, int thread) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const Way way(job, thread);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t block = item / job.value_chunks, from = item % job.value_chunks * 32;
        way.attend(job.blocks[block], job.scores + block * job.queries * job.padded, from, from + 32);
    }
}

template <class Way>
static void run_attention(AttentionJob& job) {
    const TreeAttentionArgs& a = job.a;
    const int64_t rows = a.row_offsets[a.sequences];
    __builtin_memset(a.out + rows * a.heads * a.head_size, 0, (a.rows - rows) * a.heads * a.head_size * sizeof(float));
    PoolLock lock;
    const int64_t threads = thread_count(), wanted = Way::kItemsPerThread * threads;
    int64_t block_rows = Way::kBlockQueries / job.group;
    if (block_rows * wanted > rows * a.kv_heads) block_rows = rows * a.kv_heads / wanted;
    if (block_rows < 1) block_rows = 1;
    const auto parts = [&](int64_t length) { return (length + block_rows - 1) / block_rows; };
    int64_t blocks = 0, longest = 0;
    for (int64_t s = 0; s < a.sequences; ++s) {
        const int64_t n = a.row_offsets[s + 1] - a.row_offsets[s], end = job.start(s) + n;
        blocks += parts(n) * a.kv_heads;
        if (end > longest) longest = end;
        if (end - a.cache_lengths[s] > job.behind) job.behind = end - a.cache_lengths[s];
    }
    job.padded = (longest + kKeys - 1) / kKeys * kKeys;
    job.queries = block_rows * job.group;
    const bool by_keys = threads > 1 && blocks < wanted;
    const int64_t block_bytes = (blocks * sizeof(Block) + 63) / 64 * 64;
    char* scratch = static_cast<char*>(
        lock.shared_scratch(block_bytes + (by_keys ? blocks * job.queries * job.padded * sizeof(float) : 0)));
    job.blocks = reinterpret_cast<Block*>(scratch);
    job.scores = reinterpret_cast<float*>(scratch + block_bytes);
    job.key_chunks = (job.padded + kKeyChunk - 1) / kKeyChunk;
    job.value_chunks = a.head_size / 32;
    Block* block = job.blocks;
    for (int32_t s = 0; s < a.sequences; ++s) {
        const int64_t n = a.row_offsets[s + 1] - a.row_offsets[s], count = parts(n);
        for (int32_t h = 0; h < a.kv_heads; ++h)
            for (int64_t part = 0; part < count; ++part) {
                const int32_t first = static_cast<int32_t>(n * part / count);
                *block++ = {s, h, first, static_cast<int32_t>(n * (part + 1) / count) - first};
            }
    }
    lock.reserve_thread_scratch(Way::bytes(job));
    const Phase update = {update_cache<typename Way::Cache>, a.sequences * a.kv_heads};
    if (by_keys) {
        const Phase phases[] = {
            update, {score_chunk<Way>, blocks * job.key_chunks}, {value_chunk<Way>, blocks * job.value_chunks}};
        run_phases(phases, 3, &job);
    } else {
        const Phase phases[] = {update, {attend_block<Way>, blocks}};
        run_phases(phases, 2, &job);
    }
}

static void tree_attention(const TreeAttentionArgs& a) {
    AttentionJob job{a, a.heads / a.kv_heads, 0, 0, 0, nullptr, nullptr, 0, 0};
    if (a.cache_dtype != DType::bf16) return run_attention<Lanes<float>>(job);
#if defined(__AMX_BF16__)
    // With a window always by lanes: a sequence whose context outgrows its window keeps its bits.
    if (job.group <= Tiled::kBlockQueries && !a.window) return run_attention<Tiled>(job);
#endif
    run_attention<Lanes<uint16_t>>(job);
}

}  // namespace redraft::REDRAFT_ISA_NAMESPACE
