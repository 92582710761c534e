"""Bundles in FP8, by the operator's reference: their numbers, their size, and the same text with drafts as without.

The slow cases would catch a kind of drafter whose program has a product that the operator does not take.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from redraft.bundle.backends import TORCH, Precision
from redraft.bundle.method import MethodConfig
from redraft.compiler.bundle import load_target, stored_bytes
from redraft.engines import load_engine
from redraft.errors import BundleError
from redraft.model_defs.files import SINGLE
from redraft.plugins.operators.fp8_linear.reference import E4M3
from tests.conftest import slow
from tests.engines.scheduling import generate
from tests.engines.tiny import (
    METHOD,
    chain,
    expected,
    grouped_target,
    make_batch,
    random_tree,
    tiny_bundle,
    tiny_drafter_of,
    tiny_lm,
    tiny_of,
    tiny_target,
    write_model,
)
from tests.engines.torch.test_scheduling import PLANS
from tests.model_defs.weights.layouts import TENSORS, group_of, quantize, scaled, scaled_as_a_whole


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_bundle(tmp_path_factory.mktemp("fp8"), tiny_target(), "torch", "fp8")


def constants(bundle, name: str = "target") -> dict[str, torch.Tensor]:
    program = torch.export.load(bundle.path / f"{name}.pt2")
    return program.state_dict | {n: x for n, x in program.constants.items() if isinstance(x, torch.Tensor)}


def test_logits_are_near_the_modules_and_matrices_in_e4m3(bundle):
    step = [chain(0, [], [5, 6, 7, 90, 2, 44, 8], causal=True)]
    logits, _ = load_engine(bundle).execute(make_batch(step))
    want = expected(tiny_target(), step)[0]
    assert 0.02 < np.abs(logits - want).mean() / np.abs(want).mean() < 0.4
    stored = constants(bundle)
    assert sum(x.dtype == E4M3 for x in stored.values()) == 2 * 4 + 1
    assert {x.shape for x in stored.values() if x.ndim == 2 and x.dtype == torch.bfloat16} == {(111, 96)}
    assert any(x.dtype == E4M3 for x in constants(bundle, f"drafter.{METHOD}").values())


def test_a_row_s_logits_do_not_depend_on_those_beside_it(bundle):
    """Three sequences at once, and each by itself: in the same bits where attention has as many rows."""
    engine, rng = load_engine(bundle), np.random.default_rng(0)
    trees = [random_tree(rng, slot, [], 5) for slot in (0, 3, 7)]
    together = engine.execute(make_batch(trees))[0].copy()
    for i, tree in enumerate(trees):
        np.testing.assert_array_equal(engine.execute(make_batch([tree]))[0], together[5 * i : 5 * i + 5])


@pytest.mark.parametrize("kind", ["recurrent", "eagle3", *map(slow, ("eagle", "hidden_state", "draft_lm", "medusa"))])
def test_speculation_gives_the_text_of_fp8_itself(kind, tmp_path):
    target = tiny_target()
    engine = load_engine(tiny_bundle(tmp_path, target, "torch", "fp8", trained=tiny_drafter_of(target, kind)))
    text = generate(engine, None)[0]
    for name, plan in PLANS.items():
        tokens, scheduler = generate(engine, MethodConfig(**plan))
        assert tokens == text, name
        assert scheduler.totals.drafted


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["gemma3", "opt", "mixtral", "qwen3 moe", "phi4"])
def test_layers_of_every_kind(layers, tmp_path):
    """Experts and their router keep bf16."""
    target = tiny_of(layers)
    bundle = tiny_bundle(tmp_path, target, "torch", "fp8", drafts=False)
    step = [chain(0, [], [5, 6, 7, 90, 2], causal=True)]
    logits, _ = load_engine(bundle).execute(make_batch(step))
    want = expected(tiny_of(layers), step)[0]
    assert np.abs(logits - want).mean() / np.abs(want).mean() < 0.5


def test_two_ranks_have_scales_of_their_own_rows(tmp_path):
    bundle = tiny_bundle(tmp_path, tiny_of("qwen3"), "torch", "fp8", drafts=False, tensor_parallel=2)
    for rank in (0, 1):
        folder = bundle.path / f"rank{rank}"
        assert any(x.dtype == E4M3 for x in torch.export.load(folder / "target.pt2").state_dict.values())


FLOAT8 = {"quant_method": TENSORS, "format": "float-quantized", "config_groups": group_of(8, "float")}
SOURCES = {
    "a scale for each row": (FLOAT8, lambda w: scaled(w, E4M3)),
    "a scale for all": (FLOAT8, scaled_as_a_whole),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [24, 20]}, lambda w: scaled(w, E4M3, (24, 20))),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_checkpoint_in_fp8_keeps_its_bytes(source, tmp_path, capsys):
    """Those with blocks have other scales, which is said. The head, which it spares, is spared."""
    write_model(tiny_target(), tmp_path / "source")
    quantize(tmp_path / "source", *SOURCES[source])
    target = load_target(tmp_path / "source", TORCH, Precision.fp8, drafts=False)
    said = capsys.readouterr().err
    bundle = tiny_bundle(tmp_path, target, "torch", "fp8", drafts=False)
    stored = {x.view(torch.uint8).numpy().tobytes() for x in constants(bundle).values() if x.dtype == E4M3}
    assert sum(x.shape == (111, 96) and x.dtype == torch.bfloat16 for x in constants(bundle).values()) == 2
    layer = load_file(tmp_path / "source" / SINGLE)
    for parts in ("qkv", "o"):
        names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in parts]
        codes = torch.cat([layer[name].view(torch.uint8) for name in names])
        assert (codes.numpy().tobytes() in stored) == (source != "blocks")
    if source == "blocks":
        assert "fp8: rounded to E4M3 with a scale for each row" in said
        return
    assert said == "  lm_head.weight, not quantized: stays in bf16\n"
    step = [chain(0, [], [5, 6, 7], causal=True)]
    want = expected(target.float(), step)[0]
    logits = load_engine(bundle).execute(make_batch(step))[0]
    assert np.abs(logits - want).mean() / np.abs(want).mean() < 0.4


def test_a_layer_that_a_checkpoint_spares_is_spared(tmp_path, capsys):
    write_model(tiny_target(), tmp_path / "source")
    spared = [f"layers.0.mlp.{part}_proj" for part in ("gate", "up")]
    quantize(tmp_path / "source", *SOURCES["a scale for each row"], spared)
    target = load_target(tmp_path / "source", TORCH, Precision.fp8, drafts=False)
    assert capsys.readouterr().err == "  lm_head.weight and 2 more, not quantized: stays in bf16\n"
    stored = constants(tiny_bundle(tmp_path, target, "torch", "fp8", drafts=False)).values()
    assert sum(x.shape == (400, 96) and x.dtype == torch.bfloat16 for x in stored) == 1
    assert sum(x.dtype == E4M3 for x in stored) == 2 * 4 - 1
    left = 111 * 96 + 400 * 96
    more = stored_bytes(target, Precision.fp8, 1) - stored_bytes(tiny_target(), Precision.fp8, 1)
    assert more == pytest.approx(left * (2 - 1.1))


def test_a_head_that_is_the_embedding_is_spared_with_it(tmp_path, capsys):
    write_model(tiny_lm(), tmp_path / "source")
    quantize(tmp_path / "source", *SOURCES["a scale for each row"])
    target = load_target(tmp_path / "source", TORCH, Precision.fp8, drafts=False)
    assert target.config.tie_embeddings
    assert capsys.readouterr().err == "  model.embed_tokens.weight, not quantized: stays in bf16\n"
    stored = constants(tiny_bundle(tmp_path, target, "torch", "fp8", drafts=False)).values()
    assert sum(x.shape == target.embedding.weight.shape and x.dtype == torch.bfloat16 for x in stored) == 1
    assert sum(x.dtype == E4M3 for x in stored) == 4 * target.config.num_layers


def test_ranks_round_a_checkpoint_again_and_the_build_says_so(tmp_path, capsys):
    write_model(grouped_target(), tmp_path / "source")
    quantize(tmp_path / "source", *SOURCES["a scale for each row"])
    target = load_target(tmp_path / "source", TORCH, Precision.fp8, drafts=False, ranks=2)
    assert not any(scale is not None for scale in target.row_scales.values())
    said = capsys.readouterr().err
    assert "q_proj.weight and 13 more, compressed-tensors, float8: rounded to E4M3" in said
    assert "not quantized: stays in bf16" in said
    bundle = tiny_bundle(tmp_path, target, "torch", "fp8", drafts=False, tensor_parallel=2)
    shard = torch.export.load(bundle.path / "rank1" / "target.pt2").state_dict.values()
    assert {x.shape for x in shard if x.ndim == 2 and x.dtype == torch.bfloat16} == {(111, 96), (47, 96)}


def test_an_older_gpu_is_refused_with_the_remedy(bundle, find_gpu):
    find_gpu("A100", (8, 0))
    with pytest.raises(BundleError, match=r"A100 .*8\.0: fp8 engines need 8\.9 or later; .*--precision bf16"):
        load_engine(bundle)
