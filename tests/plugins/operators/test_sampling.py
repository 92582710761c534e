"""Draws of tokens: every instruction set against the reference, and one noise for numpy, g++ and nvcc."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess

import numpy as np
import pytest
import torch

from redraft.decoding.noise import exponential, race
from redraft.plugins import kernels
from redraft.plugins.cuda import compile, launch
from redraft.plugins.library import FLAGS, INSTRUCTION_SETS, PLUGINS
from redraft.plugins.operators.sampling import cuda
from redraft.plugins.operators.sampling.cpu import TokenDraws
from redraft.plugins.operators.sampling.reference import support, winner

SIZES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 111, 513, 2049, 2111]
KEYS = 10**6
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PROGRAM = """
#include "{plugins}/cpu/token_noise.h"
using namespace redraft;
extern "C" void one_by_one(const uint64_t* seeds, const uint32_t* positions, const uint32_t* tokens, int64_t n,
                           float* out) {{
    for (int64_t i = 0; i < n; ++i) out[i] = noise::race(seeds[i], positions[i], tokens[i]);
}}
extern "C" void logarithms(const uint32_t* words, int64_t n, float* out) {{
    for (int64_t i = 0; i < n; ++i) out[i] = noise::exponential(words[i]);
}}
extern "C" void many(uint64_t seed, uint32_t position, const int32_t* tokens, int64_t n, float* out) {{
    REDRAFT_ISA_NAMESPACE::TokenNoise(seed, position).of_tokens(tokens, n, out);
}}
"""
DEVICE = """
#include "{plugins}/noise.h"
extern "C" __global__ void one_by_one(const uint64_t* seeds, const int* tokens, float* out) {{
    out[threadIdx.x] = redraft::noise::race(seeds[threadIdx.x], 7, tokens[threadIdx.x]);
}}
"""


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(params=["avx2", "avx512"])
def noise(request, tmp_path):
    """The C++ noise, compiled as the kernels of an instruction set are."""
    try:
        kernels.select_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    finally:
        kernels.select_isa(os.environ.get("REDRAFT_ISA"))
    source, library = tmp_path / "noise.cpp", tmp_path / "noise.so"
    source.write_text(PROGRAM.format(plugins=PLUGINS))
    flags = [*FLAGS, *INSTRUCTION_SETS[request.param], f"-DREDRAFT_ISA_NAMESPACE={request.param}", "-shared"]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def test_noise_in_cpp_has_the_bits_of_numpys(noise):
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, KEYS, np.uint64)
    positions, tokens, words = (rng.integers(0, 2**32, KEYS, np.uint32) for _ in range(3))
    words[:4] = 0, 2**32 - 1, 0x55555554, 0x55555555
    found = np.empty(KEYS, np.float32)
    noise.one_by_one(address(seeds), address(positions), address(tokens), ctypes.c_int64(KEYS), address(found))
    np.testing.assert_array_equal(found.view(np.uint32), race(seeds, positions, tokens).view(np.uint32))
    noise.logarithms(address(words), ctypes.c_int64(KEYS), address(found))
    np.testing.assert_array_equal(found.view(np.uint32), exponential(words).view(np.uint32))
    some = rng.integers(0, 2**31, 1001).astype(np.int32)
    for seed, position, n in ((2**64 - 1, 2**32 - 1, 1001), (5, 0, 64), (0, 3, 7)):
        at = ctypes.c_uint64(seed), ctypes.c_uint32(position)
        noise.many(*at, address(some), ctypes.c_int64(n), address(found))
        np.testing.assert_array_equal(found[:n].view(np.uint32), race(seed, position, some[:n]).view(np.uint32))


def test_noise_on_a_gpu_rounds_every_operation_by_itself(tmp_path):
    """Nothing in nvcc's code is fused, and no product or sum is approximate or flushes small numbers."""
    source = tmp_path / "noise.cu"
    source.write_text(DEVICE.format(plugins=PLUGINS))
    output = tmp_path / "noise.ptx"
    subprocess.run(
        [str(compile.nvcc()), *compile.FLAGS, str(source), "-ptx", "-arch=sm_90", "-o", str(output)], check=True
    )
    floats = set(re.findall(r"\b([a-z0-9.]+\.f32(?:\.\w+)?)\b", output.read_text()))
    assert {"mul.rn.f32", "add.rn.f32"} <= floats
    assert floats <= {"mul.rn.f32", "add.rn.f32", "neg.f32", "cvt.rn.f32.s32", "ld.global.f32", "st.global.f32"} | {
        one for one in floats if one.startswith(("mov", "selp"))
    }


