"""Both backends draw what the reference loop draws from the module's own logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from redraft.engines import load_engine
from redraft.engines.interface import DraftBatch, DraftDraws, DraftSampling, DrawingEngine, Engine
from tests.engines.draws import LEVELS, SUPPORT, assert_same_draws, draft_batch, expected_draws, sampling_of
from tests.engines.test_openvino import tiny_drafter_as_stored
from tests.engines.tiny import tiny_bundle, tiny_target


def drawing_engine(folder, construction: str, **options) -> Engine:
    plan = {"levels": LEVELS[construction], "support": SUPPORT, "construction": construction, "ngram": False}
    return load_engine(tiny_bundle(folder, tiny_target(), **options, **plan))


@pytest.fixture(scope="module", params=LEVELS)
def drawing(request, tmp_path_factory) -> tuple[str, Engine]:
    return request.param, drawing_engine(tmp_path_factory.mktemp(request.param), request.param)


def draw(engine: Engine, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
    assert isinstance(engine, DrawingEngine)
    return DraftDraws(*(array.copy() for array in vars(engine.draw(batch, sampling)).values()))


def rows(batch: DraftBatch, sampling: DraftSampling, chosen: list[int]) -> tuple[DraftBatch, DraftSampling]:
    part = DraftSampling(*(array[chosen] for array in vars(sampling).values()))
    return DraftBatch.of_roots(batch.hidden[chosen], batch.tokens[chosen]), part


@pytest.mark.parametrize("size", [1, 3, 7])
def test_draws_are_those_of_the_module(drawing, size):
    construction, engine = drawing
    batch, sampling = draft_batch(size), sampling_of(construction, size)
    expected = expected_draws(tiny_drafter_as_stored(tiny_target()), construction, batch, sampling)
    assert_same_draws(draw(engine, batch, sampling), expected)


@pytest.mark.parametrize("construction", LEVELS)
def test_the_torch_backend_draws_the_same(construction, tmp_path):
    engine = drawing_engine(tmp_path, construction, backend="torch")
    batch, sampling = draft_batch(7), sampling_of(construction, 7)
    drawn = draw(engine, batch, sampling)
    assert_same_draws(drawn, expected_draws(tiny_drafter_as_stored(tiny_target()), construction, batch, sampling))
    alone = draw(engine, *rows(batch, sampling, [1]))
    np.testing.assert_array_equal(alone.draws[0], drawn.draws[1])


def assert_same_alone(construction: str, engine: Engine) -> None:
    batch, sampling = draft_batch(7), sampling_of(construction, 7)
    together = draw(engine, batch, sampling)
    for chosen in ([1], [2, 0], [6, 3, 3, 5, 1]):
        some = draw(engine, *rows(batch, sampling, chosen))
        for array, whole in zip(vars(some).values(), vars(together).values(), strict=True):
            np.testing.assert_array_equal(array, whole[chosen], strict=True)


def test_a_draw_in_a_batch_has_the_bits_of_the_one_alone(drawing):
    assert_same_alone(*drawing)


def test_a_draw_of_rounded_weights_has_them_too(tmp_path):
    assert_same_alone("stochastic_beam", drawing_engine(tmp_path, "stochastic_beam", precision="bf16"))


def test_what_does_not_fit_is_refused(drawing, fp32_bundle):
    construction, engine = drawing
    batch, sampling = draft_batch(3), sampling_of(construction, 3)
    with pytest.raises(ValueError, match=r"shape of noise is \(2, .*: expected \(3, "):
        engine.draw(batch, sampling_of(construction, 2))
    with pytest.raises(ValueError, match=r"shape of noise is \(3, \d+, 6\): expected \(3, \d+, 7\)"):
        engine.draw(batch, dataclasses.replace(sampling, noise=sampling.noise[:, :, :6]))
    with pytest.raises(RuntimeError, match="draws at random: it gives no candidates"):
        engine.draft(batch)
    with pytest.raises(RuntimeError, match="no drafter that draws at random"):
        load_engine(fp32_bundle).draw(batch, sampling)
