#include "exchange.h"

#include <immintrin.h>
#include <sched.h>

#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../cpu/check.h"

namespace redraft {
namespace {

using Clock = std::chrono::steady_clock;
// A rank that waits looks without rest for so long, then lets others have its core, then sleeps between looks.
constexpr std::chrono::microseconds kSpin(50), kYield(1000), kNap(50);

Ranks g_ranks{nullptr, nullptr, 0, 0, 1};
Clock::duration g_exchanging{};
std::vector<float> g_gathered;

void expect_success(const char* call, int code) {
    if (code) throw std::runtime_error(std::string(call) + " failed with MPI error " + std::to_string(code));
}

void all_gather(const float* x, int elements, float* all) {
    alignas(8) char request[16] = {}, status[128];
    const auto start = Clock::now();
    expect_success("MPI_Iallgather", g_ranks.iallgather(x, elements, g_ranks.float_type, all, elements,
                                                        g_ranks.float_type, g_ranks.communicator, request));
    for (int done = 0;;) {
        expect_success("MPI_Test", g_ranks.test(request, &done, status));
        if (done) break;
        const auto waited = Clock::now() - start;
        if (waited < kSpin)
            _mm_pause();
        else if (waited < kYield)
            sched_yield();
        else
            std::this_thread::sleep_for(kNap);
    }
    g_exchanging += Clock::now() - start;
}

}  // namespace

void connect_ranks(const Ranks& ranks) { g_ranks = ranks; }

int64_t rank_count() { return g_ranks.count; }

void all_reduce(const float* x, int64_t elements, float* out) {
    if (elements > INT_MAX)
        throw std::invalid_argument("elements " + std::to_string(elements) + ": expected what MPI can count");
    const float* gathered = x;
    if (g_ranks.count > 1) {
        const std::size_t needed = static_cast<std::size_t>(elements * g_ranks.count);
        if (g_gathered.size() < needed) g_gathered.resize(needed);
        all_gather(x, static_cast<int>(elements), g_gathered.data());
        gathered = g_gathered.data();
    }
    run_kernel(SumRanksArgs{gathered, g_ranks.count, elements, out});
}

double take_exchange_seconds() {
    return std::chrono::duration<double>(std::exchange(g_exchanging, Clock::duration{})).count();
}

}  // namespace redraft
