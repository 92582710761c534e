#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace redraft {

namespace avx2 {
extern const Kernels table;
}
namespace avxvnni {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace avx512vnni {
extern const Kernels table;
}
namespace avx512bf16 {
extern const Kernels table;
}
namespace amx {
extern const Kernels table;
}

namespace {

// Linux lets a process use tile registers once it has asked for them.
bool tiles_granted() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool supported(const Kernels& k) {
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (&k == &avx2::table) return avx2;
    if (&k == &avxvnni::table) return avx2 && __builtin_cpu_supports("avxvnni");
    if (&k == &avx512::table) return avx512;
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (&k == &avx512vnni::table) return vnni;
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    if (&k == &avx512bf16::table) return bf16;
    return bf16 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && tiles_granted();
}

constexpr const Kernels* kTables[] = {&amx::table, &avx512bf16::table, &avx512vnni::table, &avx512::table,
                                      &avxvnni::table, &avx2::table};

const Kernels* find(const char* name) {
    for (const Kernels* table : kTables) {
        if (name && std::string(name) != table->isa) continue;
        if (supported(*table)) return table;
        if (name) throw std::invalid_argument("REDRAFT_ISA=" + std::string(name) + ": this machine lacks it");
    }
    if (name)
        throw std::invalid_argument("REDRAFT_ISA=" + std::string(name) +
                                    ": expected avx2, avxvnni, avx512, avx512vnni, avx512bf16 or amx");
    throw std::invalid_argument("this machine's CPU lacks AVX2 and FMA, which the operators need");
}

std::atomic<const Kernels*> g_kernels{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* k = g_kernels.load(std::memory_order_acquire);
    if (!k) {
        k = find(std::getenv("REDRAFT_ISA"));
        g_kernels.store(k, std::memory_order_release);
    }
    return *k;
}

void select_isa(const char* name) { g_kernels.store(find(name), std::memory_order_release); }

}  // namespace redraft
