// The noise that a target's draws share with drafters, for host and device: redraft/decoding/noise.py has the definition,
// and numpy, g++ and nvcc give the same bits. So nothing here may be fused, reordered or replaced by a library's logarithm:
// the CPU library is compiled with -ffp-contract=off, and device code asks for single roundings.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define REDRAFT_NOISE __host__ __device__ inline
#else
#define REDRAFT_NOISE static inline  // a copy for each instruction set
#endif

namespace redraft::noise {

constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier2 = 0xCD9E8D57u;
constexpr uint32_t kKeyStep0 = 0x9E3779B9u, kKeyStep1 = 0xBB67AE85u;
constexpr int kRounds = 10;
constexpr uint32_t kTokenNoise = 0x80000000u;  // last counter word of the token noise

struct Words {
    uint32_t x[4];
};

// Philox-4x32-10.
REDRAFT_NOISE Words philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < kRounds; ++round) {
        const uint64_t low = uint64_t{kMultiplier0} * c0, high = uint64_t{kMultiplier2} * c2;
        c0 = static_cast<uint32_t>(high >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(high);
        c2 = static_cast<uint32_t>(low >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(low);
        k0 += kKeyStep0;
        k1 += kKeyStep1;
    }
    return {{c0, c1, c2, c3}};
}

// The words of the tokens 4 block, ..., 4 block + 3 at an output position.
REDRAFT_NOISE Words token_words(uint64_t seed, uint32_t position, uint32_t block) {
    return philox(seed, position, block, 0, kTokenNoise);
}

// A product and a sum, each rounded once.
REDRAFT_NOISE float product(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}
REDRAFT_NOISE float sum(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

REDRAFT_NOISE uint32_t bits_of(float x) {
    union { float value; uint32_t bits; } u = {x};
    return u.bits;
}
REDRAFT_NOISE float of_bits(uint32_t bits) {
    union { uint32_t bits; float value; } u = {bits};
    return u.value;
}

// e = -log(1 - u) for u = (word + 0.5) 2^-32. Masks instead of branches: so g++ vectorizes a loop over it.
REDRAFT_NOISE float exponential(uint32_t word) {
    const uint32_t far = word < 0x55555555u ? 0u : ~0u;  // else u < 1/3, and the logarithm is of 1 + f with f = -u
    const int32_t high = static_cast<int32_t>((word ^ far) >> 16), low = static_cast<int32_t>((word ^ far) & 0xFFFFu);
    const float whole = sum(product(static_cast<float>(high), 65536.0f), static_cast<float>(low));  // word ^ far, rounded
    const float x = sum(whole, 0.5f), minus_u = product(x, -0x1p-32f);
    const uint32_t bits = bits_of(x);
    const int32_t exponent = static_cast<int32_t>(bits - 0x3F2AAAABu) >> 23;  // x = m 2^exponent, 2/3 <= m < 4/3
    const float beyond = sum(of_bits(bits - (static_cast<uint32_t>(exponent) << 23)), -1.0f);
    const float f = far ? beyond : minus_u;
    const float halvings = static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(32 - exponent) & far));
    float q = -0.12948794f;
    q = sum(product(q, f), 0.14004765f);
    q = sum(product(q, f), -0.12167195f);
    q = sum(product(q, f), 0.14001159f);
    q = sum(product(q, f), -0.16682303f);
    q = sum(product(q, f), 0.20010748f);
    q = sum(product(q, f), -0.24999718f);
    q = sum(product(q, f), 0.33333208f);
    q = sum(product(q, f), -0.50000001f);
    return sum(product(halvings, 0.69314718f), -sum(f, product(product(f, f), q)));
}

// Exponential noise of a token at an output position: of all tokens, the least noise / weight is drawn.
REDRAFT_NOISE float race(uint64_t seed, uint32_t position, uint32_t token) {
    return exponential(token_words(seed, position, token >> 2).x[token & 3]);
}

}  // namespace redraft::noise
