// CUDA's words for g++: the threads of a block are fibres that take turns, so a kernel's own source runs on the CPU,
// barriers and warp operations included. For tests: correct, not fast.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define REDRAFT_KERNEL(name)                                                            \
    extern "C" void launch_##name(const uint32_t* grid, uint32_t threads, int descending, void** arguments) { \
        redraft::host::launch(name, grid, threads, descending, arguments);              \
    }

struct dim3 {
    uint32_t x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace redraft::host {

constexpr int kLanes = 32;
constexpr std::size_t kStack = 256 << 10;

struct Barrier {
    uint32_t arrived = 0, passed = 0;
};

struct Copy {
    void* to;
    const void* from;
    uint32_t bytes, group;
};

struct Fibre {
    ucontext_t entry;
    jmp_buf place;  // where it goes on, once it has begun
    bool begun = false;
    std::vector<char> stack = std::vector<char>(kStack);
    bool done = false;
    const Barrier* barrier = nullptr;  // that it waits at, and how often that had been passed
    uint32_t passed = 0;
    uint32_t collectives = 0;  // warp operations so far
    std::vector<Copy> copies;  // that have begun
    uint32_t groups = 0;       // of copies that have ended

    bool waits() const { return done || (barrier && barrier->passed == passed); }
};

// What the lanes of a warp operation bring, and what comes of it.
struct Collective {
    uint32_t words[kLanes][6];
    float product[16][8];
};

struct Warp {
    Barrier barrier;
    Collective collectives[2];  // a lane can be one operation ahead
};

inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline Barrier block_barrier;
inline jmp_buf scheduler;
inline uint32_t current;
inline std::function<void()> body;

inline void wait(Barrier& barrier, uint32_t members) {
    if (++barrier.arrived == members) {
        barrier.arrived = 0;
        ++barrier.passed;
        return;
    }
    Fibre& fibre = fibres[current];
    fibre.barrier = &barrier;
    fibre.passed = barrier.passed;
    if (!_setjmp(fibre.place)) _longjmp(scheduler, 1);
}

// All lanes take part, as a full mask promises; the last one finishes the operation.
template <std::size_t N, class Finish>
inline const Collective& collect(const uint32_t (&words)[N], Finish finish) {
    Warp& warp = warps[current / kLanes];
    Collective& collective = warp.collectives[fibres[current].collectives++ % 2];
    std::copy(words, words + N, collective.words[current % kLanes]);
    if (warp.barrier.arrived == kLanes - 1) finish(collective);
    wait(warp.barrier, kLanes);
    return collective;
}

inline void run_fibre() {
    body();
    fibres[current].done = true;
    _longjmp(scheduler, 1);
}

// Until the fibre waits or is done. Only its start is ucontext's, whose every switch asks the kernel for signal masks.
inline void go_on(Fibre& fibre) {
    if (_setjmp(scheduler)) return;
    if (fibre.begun) _longjmp(fibre.place, 1);
    fibre.begun = true;
    setcontext(&fibre.entry);
}

// One block: its threads by turns, each until it waits.
inline void run_block(uint32_t threads, bool descending) {
    for (uint32_t i = 0; i < threads; ++i) {
        Fibre& fibre = fibres[i];
        fibre.done = false;
        fibre.barrier = nullptr;
        fibre.collectives = 0;
        fibre.copies.clear();
        fibre.groups = 0;
        fibre.begun = false;
        getcontext(&fibre.entry);
        fibre.entry.uc_stack.ss_sp = fibre.stack.data();
        fibre.entry.uc_stack.ss_size = fibre.stack.size();
        makecontext(&fibre.entry, run_fibre, 0);
    }
    block_barrier = {};
    for (Warp& warp : warps) warp.barrier = {};
    for (uint32_t left = threads; left;) {
        bool stuck = true;
        for (uint32_t i = 0; i < threads; ++i) {
            current = descending ? threads - 1 - i : i;
            if (fibres[current].waits()) continue;
            stuck = false;
            threadIdx = {current, 0, 0};
            go_on(fibres[current]);
            left -= fibres[current].done;
        }
        if (stuck) {
            std::fprintf(stderr, "block (%u, %u, %u): %u threads wait at a barrier that others never reach\n", blockIdx.x,
                         blockIdx.y, blockIdx.z, left);
            std::abort();
        }
    }
}

template <class... A, std::size_t... I>
void launch_with(void (*kernel)(A...), const uint32_t* grid, uint32_t threads, int descending, void** arguments,
                 std::index_sequence<I...>) {
    body = [=] { kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...); };
    fibres.resize(threads);
    warps.resize((threads + kLanes - 1) / kLanes);
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    const uint32_t blocks = grid[0] * grid[1] * grid[2];
    for (uint32_t i = 0; i < blocks; ++i) {
        const uint32_t block = descending ? blocks - 1 - i : i;
        blockIdx = {block % grid[0], block / grid[0] % grid[1], block / grid[0] / grid[1]};
        run_block(threads, descending);
    }
}

// As cuLaunchKernel: arguments[i] points to the value of argument i. Blocks and threads run one by one, ascending or
// descending; a result that depends on it is a race.
template <class... A>
void launch(void (*kernel)(A...), const uint32_t* grid, uint32_t threads, int descending, void** arguments) {
    launch_with(kernel, grid, threads, descending, arguments, std::index_sequence_for<A...>());
}

inline float as_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

}  // namespace redraft::host

