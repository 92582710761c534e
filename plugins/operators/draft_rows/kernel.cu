// DraftRows: see README.md. A thread makes a row, or the row after the last.
#include "../../cuda/device.cuh"

namespace redraft {
namespace {

constexpr int kThreads = 128;
constexpr uint32_t kBits = 32;

REDRAFT_DEVICE int within(int i, int count) { return i < 0 ? 0 : i < count ? i : count - 1; }

}  // namespace
}  // namespace redraft

extern "C" __global__ void __launch_bounds__(redraft::kThreads)
    draft_rows(const int* contexts, const int* origins, const int* mask_before, int sequences, int level, int first,
               int width, int words, int rows_before, int words_before, int* positions, int* row_offsets, int* tree_mask,
               int* starts) {
    using namespace redraft;
    const int row = blockIdx.x * kThreads + threadIdx.x, rows = sequences * width;
    if (row <= sequences) row_offsets[row] = row * width;
    if (row < sequences) starts[row] = contexts[row] + first;
    if (row >= rows) return;
    positions[row] = contexts[row / width] + level - 1;
    const int own = first + row % width;
    const int parent = words_before ? within(origins[row], rows_before) * words_before : 0;
    for (int word = 0; word < words; ++word) {
        uint32_t bits = word < words_before ? static_cast<uint32_t>(mask_before[parent + word]) : 0;
        if (own / static_cast<int>(kBits) == word) bits |= 1u << (static_cast<uint32_t>(own) % kBits);
        tree_mask[row * words + word] = static_cast<int>(bits);
    }
}

#ifndef __CUDACC__
REDRAFT_KERNEL(draft_rows)
#endif
