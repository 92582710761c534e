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
#ifdef __CUDACC__
REDRAFT_DEVICE uint32_t pair(float even, float odd) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(odd), "f"(even));
    return both;
}
#else
inline uint32_t rounded(float x) { return as_bits(x) + 0x7FFFu + (as_bits(x) >> 16 & 1u); }
inline uint32_t pair(float even, float odd) { return rounded(even) >> 16 | (rounded(odd) & 0xFFFF0000u); }
#endif

#ifdef __CUDACC__
REDRAFT_DEVICE uint32_t in_shared(const void* place) { return static_cast<uint32_t>(__cvta_generic_to_shared(place)); }
// d += a b for bf16 a [16, 16] and b [16, 8]. Lane 4 g + t holds of a: rows g, g + 8, g, g + 8 and columns 2 t, 2 t,
// 2 t + 8, 2 t + 8 (pairs); of b: rows 2 t and 2 t + 8 (pairs) of column g; of d: row g, columns 2 t and 2 t + 1, then
// row g + 8 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
REDRAFT_DEVICE void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Copies of 8 or 16 bytes into shared memory, in groups that end with end_copies. wait_copies waits for all but the
// `Later` newest groups of its thread, which then sees what it copied; others do after a barrier that follows.
template <class T>
REDRAFT_DEVICE void copy_async(T* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(in_shared(to)), "l"(from), "n"(sizeof(T)) : "memory");
}
REDRAFT_DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Later>
REDRAFT_DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(Later) : "memory"); }
// Four 8 x 8 matrices of bf16 in shared memory, of which lane 8 m + r names row r of matrix m. Lane 4 g + t gets of each
// the elements 2 t and 2 t + 1 of row g or, transposed, of column g (PTX ISA, "ldmatrix").
REDRAFT_DEVICE uint4 load_matrices(const uint4* row) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(in_shared(row))
                 : "memory");
    return x;
}
REDRAFT_DEVICE uint4 load_transposed(const uint4* row) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(in_shared(row))
                 : "memory");
    return x;
}
// 2^x within 2^-22 of it.
REDRAFT_DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
REDRAFT_DEVICE float exchange(float x, int lane_mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, lane_mask); }
REDRAFT_DEVICE float broadcast(float x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
REDRAFT_DEVICE void sync_warp() { __syncwarp(); }
REDRAFT_DEVICE int count_bits(uint32_t x) { return __popc(x); }
#endif

}  // namespace redraft
