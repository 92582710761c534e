// Launches kernels, as g++ compiles them with sanitizers, on the cases that it reads from its input: for each the name
// of the entry, grid, threads, and arguments, which are int32 or tensors. A tensor has memory of its own, of just its
// size; one that repeats an earlier argument is that argument's memory.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr uint32_t kInt = 0, kTensor = 1, kRepeated = 2;

bool read(void* to, std::size_t size) { return !size || std::fread(to, size, 1, stdin) == 1; }

uint32_t number() {
    uint32_t value = 0;
    if (!read(&value, sizeof value)) std::exit(3);
    return value;
}

}  // namespace

int main() {
    uint32_t length;
    for (int number_of_case = 0; read(&length, sizeof length); ++number_of_case) {
        std::fprintf(stderr, "case %d\n", number_of_case);
        std::string name(length, '\0');
        if (!read(name.data(), length)) return 3;
        using Launch = void (*)(const uint32_t*, uint32_t, int, void**);
        const auto launch = reinterpret_cast<Launch>(dlsym(RTLD_DEFAULT, name.c_str()));
        if (!launch) return 4;
        uint32_t grid[3];
        for (uint32_t& size : grid) size = number();
        const uint32_t threads = number(), count = number();
        std::vector<std::unique_ptr<char[]>> memory;
        std::vector<void*> values(count);
        std::vector<void*> arguments(count);
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t kind = number(), size = number();  // of an int32 its value, of a repeated tensor which it is
            if (kind == kTensor) {
                memory.push_back(std::make_unique<char[]>(size));
                if (!read(memory.back().get(), size)) return 3;
                values[i] = memory.back().get();
            } else if (kind == kRepeated) {
                values[i] = values[size];
            } else {
                values[i] = reinterpret_cast<void*>(static_cast<uintptr_t>(size));
            }
            arguments[i] = &values[i];
        }
        launch(grid, threads, 0, arguments.data());
    }
}
