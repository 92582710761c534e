"""What drafters are given of a batch's sequences: where to draft from, filters, and the noise of the next tokens."""

from __future__ import annotations

import numpy as np

from redraft.batch import DraftBatch, SharedNoise
from redraft.decoding.scores import Scores, scores_at
from redraft.drafting.groups import Group
from redraft.engines.features import join
from redraft.request import SamplingConfig
from redraft.request_state import RequestState


def roots_of(sequences: list[RequestState]) -> np.ndarray:
    """The last certain token of each sequence, int32 [B]."""
    return np.array([sequence.root for sequence in sequences], dtype=np.int32)


def draft_batch(sequences: list[RequestState], roots: np.ndarray) -> DraftBatch:
    """Where sequences draft from; a drafter with a context ingests their pairs with this draft."""
    pairs = [sequence.pairs for sequence in sequences if sequence.pairs is not None]
    if not pairs:
        rows = [sequence.features for sequence in sequences if sequence.features is not None]
        return DraftBatch.of_roots(join(rows), roots)
    cache_lengths = [pair.ingested for pair in pairs]  # before `take` counts those that it hands over
    features, tokens = zip(*(pair.take() for pair in pairs), strict=True)
    return DraftBatch(
        features=join([rows for parts in features for rows in parts]),
        tokens=np.array([token for part in tokens for token in part], np.int32),
        row_offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        slots=np.array([sequence.slot for sequence in sequences], np.int32),
        cache_lengths=np.array(cache_lengths, np.int32),
    )


def scores_of(fitted: tuple[Scores, ...], sequences: Group) -> list[Scores]:
    """How each sequence's nodes are scored: a batch's greedy and sampled trees compete by their scores."""
    scores = {temperature: scores_at(fitted, temperature) for temperature in set(sequences.temperatures)}
    return [scores[temperature] for temperature in sequences.temperatures]


def sampling_filters(samplings: list[SamplingConfig]) -> dict[str, np.ndarray]:
    """The requests' temperature float32, top-k int32 and top-p float32 [B] by name."""
    temperature, top_k, top_p = zip(*map(_filter, samplings), strict=True)
    return {
        "temperature": np.array(temperature, np.float32),
        "top_k": np.array(top_k, np.int32),
        "top_p": np.array(top_p, np.float32),
    }


def _filter(config: SamplingConfig) -> tuple[float, int, float]:
    if config.greedy:
        return 0.0, 0, 1.0
    return config.divisor, config.top_k or 0, config.top_p or 1.0


def next_noise(sequences: Group, scores: list[Scores]) -> SharedNoise | None:
    """The noise that the target will choose each sequence's next tokens by; None where all are greedy.

    It is added to log-probabilities at the drafter's temperature, which is the request's own over a fitted slope. The
    slope is 1 where top-p cuts tokens, since another one would move the cut.
    """
    if sequences.greedy:
        return None
    samplers = sequences.samplers
    filters = sampling_filters([sequence.request.sampling for sequence in sequences])
    top_p, temperatures = filters["top_p"].tolist(), filters["temperature"].tolist()
    slopes = [1.0 if share < 1 else score.slope for score, share in zip(scores, top_p, strict=True)]
    betas = [score.beta(temperature) for score, temperature in zip(scores, temperatures, strict=True)]
    return SharedNoise(
        seeds=np.array([sampler.seed for sampler in samplers], np.uint64),
        positions=np.array([sampler.position for sampler in samplers], np.int32),
        sharpness=np.array(betas, np.float32),
        **filters | {"temperature": filters["temperature"] / np.array(slopes, np.float32)},
    )
