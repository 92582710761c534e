"""Both backends draw what the reference loop draws from the module's own logits.

The slow cases would catch a construction, or a kind of drafter, whose draws differ on one backend.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnxruntime
import pytest

from redraft.batch import DraftBatch, DraftDraws, DraftSampling
from redraft.bundle.method import MethodConfig
from redraft.compiler.writers.tensorrt import save
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.verification import VERIFIERS
from redraft.engines import load_engine
from redraft.engines.api import DrawingEngine, Engine
from redraft.model_defs.export.drafter import export_drafter_native
from redraft.model_defs.loops.random_draws import RandomDraws
from tests.conftest import slow, slow_but
from tests.engines.drafters.drafting import Drafting, following
from tests.engines.draws import LEVELS, SUPPORT, assert_same_draws, draft_batch, expected_draws, sampling_of
from tests.engines.scheduling import SAMPLINGS, generate
from tests.engines.test_openvino import tiny_drafter_as_stored
from tests.engines.tiny import METHOD, tiny_bundle, tiny_drafter, tiny_drafter_of, tiny_target
from tests.toy_drafter import reference_draws

QUICK = ("stochastic_beam", "independent")


def drawing_engine(folder, construction: str, **options) -> Engine:
    plan = {"levels": LEVELS[construction], "support": SUPPORT, "construction": construction, "ngram": False}
    return load_engine(tiny_bundle(folder, tiny_target(), **options, **plan))


@pytest.fixture(scope="module", params=slow_but(QUICK, LEVELS))
def drawing(request, tmp_path_factory) -> tuple[str, Engine]:
    return request.param, drawing_engine(tmp_path_factory.mktemp(request.param), request.param)


def draw(engine: Engine, batch: DraftBatch, sampling: DraftSampling) -> DraftDraws:
    drafter = engine.drafters[METHOD]
    assert isinstance(drafter, DrawingEngine)
    return DraftDraws(*(array.copy() for array in vars(drafter.draw(batch, sampling)).values()))


def rows(batch: DraftBatch, sampling: DraftSampling, chosen: list[int]) -> tuple[DraftBatch, DraftSampling]:
    part = DraftSampling(*(array[chosen] for array in vars(sampling).values()))
    return DraftBatch.of_roots(batch.features[chosen], batch.tokens[chosen]), part


@pytest.mark.parametrize("size", [1, 3, 7])
def test_draws_are_those_of_the_module(drawing, size):
    construction, engine = drawing
    batch, sampling = draft_batch(size), sampling_of(construction, size)
    expected = expected_draws(tiny_drafter_as_stored(tiny_target()), construction, batch, sampling)
    assert_same_draws(draw(engine, batch, sampling), expected)


@pytest.mark.parametrize("construction", ["stochastic_beam", slow("independent")])
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


@pytest.mark.parametrize("variant", slow_but(["block"], ["block", "draft_lm", "eagle3", "medusa", "parallel_eagle3"]))
def test_every_draft_model_draws(variant, tmp_path):
    """Levels of several widths, and nodes that are not there, below contexts of several lengths. Texts are those of
    plain decoding, and with verifiers that keep only the distribution those of greedy requests."""
    drafter, construction = tiny_drafter_of(tiny_target(), variant), "gumbel_top_k"
    engine = drawing_engine(tmp_path, construction, trained=drafter)
    sequences, rng = [Drafting(4), Drafting(0), Drafting(7)], np.random.default_rng(3)
    for sequence, count in zip(sequences, (5, 1, 9), strict=True):
        sequence.grow(rng, count)
    batch = DraftBatch.of_roots(
        np.stack([sequence.hidden[-1].numpy() for sequence in sequences]),
        np.array([int(sequence.tokens[-1]) for sequence in sequences], np.int32),
    )
    if engine.drafters[METHOD].reads_context:
        batch = DraftBatch(
            np.concatenate([sequence.hidden.numpy() for sequence in sequences]),
            np.concatenate([sequence.tokens.numpy() for sequence in sequences]),
            np.array([0, 5, 6, 15], np.int32),
            np.array([sequence.slot for sequence in sequences], np.int32),
            np.zeros(3, np.int32),
        )

    def support_of(b: int, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
        expected = following(drafter, sequences[b].hidden, sequences[b].tokens, path[1:])
        values, places = expected.topk(SUPPORT)
        return drafter.hot_ids[places].int().numpy(), values.numpy()

    sampling, roots = sampling_of(construction, 3), [int(sequence.tokens[-1]) for sequence in sequences]
    expected = reference_draws(construction, LEVELS[construction], roots, sampling, support_of)
    assert (expected.draws == -1).any()
    assert_same_draws(draw(engine, batch, sampling), expected)
    plain, _ = generate(engine, None)
    for name in ("sampled_walk", "recursive_rejection"):
        drawing = {"levels": LEVELS[construction], "support": SUPPORT}
        tokens, scheduler = generate(
            engine, MethodConfig(construction=construction, verification=name, tree_budget=9, **drawing)
        )
        assert scheduler.totals.drafted > scheduler.totals.accepted > 0
        exact = [
            key for key in plain if VERIFIERS[name].merges or not SAMPLINGS[key % len(SAMPLINGS)].get("temperature")
        ]
        assert [tokens[key] for key in exact] == [plain[key] for key in exact], name


@pytest.mark.parametrize("construction", ["stochastic_beam", slow("independent")])
def test_the_native_form_draws_the_same(construction, tmp_path):
    drafter = tiny_drafter(tiny_target())
    loop = RandomDraws(drafter, RANDOM_CONSTRUCTIONS[construction].rule, LEVELS[construction], SUPPORT)
    network = export_drafter_native(loop)
    assert {node.domain for node in network.graph} == {""}
    save(network, tmp_path / "drafter.onnx")
    batch, sampling = draft_batch(5), sampling_of(construction, 5)
    inputs = {"features": batch.features, "tokens": batch.tokens} | vars(sampling)
    drawn = onnxruntime.InferenceSession(tmp_path / "drafter.onnx").run(None, inputs)
    assert_same_draws(DraftDraws(*drawn), expected_draws(drafter, construction, batch, sampling))


def test_what_does_not_fit_is_refused(drawing, fp32_bundle):
    construction, engine = drawing
    batch, sampling = draft_batch(3), sampling_of(construction, 3)
    with pytest.raises(ValueError, match=r"shape of noise is \(2, .*: expected \(3, "):
        engine.drafters[METHOD].draw(batch, sampling_of(construction, 2))
    with pytest.raises(ValueError, match=r"shape of noise is \(3, \d+, 6\): expected \(3, \d+, 7\)"):
        engine.drafters[METHOD].draw(batch, dataclasses.replace(sampling, noise=sampling.noise[:, :, :6]))
    with pytest.raises(RuntimeError, match="draws at random: it gives no candidates"):
        engine.drafters[METHOD].draft(batch)
    with pytest.raises(RuntimeError, match="does not draw at random"):
        load_engine(fp32_bundle).drafters[METHOD].draw(batch, sampling)
