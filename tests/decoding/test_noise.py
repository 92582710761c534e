"""The noise of draws: known answers, the laws of coins and token noise, and the precision of the logarithm."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.decoding.noise import coin, exponential, philox, race
from tests.decoding.laws import chi_square

MOST = 2**32 - 1


def test_philox_known_answers():
    assert philox(0, 0, 0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox(2**64 - 1, MOST, MOST, MOST, MOST) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("keys", ["positions", "seeds", "numbers"])
def test_coins_are_uniform_and_uncorrelated(keys):
    make = {
        "positions": lambda i: coin(5, i, 1),
        "seeds": lambda i: coin(i, 5, 1),
        "numbers": lambda i: coin(5, 3, i),
    }[keys]
    values = np.array([make(i) for i in range(20000)])
    assert chi_square(np.histogram(values, 50, (0, 1))[0], np.full(50, 400.0)) < 4.5
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert coin(5, 3, 1) == coin(5, 3, 1)


@pytest.mark.parametrize("keys", ["positions", "seeds", "tokens"])
def test_token_noise_is_exponential_and_uncorrelated(keys):
    """Noise of keys that follow each other, and of those 4 and 2^16 further."""
    some = np.arange(40000) + 2**31
    values = {
        "positions": lambda more: race(5, some + more, 7),
        "seeds": lambda more: race(some.astype(np.uint64) + np.uint64(2**63 + more), 5, 7),
        "tokens": lambda more: race(5, 3, some + more),
    }[keys]
    uniforms = -np.expm1(-values(0).astype(np.float64))
    assert chi_square(np.histogram(uniforms, 50, (0, 1))[0], np.full(50, 800.0)) < 4.5
    for more in (1, 4, 1 << 16):
        assert abs(np.corrcoef(values(0), values(more))[0, 1]) < 0.02


def test_keys_broadcast_and_one_token_has_the_noise_that_it_has_among_others():
    seeds, tokens = np.array([3, 2**64 - 1], np.uint64), np.array([0, 3, 4, 151_935], np.int32)
    noise = race(seeds[:, None], 9, tokens)
    assert (noise.shape, noise.dtype) == ((2, 4), np.float32)
    expected = [[race(int(seed), 9, int(token)) for token in tokens] for seed in seeds]
    np.testing.assert_array_equal(noise, expected)


def test_the_logarithm_is_precise_where_it_is_small_too():
    """The smallest words, the largest, around the seam, and all magnitudes between; in float64, which has all bits of
    u."""
    rng, seam = np.random.default_rng(0), 0x55555555
    spread = (2.0 ** rng.uniform(0, 32, 200_000)).astype(np.int64)
    few = np.arange(1 << 16)
    words = np.concatenate([few, MOST - few, seam + np.arange(-5000, 5000), spread, MOST - spread]).astype(np.uint32)
    exact = -np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32)
    assert np.abs(exponential(words) / exact - 1).max() < 2e-7
    assert exponential(np.array([0], np.uint32)) == np.float32(2.0**-33)
