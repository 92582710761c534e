#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

namespace redraft {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(100);

// The job word: generation << 9 | open << 8 | threads inside.
constexpr uint32_t kInside = 0xff, kOpen = 0x100, kGeneration = 0x200;

struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
};

struct alignas(64) Done {
    std::atomic<int64_t> items;
};

struct Scratch {
    void* data = nullptr;
    std::size_t size = 0;

    void* reserve(std::size_t bytes) {
        if (bytes > size) {
            std::free(data);
            size = (bytes + (bytes >> 1) + 4095) & ~std::size_t{4095};
            data = std::aligned_alloc(4096, size);
            if (!data) {
                size = 0;
                throw std::bad_alloc();
            }
        }
        return data;
    }
};

struct Pool {
    std::mutex mutex;
    int threads = 1;   // the calling one included
    int started = 1;
    alignas(64) std::atomic<uint32_t> job{0};
    alignas(64) std::atomic<int> sleepers{0};
    const Phase* phases = nullptr;
    int phase_count = 0;
    int job_threads = 1;
    const void* context = nullptr;
    Part parts[kMaxPhases][kMaxThreads];
    Done done[kMaxPhases];
    Scratch shared;
    Scratch own[kMaxThreads];
};

// The cores of the thread that loads the library. The calling thread's would not do: OpenVINO pins its
// threads to one core each, and threads that they start would inherit that.
const cpu_set_t g_cores = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    return set;
}();

int default_thread_count() {
    if (const char* text = std::getenv("REDRAFT_THREADS")) {
        char* end = nullptr;
        const long value = std::strtol(text, &end, 10);
        if (*text && !*end && value >= 1 && value <= kMaxThreads) return static_cast<int>(value);
        throw std::invalid_argument("REDRAFT_THREADS=" + std::string(text) + ": expected 1 to " +
                                    std::to_string(kMaxThreads));
    }
    const int cores = CPU_COUNT(&g_cores);
    return cores < 1 ? 1 : cores > kMaxThreads ? kMaxThreads : cores;
}

Pool* g_pool = nullptr;

Pool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        g_pool = new Pool;
        g_pool->threads = default_thread_count();
        pthread_atfork(nullptr, nullptr, [] {  // a forked child has none of the parent's threads
            const int threads = g_pool->threads;
            g_pool = new Pool;
            g_pool->threads = threads;
        });
    });
    return *g_pool;
}

void participate(Pool& p, int thread) {
    for (int phase = 0; phase < p.phase_count; ++phase) {
        const int64_t items = p.phases[phase].items;
        int64_t finished = 0;
        for (int i = 0; i < p.job_threads; ++i) {
            Part& part = p.parts[phase][(thread + i) % p.job_threads];
            for (;;) {
                const int64_t item = part.next.fetch_add(1, std::memory_order_relaxed);
                if (item >= part.end) break;
                if (!finished && p.phases[phase].enter) p.phases[phase].enter(p.context, thread);
                p.phases[phase].run(p.context, item, item + 1, thread);
                ++finished;
            }
        }
        if (finished && p.phases[phase].leave) p.phases[phase].leave(p.context, thread);
        std::atomic<int64_t>& done = p.done[phase].items;
        if (finished) done.fetch_add(finished, std::memory_order_acq_rel);
        for (int spins = 0; done.load(std::memory_order_acquire) < items; ++spins) {
            if (spins < 4096)
                _mm_pause();
            else
                sched_yield();
        }
    }
}

bool enter(std::atomic<uint32_t>& job, uint32_t seen) {
    uint32_t word = job.load(std::memory_order_acquire);
    while ((word & kOpen) && (word & ~kInside) == (seen & ~kInside))
        if (job.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) return true;
    return false;
}

void work(Pool* p, int thread) {
    sched_setaffinity(0, sizeof(g_cores), &g_cores);
    uint32_t last = 0;
    for (;;) {
        uint32_t word = p->job.load(std::memory_order_acquire);
        const auto start = Clock::now();
        for (unsigned spins = 1; !(word & kOpen) || (word & ~kInside) == last; ++spins) {
            if (spins % 64 == 0 && Clock::now() - start > kSpin) {
                p->sleepers.fetch_add(1);
                word = p->job.load();
                if (!(word & kOpen) || (word & ~kInside) == last)
                    syscall(SYS_futex, &p->job, FUTEX_WAIT_PRIVATE, word, nullptr, nullptr, 0);
                p->sleepers.fetch_sub(1);
            }
            _mm_pause();
            word = p->job.load(std::memory_order_acquire);
        }
        last = word & ~kInside;
        if (!enter(p->job, word)) continue;
        if (thread < p->job_threads) participate(*p, thread);
        p->job.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace

void run_phases(const Phase* phases, int count, const void* context) {
    Pool& p = pool();
    for (; p.started < p.threads; ++p.started) std::thread(work, &p, p.started).detach();
    p.phases = phases;
    p.phase_count = count;
    p.context = context;
    p.job_threads = p.threads;
    for (int phase = 0; phase < count; ++phase) {
        p.done[phase].items.store(0, std::memory_order_relaxed);
        for (int i = 0; i < p.threads; ++i) {
            p.parts[phase][i].next.store(phases[phase].items * i / p.threads, std::memory_order_relaxed);
            p.parts[phase][i].end = phases[phase].items * (i + 1) / p.threads;
        }
    }
    if (p.threads > 1) {
        p.job.store(((p.job.load(std::memory_order_relaxed) & ~(kOpen | kInside)) + kGeneration) | kOpen);
        if (p.sleepers.load()) syscall(SYS_futex, &p.job, FUTEX_WAKE_PRIVATE, kMaxThreads, nullptr, nullptr, 0);
    }
    participate(p, 0);
    if (p.threads > 1) {
        p.job.fetch_and(~kOpen, std::memory_order_acq_rel);
        while (p.job.load(std::memory_order_acquire) & kInside) _mm_pause();
    }
}

PoolLock::PoolLock() { pool().mutex.lock(); }
PoolLock::~PoolLock() { pool().mutex.unlock(); }
void* PoolLock::shared_scratch(std::size_t bytes) { return pool().shared.reserve(bytes); }
void PoolLock::reserve_thread_scratch(std::size_t bytes) {
    for (int i = 0; i < pool().threads; ++i) pool().own[i].reserve(bytes);
}
void* thread_scratch(int thread) { return g_pool->own[thread].data; }

int thread_count() { return pool().threads; }

void set_thread_count(int count) {
    if (count < 1 || count > kMaxThreads)
        throw std::invalid_argument("thread count " + std::to_string(count) + ": expected 1 to " +
                                    std::to_string(kMaxThreads));
    Pool& p = pool();
    std::lock_guard lock(p.mutex);
    p.threads = count;
}

}  // namespace redraft