def draws(rng: np.random.Generator, size: int) -> tuple[np.ndarray, dict]:
    """Logits with and without ties and forbidden tokens, and settings."""
    logits = (rng.standard_normal(size) * rng.choice([0.01, 1, 4])).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    if size > 2 and rng.random() < 0.3:
        logits[rng.integers(0, size, size // 2)] = -np.inf
    settings = {
        "inverse_temperature": float(np.float32(1 / rng.choice([0.01, 0.5, 1, 3]))),
        "top_k": int(rng.choice([0, 0, 1, 2, 7, 40, 500])),
        "top_p": float(rng.choice([1, 1, 0.9, 0.5, 1e-6, 0.999])),
    }
    return logits, settings


@pytest.mark.parametrize("size", SIZES)
def test_draws_are_the_references(isa, size):
    """The tokens that filters keep, their weights, and the first of the race: from logits, and from weights given with
    ids or for all tokens."""
    rng = np.random.default_rng(size)
    for _ in range(60):
        logits, settings = draws(rng, size)
        seed, position = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 2**32))
        made = TokenDraws(seed, **settings)
        found, weights, total = made.distribution(logits)
        ids, expected = support(logits, **settings)
        np.testing.assert_array_equal(np.arange(size) if found is None else found, ids)
        np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-37)
        assert total == pytest.approx(expected.sum(dtype=np.float64), rel=1e-5)
        token = winner(ids, weights, race(seed, position, ids))
        assert made.race(ids.astype(np.int32), weights, position) == made.choose(logits, position) == token
        if found is None:
            assert made.race(None, weights, position) == token


@pytest.mark.parametrize("top_k", [0, 40, 2000])
def test_a_large_vocabulary(isa, top_k):
    """More candidates than groups of tokens, and flat logits, which tie."""
    logits = np.random.default_rng(0).standard_normal(49_153).astype(np.float32)
    for values, top_p in ((logits, 1.0), (logits, 0.9), (np.zeros_like(logits), 0.7)):
        ids, _ = support(values, 1.0, top_k, top_p)
        made = TokenDraws(7, 1.0, top_k, top_p)
        found, weights, _ = made.distribution(values)
        found = np.arange(len(values)) if found is None else found
        assert len(np.setxor1d(found, ids)) <= 1, "at top-p's edge sums may round otherwise"
        for position in range(5):
            assert made.choose(values, position) == winner(found, weights, race(7, position, found))


def test_of_tokens_that_tie_the_lowest_is_drawn(isa):
    """Weights that are the noise let all arrive at 1, in the ids' order and over groups of tokens."""
    ids = np.arange(3, 283, 4, dtype=np.int32)
    made, noise = TokenDraws(3, 1.0, 0, 1.0), race(3, 5, np.arange(283))
    assert made.race(ids, noise[ids], 5) == 3
    assert made.race(None, noise, 5) == 0
    noise[:40] *= 0.5
    assert made.race(None, noise, 5) == 40


def test_bad_arguments_are_named():
    one = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=r"position 4294967296: expected 0 to 2\^32 - 1"):
        TokenDraws(0, 1.0, 0, 1.0).choose(one, 2**32)
    with pytest.raises(ValueError, match="vocabulary 0: expected 1"):
        TokenDraws(0, 1.0, 0, 1.0).choose(one[:0], 0)
    with pytest.raises(ValueError, match="count 0: expected at least 1"):
        TokenDraws(0, 1.0, 0, 1.0).race(None, one[:0], 0)
    with pytest.raises(ValueError, match="top_k -1: expected at least 0"):
        TokenDraws(0, 1.0, -1, 1.0).choose(one, 0)


@pytest.mark.parametrize(
    ("device", "keys"), [("cpu", 600), pytest.param("cuda", KEYS, marks=[pytest.mark.gpu, NO_GPU])]
)
def test_the_cuda_kernel_makes_the_noise_of_numpy(device, keys):
    """Bit for bit: a token of weight 1 arrives at its noise. The keys are any seeds and positions."""
    rng, most, ids = np.random.default_rng(3), 50_000, np.arange(5)
    for begin in range(0, keys, most):
        rows = min(keys - begin, most)
        seeds, positions = rng.integers(0, 2**64, (rows, 1), np.uint64), rng.integers(0, 2**32, (rows, 1), np.uint32)
        words = np.concatenate([seeds.view(np.uint32), positions], axis=1).view(np.int32)
        limits = torch.zeros(rows, 4, dtype=torch.int32)
        given = (torch.zeros(rows, len(ids)), torch.zeros(rows), torch.ones(rows), torch.from_numpy(words), limits)
        times, tokens = (found.cpu().numpy() for found in launch.run(cuda.RACE, [one.to(device) for one in given], {}))
        noise = race(seeds, positions, ids)
        np.testing.assert_array_equal(times[:, 0].view(np.uint32), noise.min(axis=1).view(np.uint32))
        np.testing.assert_array_equal(tokens[:, 0], noise.argmin(axis=1))


