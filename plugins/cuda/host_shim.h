// CUDA's words for g++: the threads of a block are fibres that take turns, so a kernel's own source runs on the CPU,
// barriers and warp operations included. For tests: correct, not fast.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
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
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace redraft::host {

constexpr int kLanes = 32;
constexpr std::size_t kStack = 256 << 10;

struct Barrier {
    uint32_t arrived = 0, passed = 0;
};

struct Fibre {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(kStack);
    bool done = false;
    uint32_t collectives = 0;  // warp operations so far
};

struct Warp {
    Barrier barrier;
    uint32_t words[2][kLanes][6];  // what the lanes of a warp operation hold; the next operation uses the other half
};

inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline Barrier block_barrier;
inline ucontext_t scheduler;
inline uint32_t current;
inline std::function<void()> body;

inline void wait(Barrier& barrier, uint32_t members) {
    const uint32_t generation = barrier.passed;
    if (++barrier.arrived == members) {
        barrier.arrived = 0;
        ++barrier.passed;
        return;
    }
    while (barrier.passed == generation) swapcontext(&fibres[current].context, &scheduler);
}

// This lane's words and everyone's: all lanes take part, as a full mask promises.
template <std::size_t N>
inline const uint32_t (*collect(const uint32_t (&words)[N]))[6] {
    Warp& warp = warps[current / kLanes];
    const uint32_t half = fibres[current].collectives++ % 2;
    std::copy(words, words + N, warp.words[half][current % kLanes]);
    wait(warp.barrier, kLanes);
    return warp.words[half];
}

inline void run_fibre() {
    body();
    fibres[current].done = true;
}

// One block: its threads by turns, each until it waits; a turn of all without an arrival anywhere is a deadlock.
inline void run_block(uint32_t threads, bool descending) {
    for (uint32_t i = 0; i < threads; ++i) {
        Fibre& fibre = fibres[i];
        fibre.done = false;
        fibre.collectives = 0;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = fibre.stack.size();
        fibre.context.uc_link = &scheduler;
        makecontext(&fibre.context, run_fibre, 0);
    }
    block_barrier = {};
    for (Warp& warp : warps) warp.barrier = {};
    const auto progress = [&] {
        uint64_t sum = block_barrier.arrived + block_barrier.passed * uint64_t{threads + 1};
        for (const Warp& warp : warps) sum += warp.barrier.arrived + warp.barrier.passed * uint64_t{kLanes + 1};
        for (const Fibre& fibre : fibres) sum += fibre.done;
        return sum;
    };
    for (uint32_t left = threads; left;) {
        const uint64_t before = progress();
        left = 0;
        for (uint32_t i = 0; i < threads; ++i) {
            current = descending ? threads - 1 - i : i;
            if (fibres[current].done) continue;
            threadIdx = {current, 0, 0};
            swapcontext(&scheduler, &fibres[current].context);
            left += !fibres[current].done;
        }
        if (left && progress() == before) {
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

inline float exchange(float x, int lane_mask) {
    uint32_t bits[1];
    __builtin_memcpy(bits, &x, 4);
    return host::as_float(host::collect(bits)[(host::current % host::kLanes) ^ lane_mask][0]);
}

// The fragments' places as PTX defines them, element by element; see device.cuh.
inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const auto lanes = host::collect({a0, a1, a2, a3, b0, b1});
    const auto element = [&](int lane, int word, int odd) {
        const uint32_t pair = lanes[lane][word];
        return host::as_float(odd ? pair & 0xFFFF0000u : pair << 16);
    };
    const int lane = host::current % host::kLanes;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int t = k % 8 / 2;
            d[i] += element(row % 8 * 4 + t, row / 8 + k / 8 * 2, k % 2) * element(column * 4 + t, 4 + k / 8, k % 2);
        }
    }
}

}  // namespace redraft
