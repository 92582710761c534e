"""Random numbers of a request, keyed by its seed and the output position: the noise that its draws share with drafters,
and coins for verifiers that accept by chance.

A position's draw is a race (the exponential form of Gumbel-max): token t arrives at e / weight, with e standard
exponential noise of its own, and the first one wins, which a token does with a chance proportional to its weight. With
g = -log e, standard Gumbel noise, that is the largest log-weight + g. `plugins/noise.h` has the same noise for CPU and
GPU kernels, bit for bit: a position may be drawn on the host or on the device, and drafters guess with its noise.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

_MASK32 = 0xFFFFFFFF
_TOKEN_NOISE = 0x80000000
"""Last counter word of the token noise; that of the coins is 0."""
_NEAR = np.uint32(0x55555555)
"""2^32 / 3: words below give u < 1/3."""
_TWO_THIRDS = np.int32(0x3F2AAAAB)
"""The bits of 2/3 as float32."""
_LOG2 = np.float32(0.69314718)
_LOG1P = np.array(
    [-0.50000001, 0.33333208, -0.24999718, 0.20010748, -0.16682303, 0.14001159, -0.12167195, 0.14004765, -0.12948794],
    np.float32,
)
"""Coefficients of Q in log(1 + f) = f + f² Q(f) for |f| <= 1/3, fitted to the least relative error of the logarithm."""

Words = TypeVar("Words", int, np.ndarray)
"""One, or uint64 [...]."""


def philox(key: Words, c0: Words, c1: Words, c2: Words, c3: Words) -> tuple[Words, Words, Words, Words]:
    """Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four independent uniform
    32-bit words from a 64-bit key and a counter of four 32-bit words."""
    k0, k1 = key & _MASK32, key >> 32 & _MASK32
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK32, (low >> 32) ^ c3 ^ k1, low & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def coin(seed: int, position: int, number: int) -> float:
    """A uniform in [0, 1), 53 bits, of one output position (below 2^32); `number` counts a position's coins."""
    high, low, _, _ = philox(seed, position, 0, number, 0)
    return ((high << 21) | (low >> 11)) * 2.0**-53


def race(seeds: int | np.ndarray, positions: int | np.ndarray, tokens: int | np.ndarray) -> np.ndarray:
    """Exponential noise float32 [...] of tokens at output positions, from integers [...] that broadcast: 64-bit seeds,
    positions and tokens of at most 32 bits."""
    words_in: list[np.ndarray] = [np.asarray(values).astype(np.uint64) for values in (seeds, positions, tokens)]
    (keys, counters, ids), (none, last) = words_in, np.array([0, _TOKEN_NOISE], np.uint64)
    words = philox(keys, counters, ids >> 2, none, last)
    return exponential(np.choose((ids & 3).astype(np.intp), words).astype(np.uint32))


def exponential(words: np.ndarray) -> np.ndarray:
    """e = -log(1 - u) float32 for u = (w + 0.5) 2^-32, from words uint32 [...]; off by at most 2e-7 of itself, so the
    least noise, on which a race over many tokens turns, is as precise as the largest.

    Every step rounds once, in this order, so that other implementations can give the same bits. Near 0 the logarithm is
    of 1 + f with f = -u. Elsewhere 1 - u is (1 + f) / 2^n with -1/3 <= f <= 1/3.
    """
    near = words < _NEAR
    x = np.where(near, words, ~words).astype(np.float32) + np.float32(0.5)
    bits = x.view(np.int32)
    exponents = (bits - _TWO_THIRDS) >> 23
    f = np.where(near, x * np.float32(-(2.0**-32)), (bits - (exponents << 23)).view(np.float32) - np.float32(1))
    halvings = np.where(near, 0, 32 - exponents).astype(np.float32)
    q = np.full_like(f, _LOG1P[-1])
    for coefficient in _LOG1P[-2::-1]:
        q = q * f + coefficient
    return halvings * _LOG2 - (f + f * f * q)