def kept_by(limits: np.ndarray, logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The ids that limits int32 [4] keep of logits and weights float32 [V]."""
    bits = (logits + np.float32(0)).view(np.uint32)
    kept, ids = np.ones(len(logits), bool), np.arange(len(logits))
    logit_keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    for keys, (least, last) in zip((logit_keys, weights.view(np.uint32) << 2), limits.reshape(2, 2), strict=True):
        kept &= (keys > least.view(np.uint32)) | ((keys == least.view(np.uint32)) & (ids <= last))
    return ids[kept]


@pytest.mark.parametrize("size", [1, 2, 111, 1031, 2 * cuda.PART + 3])
def test_the_cuda_kernel_keeps_what_the_reference_keeps(size, run_kernel):
    """Top-k, top-p and both, of logits that differ, tie, are all equal or are forbidden; blocks and threads in both
    orders. Ids of equal logits need two passes beyond 2048 tokens."""
    rng, expf = np.random.default_rng(size), ctypes.CDLL("libm.so.6").expf
    expf.restype, expf.argtypes = ctypes.c_float, [ctypes.c_float]
    rows = [draws(rng, size) for _ in range(50)]
    flat = {"inverse_temperature": 1.0, "top_k": max(size - 5, 0), "top_p": 0.7}
    rows += [(np.zeros(size, np.float32), flat | kept) for kept in ({}, {"top_k": 0}, {"top_p": 1.0})]
    logits = np.stack([row for row, _ in rows])
    logits[logits == 0] *= rng.choice([-1, 1], (logits == 0).sum())
    scales, top_k, top_p = (
        np.array([settings[name] for _, settings in rows], dtype)
        for name, dtype in (("inverse_temperature", np.float32), ("top_k", np.int32), ("top_p", np.float64))
    )
    filters = np.concatenate([top_k[:, None], top_p[:, None].view(np.int32)], axis=1)
    given = [torch.from_numpy(one) for one in (logits, logits.max(axis=1), scales, filters)]
    limits = run_kernel(cuda.FILTER, given, {})[0].numpy()
    for row, (own, (_, settings)) in enumerate(zip(logits, rows, strict=True)):
        weights = np.array([expf(x) for x in (own - own.max()) * scales[row]], np.float32)
        found, expected = kept_by(limits[row], own, weights), support(own, **settings)[0]
        np.testing.assert_array_equal(found, expected, f"row {row}: {settings}")


def test_a_vocabulary_beyond_the_kernels_sums_is_refused():
    with pytest.raises(ValueError, match="vocabulary 4194304: expected at most 4194303; draw on the host"):
        cuda.race(torch.zeros(0, cuda.MOST_TOKENS + 1), torch.zeros(0), torch.zeros(0, 3, dtype=torch.int32))


@pytest.mark.parametrize("vocabulary", [1, 5, cuda.PART - 1, 2 * cuda.PART + 3])
def test_the_cuda_kernel_draws_the_references_tokens(vocabulary, run_kernel, monkeypatch):
    """Rows that share a key and rows that do not, among them neighbours of one seed or one position; blocks and threads
    in both orders."""
    monkeypatch.setattr(cuda, "run", run_kernel)
    rng = np.random.default_rng(vocabulary)
    keys = [(5, 1), (5, 1), (5, 2), (5 + 2**32, 2), (5 + 2**32, 2), (5 + 2**32, 2), (9, 2**31 + 5), (5, 1)]
    logits = (3 * rng.standard_normal((len(keys), vocabulary))).astype(np.float32)
    logits[2, 1:] = -np.inf
    logits[3] = np.round(logits[3])
    scales = rng.choice([0.5, 1, 2], len(keys)).astype(np.float32)
    words = np.array([(seed & 0xFFFFFFFF, seed >> 32, position) for seed, position in keys], np.uint32)
    found = cuda.race(*map(torch.from_numpy, (logits, scales, words.view(np.int32))))
    expected = []
    for (seed, position), row, scale in zip(keys, logits, scales, strict=True):
        ids, weights = support(row, scale, 0, 1.0)
        expected.append(winner(ids, weights, race(seed, position, ids)))
    assert found.tolist() == expected
