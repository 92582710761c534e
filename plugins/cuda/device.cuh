// What the kernels are written in: warp operations and bf16, for nvcc, and through host_shim.cuh for g++.
#pragma once

#ifdef __CUDACC__
#include <cstdint>
#define REDRAFT_DEVICE __device__ __forceinline__
#else
#include "host_shim.cuh"
#define REDRAFT_DEVICE inline
#endif

namespace redraft {

REDRAFT_DEVICE float as_float(uint32_t bits) {
    union { uint32_t bits; float value; } u = {bits};
    return u.value;
}
REDRAFT_DEVICE uint32_t as_bits(float x) {
    union { float value; uint32_t bits; } u = {x};
    return u.bits;
}

// bf16 in pairs: the even element is a word's low half.
REDRAFT_DEVICE float low(uint32_t pair) { return as_float(pair << 16); }
REDRAFT_DEVICE float high(uint32_t pair) { return as_float(pair & 0xFFFF0000u); }
// Rounded to nearest even; values are finite.
REDRAFT_DEVICE uint32_t rounded(float x) { return as_bits(x) + 0x7FFFu + (as_bits(x) >> 16 & 1u); }
REDRAFT_DEVICE uint32_t pair(float even, float odd) { return rounded(even) >> 16 | (rounded(odd) & 0xFFFF0000u); }

REDRAFT_DEVICE uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xFFFFu) | b << 16; }
REDRAFT_DEVICE uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xFFFF0000u); }

#ifdef __CUDACC__
// d += a b for bf16 a [16, 16] and b [16, 8]. Lane 4 g + t holds of a: rows g, g + 8, g, g + 8 and columns 2 t, 2 t,
// 2 t + 8, 2 t + 8 (pairs); of b: rows 2 t and 2 t + 8 (pairs) of column g; of d: row g, columns 2 t and 2 t + 1, then
// row g + 8 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
REDRAFT_DEVICE void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
REDRAFT_DEVICE float exchange(float x, int lane_mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, lane_mask); }
REDRAFT_DEVICE void sync_warp() { __syncwarp(); }
REDRAFT_DEVICE int count_bits(uint32_t x) { return __popc(x); }
#endif

}  // namespace redraft
