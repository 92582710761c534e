"""What the protocol lets through can be served: no accepted sampling field breaks the step that it takes part in."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from redraft.decoding.sampling import Sampler
from redraft.request import SamplingConfig

VOCABULARY = 111
FLOATS = st.none() | st.floats(allow_nan=False, width=32) | st.sampled_from([1e-45, 1e-6, 1e6, 3.4e38, -1e6, -3.4e38])
FIELDS = st.fixed_dictionaries(
    {
        **dict.fromkeys(("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"), FLOATS),
        "top_p": st.none() | st.floats(0, 1, width=32),
        "top_k": st.none() | st.integers(-1, 2**31 - 1) | st.integers(-1, 5),
        "min_length": st.none() | st.integers(0, 3),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100)),
        "seed": st.integers(-1, 2**64 - 1),
    }
)


def test_minus_1_asks_for_no_limit_and_a_drawn_seed():
    """As in vLLM."""
    assert SamplingConfig(top_k=-1, seed=-1) == SamplingConfig(top_k=0)


@given(fields=FIELDS, scale=st.sampled_from([1.0, 30.0, 1e4]))
@settings(max_examples=300)
def test_whatever_is_accepted_can_be_sampled(fields, scale):
    try:
        config = SamplingConfig(**fields)
    except ValidationError:
        return
    sampler = Sampler(config, [1, 2, 2], end_ids={2}, bad_words=[[5], [6, 7]])
    noise = np.random.default_rng(0)
    for place in range(4):
        logits = noise.normal(scale=scale, size=VOCABULARY).astype(np.float32)
        token = sampler.choose(logits)
        assert 0 <= token < VOCABULARY
        assert token != 5
        assert token != 2 or place >= (config.min_length or 0)
        assert np.isclose(sampler.distribution(logits).at(np.arange(VOCABULARY)).sum(), 1)
        sampler.accept(token)
