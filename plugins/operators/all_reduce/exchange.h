// The ranks of a tensor-parallel target, and sums over them.
#pragma once

#include <cstdint>

namespace redraft {

// Functions and handles of an MPI library that the process has loaded. Handles are ints in some libraries and pointers
// in others: both arrive whole in a 64-bit argument on x86-64, so the library's header is not needed.
struct Ranks {
    int (*iallgather)(const void*, int, uintptr_t, void*, int, uintptr_t, uintptr_t, void*);
    int (*test)(void*, int*, void*);
    uintptr_t communicator;
    uintptr_t float_type;
    int64_t count;
};

// What all_reduce exchanges with from now on. Only while no operator runs.
void connect_ranks(const Ranks& ranks);
// Ranks that are connected; 1: none but this one.
int64_t rank_count();
// out = the sum of all ranks' x, the same bits on each. Throws std::runtime_error where MPI fails.
void all_reduce(const float* x, int64_t elements, float* out);
// Seconds in exchanges, waiting for other ranks included, since the call before.
double take_exchange_seconds();

}  // namespace redraft
