// Hashes of tokens.
#pragma once

#include <cstdint>

namespace redraft {

// Another number for each number: the finalizer of splitmix64 (Steele, Lea and Flood, 2014).
inline uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

}  // namespace redraft
