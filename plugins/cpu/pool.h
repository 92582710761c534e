// The library's own threads. A job is a few phases; a phase is a range of items that the threads share.
//
// Every thread starts in its own contiguous part of a phase's range (so that memory is streamed in
// order) and then takes items from the others' parts. A phase begins when all items of the one before
// are done. A thread that is slow to wake up is not waited for: the others do its items.
#pragma once

#include <cstddef>
#include <cstdint>

namespace redraft {

constexpr int kMaxThreads = 64;
constexpr int kMaxPhases = 4;

struct Phase {
    void (*run)(const void* context, int64_t begin, int64_t end, int thread);
    int64_t items;
    void (*enter)(const void* context, int thread) = nullptr;  // what a thread does before its first item
    void (*leave)(const void* context, int thread) = nullptr;  // and behind its last
};

// Runs the phases on the pool's threads and the calling one; returns when all items are done. One job
// runs at a time; calls from several threads queue up.
void run_phases(const Phase* phases, int count, const void* context);

// Holds the pool for one operator: its scratch memory, then run_phases. Any thread may construct one.
class PoolLock {
  public:
    PoolLock();
    ~PoolLock();
    PoolLock(const PoolLock&) = delete;
    PoolLock& operator=(const PoolLock&) = delete;
    // Uninitialized memory shared by the job, 64-byte aligned, valid while the lock is held. One call per lock.
    void* shared_scratch(std::size_t bytes);
    // The same for one thread alone, before run_phases.
    void reserve_thread_scratch(std::size_t bytes);
};

void* thread_scratch(int thread);  // what reserve_thread_scratch reserved

int thread_count();
void set_thread_count(int count);  // throws std::invalid_argument outside 1..kMaxThreads

}  // namespace redraft
