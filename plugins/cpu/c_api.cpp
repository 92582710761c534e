// The kernels without OpenVINO, for tests and measurements (plugins/kernels.py). Every function returns
// null, or a message that is valid until the thread's next call.
#include "../operators/all_reduce/exchange.h"
#include "check.h"
#include "failure.h"
#include "guarded.h"
#include "pool.h"

using namespace redraft;

extern "C" {

const char* redraft_set_threads(int count) {
    return guarded([&] { set_thread_count(count); });
}
const char* redraft_take_failure() {
    static thread_local std::string message;
    message = take_failure();
    return message.empty() ? nullptr : message.c_str();
}
int redraft_threads() { return thread_count(); }
const char* redraft_select_isa(const char* name) {
    return guarded([&] { select_isa(name); });
}
const char* redraft_isa() { return kernels().isa; }
const char* redraft_connect_ranks(void* iallgather, void* test, uintptr_t communicator, uintptr_t float_type, int count) {
    return guarded([&] {
        connect_ranks({reinterpret_cast<decltype(Ranks::iallgather)>(iallgather),
                       reinterpret_cast<decltype(Ranks::test)>(test), communicator, float_type, count});
    });
}
const char* redraft_all_reduce(const float* x, int64_t elements, float* out) {
    return guarded([&] { all_reduce(x, elements, out); });
}
int redraft_ranks() { return static_cast<int>(rank_count()); }
double redraft_take_exchange_seconds() { return take_exchange_seconds(); }

#define REDRAFT_C_KERNEL(name, Args) \
    const char* redraft_##name(const Args* args) { return guarded([&] { run_kernel(*args); }); }
REDRAFT_KERNELS(REDRAFT_C_KERNEL)
}