inline void __syncthreads() { redraft::host::wait(redraft::host::block_barrier, blockDim.x); }

namespace redraft {

inline float broadcast(float x, int lane) {
    uint32_t bits[1];
    __builtin_memcpy(bits, &x, 4);
    return host::as_float(host::collect(bits, [](host::Collective&) {}).words[lane][0]);
}
inline float exchange(float x, int lane_mask) { return broadcast(x, (host::current % host::kLanes) ^ lane_mask); }

// As late as a GPU may copy: in wait_copies.
template <class T>
inline void copy_async(T* to, const void* from) {
    host::Fibre& fibre = host::fibres[host::current];
    fibre.copies.push_back({to, from, sizeof(T), fibre.groups});
}
inline void end_copies() { ++host::fibres[host::current].groups; }
template <uint32_t Later>
inline void wait_copies() {
    host::Fibre& fibre = host::fibres[host::current];
    auto copy = fibre.copies.begin();
    for (; copy != fibre.copies.end() && copy->group + Later < fibre.groups; ++copy)
        std::memcpy(copy->to, copy->from, copy->bytes);
    fibre.copies.erase(fibre.copies.begin(), copy);
}

// The lanes' matrices as PTX places them; see device.cuh.
template <class Element>
inline uint4 matrices(const uint4* row, Element element) {
    const uint64_t address = reinterpret_cast<uint64_t>(row);
    const host::Collective& all =
        host::collect({static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)}, [](host::Collective&) {});
    uint32_t found[4];
    for (int matrix = 0; matrix < 4; ++matrix) {
        const uint16_t* rows[8];
        for (int r = 0; r < 8; ++r) {
            const uint32_t(&words)[6] = all.words[8 * matrix + r];
            rows[r] = reinterpret_cast<const uint16_t*>(words[0] | static_cast<uint64_t>(words[1]) << 32);
        }
        const int g = host::current % host::kLanes / 4, t = host::current % 4;
        found[matrix] = element(rows, g, 2 * t) | static_cast<uint32_t>(element(rows, g, 2 * t + 1)) << 16;
    }
    return {found[0], found[1], found[2], found[3]};
}
inline uint4 load_matrices(const uint4* row) {
    return matrices(row, [](const uint16_t* const* rows, int g, int i) { return rows[g][i]; });
}
inline uint4 load_transposed(const uint4* row) {
    return matrices(row, [](const uint16_t* const* rows, int g, int i) { return rows[i][g]; });
}

inline float power_of_two(float x) { return std::exp2(x); }

inline void sync_warp() { host::wait(host::warps[host::current / host::kLanes].barrier, host::kLanes); }

inline int count_bits(uint32_t x) { return __builtin_popcount(x); }

// The fragments' places as PTX defines them, element by element; see device.cuh.
inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const host::Collective& all = host::collect({a0, a1, a2, a3, b0, b1}, [](host::Collective& c) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < host::kLanes; ++lane)
            for (int half = 0; half < 12; ++half) {
                const uint32_t pair = c.words[lane][half / 2], word = half / 2 % 4, g = lane / 4, t = lane % 4;
                const float x = host::as_float(half % 2 ? pair & 0xFFFF0000u : pair << 16);
                if (half < 8)
                    a[g + word % 2 * 8][2 * t + half % 2 + word / 2 * 8] = x;
                else
                    b[2 * t + half % 2 + word * 8][g] = x;
            }
        std::fill_n(&c.product[0][0], 16 * 8, 0.0f);
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 16; ++k)
                for (int column = 0; column < 8; ++column) c.product[row][column] += a[row][k] * b[k][column];
    });
    const int lane = host::current % host::kLanes;
    for (int i = 0; i < 4; ++i) d[i] += all.product[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

}  // namespace redraft

inline uint32_t atomicAdd(uint32_t* at, uint32_t x) {
    const uint32_t before = *at;
    *at += x;
    return before;
}
