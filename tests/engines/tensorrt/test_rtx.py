"""Native-form networks: ONNX Runtime runs the file, and TensorRT for RTX builds engines from that very file.

Slow, as it builds engines of the default target and of every shipped drafter. It would catch a network that the library
refuses, or whose numbers are not the module's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from redraft.batch import DraftCandidates, DraftDraws
from redraft.bundle.config import BundleConfig, LimitsInfo, TargetInfo
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import MethodConfig
from redraft.cli import build
from redraft.compiler.methods import drafting_loop, read_methods
from redraft.compiler.writers.engine_builder import EngineBuilder, network_sha256
from redraft.compiler.writers.shared import Loops, resampling_loop
from redraft.compiler.writers.tensorrt import save, write
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.drafters.token_info import InfoForm
from redraft.model_defs.export.drafter import export_drafter_native, export_resampler_native
from redraft.model_defs.export.networks import cache_names
from redraft.model_defs.export.target import CacheShape
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from tests.cli.commands import invoke
from tests.engines.drafters.drafting import check, following
from tests.engines.draws import LEVELS, SUPPORT, assert_same_draws, sampling_of
from tests.engines.tensorrt.native_runner import NativeRunner
from tests.engines.tiny import (
    DRAFTING,
    METHOD,
    VOCAB,
    Rows,
    bundle_config,
    chain,
    expected,
    random_model,
    tiny_drafter_of,
    tiny_target,
    write_model,
)

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[3]
SMOLLM2 = TargetInfo(
    num_layers=30,
    hidden_size=576,
    feature_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=49152,
    eos_token_ids=(2,),
    max_position=8192,
)
SHIPPED = read_methods(ROOT / "build" / "drafters.toml")
CONTEXT_LAYERS = {"hidden_state": 1, "eagle": 1, "draft_lm": 2}
"""Of the shipped drafters that have a context."""
LIMITS = LimitsInfo(slots=2, max_len=96, max_tree=32, prefill_chunk=16)
OTHER_LIMITS = LimitsInfo(slots=3, max_len=70, max_tree=6, prefill_chunk=16)
SMALL = {"beam_width": 2, "beam_length": 2, "candidates": 4}
TEXTS = ["The capital of France is Paris, and", "Once upon a time there was a little"]

Value = tuple[str, str, list[int | str]]
"""Name, type and shape, in which open sizes have names."""


@dataclass(frozen=True)
class Contract:
    """The inputs and outputs that networks of the default target and of drafters of its heads should have."""

    dtype: str = "FLOAT16"
    cache_rows: int = 128
    vocabulary: int = 49152
    draft: tuple[int, int, int] = (2, 2, 4)
    """Levels, width and candidates."""

    def caches(self, layers: int, suffix: str = "") -> list[Value]:
        shape = ["B", 3, self.cache_rows, 64]
        return [(f"{kind}_cache.{layer}{suffix}", self.dtype, shape) for kind in "kv" for layer in range(layers)]

    def target(self, layers: int = 30) -> tuple[list[Value], list[Value]]:
        rows: list[Value] = [
            ("input_ids", "INT32", ["B", "N"]),
            ("positions", "INT64", ["B", "N"]),
            ("write_indices", "INT64", ["B"]),
            ("mask", self.dtype, ["B", 1, "N", self.cache_rows]),
            ("logit_rows", "INT32", ["R"]),
        ]
        results: list[Value] = [("logits", self.dtype, ["R", self.vocabulary]), ("features", self.dtype, ["N*B", 576])]
        return [*rows, *self.caches(layers)], [*results, *self.caches(layers, ".updated")]

    def drafter(self, context_layers: int) -> tuple[list[Value], list[Value]]:
        pairs: list[Value] = [("features", self.dtype, ["B", 576]), ("tokens", "INT32", ["B"])]
        if context_layers:
            pairs = [
                ("features", self.dtype, ["B", "N", 576]),
                ("tokens", "INT32", ["B", "N"]),
                ("pair_counts", "INT64", ["B"]),
                ("write_indices", "INT64", ["B"]),
            ]
        drafts: list[Value] = [
            ("candidates", "INT32", ["B", *self.draft]),
            ("log_probs", "FLOAT", ["B", *self.draft]),
            ("parents", "INT32", ["B", *self.draft[:2]]),
        ]
        return [*pairs, *self.caches(context_layers)], [*drafts, *self.caches(context_layers, ".updated")]


def values_of(network: Path) -> tuple[list[Value], list[Value]]:
    """The inputs and outputs that a network has."""
    graph = onnx.load(network, load_external_data=False).graph
    inputs, outputs = ([_value(value) for value in values] for values in (graph.input, graph.output))
    return inputs, outputs


def _value(value: onnx.ValueInfoProto) -> Value:
    tensor = value.type.tensor_type
    shape = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
    return value.name, onnx.TensorProto.DataType.Name(tensor.elem_type), shape


def as_read(values: list[Value]) -> list[tuple[str, str]]:
    """What a report says of inputs or outputs."""
    types = {"FLOAT16": "HALF", "BFLOAT16": "BF16"}
    sizes = [[-1 if isinstance(size, str) else size for size in shape] for _, _, shape in values]
    return [(name, f"{types.get(dtype, dtype)} {size}") for (name, dtype, _), size in zip(values, sizes, strict=True)]


@dataclass(frozen=True)
class Built:
    """fp16 networks and engines of the default target and of every shipped drafter, and the modules in float32."""

    folder: Path
    target: Target
    drafters: dict[str, Drafter]


def report_of(network: Path) -> dict[str, Any]:
    """What the builder says of a network's engine: it was built from this very file, and what TensorRT read has the
    file's inputs and outputs."""
    engine = network.with_suffix(".engine")
    report = json.loads(engine.with_name(f"{engine.name}.json").read_text())
    assert report["network_sha256"] == network_sha256(network)
    assert report["engine_bytes"] == engine.stat().st_size >= 0.9 * report["weight_bytes"]
    assert [list(report[kind].items()) for kind in ("inputs", "outputs")] == [*map(as_read, values_of(network))]
    return report


@pytest.fixture(scope="module")
def built(smollm2, tmp_path_factory) -> Built:
    """With small limits and drafts."""
    folder, target = tmp_path_factory.mktemp("rtx"), Target.from_folder(smollm2)
    config = BundleConfig(
        name="rtx", backend="tensorrt_rtx", precision="fp16", target=SMOLLM2, limits=LIMITS, methods={}
    )
    drafters, methods, loops = dict[str, Drafter](), dict[str, MethodConfig](), Loops()
    for name, settings in SHIPPED.items():
        drafters[name] = load_drafter(ROOT / settings.drafter, target)
        plan = settings.model_copy(update=SMALL).config()
        methods[name], loops[name] = drafting_loop(drafters[name], plan, config)
    write(config.model_copy(update={"methods": methods}), target, loops, folder, features=True)
    return Built(folder, target.float(), {name: drafter.float() for name, drafter in drafters.items()})


def test_engines_are_built_from_the_file_that_onnx_runtime_verifies(built):
    layers = report_of(built.folder / "target.onnx")["layers"]
    assert (layers["ATTENTION_INPUT"], layers["KV_CACHE_UPDATE"]) == (30, 60)
    assert values_of(built.folder / "target.onnx") == Contract().target()
    check_target(built.folder / "target.onnx", built.target, atol=0.15)


def check_target(network: Path, target: Target, atol: float) -> None:
    """ONNX Runtime's logits and hidden states from the file, of trees behind prompts, are the module's."""
    runner = NativeRunner(network, SMOLLM2, CacheShape(2, 96, 32), np.float16)
    contexts = [[1, 4093, 198], [504, 3575, 282, 4649, 314]]
    runner.run([chain(slot, [], context) for slot, context in enumerate(contexts)])
    step = [Rows(0, contexts[0], [42, 7, 99], [-1, 0, 0]), chain(1, contexts[1], [260])]
    (logits, hidden), (want, want_hidden) = runner.run(step), expected(target, step)
    np.testing.assert_allclose(logits, want, atol=atol)
    np.testing.assert_array_equal(logits.argmax(-1), want.argmax(-1))
    np.testing.assert_allclose(hidden, want_hidden, atol=atol)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_drafter_is_built_from_a_verified_file(built, smollm2, name):
    network, layers = built.folder / f"drafter.{name}.onnx", CONTEXT_LAYERS.get(name, 0)
    assert report_of(network)["layers"].get("KV_CACHE_UPDATE", 0) == 2 * layers
    assert values_of(network) == Contract().drafter(layers)
    check_drafts(network, built.drafters[name], built.target, smollm2, atol=0.05)


@torch.no_grad()
def check_drafts(network: Path, drafter: Drafter, target: Target, folder: Path, atol: float) -> None:
    """ONNX Runtime's drafts from the file, after texts and the target's hidden states, are the module's."""
    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    layers = drafter.context_layers
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = torch.tensor([tokenizer.encode(text).ids[:8] for text in TEXTS])
    hidden = target(tokens, causal_attend(target.config, 8)).features.half()
    if drafter.reads_text:
        hidden = F.pad(hidden, (0, 0, 1, -1))
    else:
        hidden, tokens = hidden[:, :-1], tokens[:, 1:]
    given = hidden.numpy()
    sequences, done = np.arange(2), np.zeros(2, np.int64)
    cached = {name: np.zeros((2, 3, 128, 64), given.dtype) for name in cache_names(layers)}
    for counts in np.array([[3, 1], [1, 4]]):
        inputs, chosen = dict(cached), (sequences, done + counts - 1)
        if layers:
            inputs |= {"pair_counts": counts, "write_indices": done}
            chosen = (sequences[:, None], done[:, None] + np.arange(4))
        done = done + counts
        inputs |= {"features": given[chosen], "tokens": tokens.int().numpy()[chosen]}
        found = session.run(None, inputs)
        cached = dict(zip(cached, found[3:], strict=True))
        for b, end in enumerate(done):
            expect = partial(following, drafter, hidden[b, :end].float(), tokens[b, :end], form=InfoForm.low_rank)
            check(drafter, DraftCandidates(*found[:3]), b, expect, atol=atol)


def test_bf16_with_the_limits_that_ship(smollm2, tmp_path):
    """As `redraft build` does: a target of the default's sizes, with 2 layers and few tokens, whose features are what
    enters its layers, and a drafter of a block."""
    target = random_model(replace(TargetConfig.load(smollm2), num_layers=2, vocab_size=VOCAB))
    write_model(target, tmp_path / "model")
    tiny_drafter_of(target, "block").save(tmp_path / "drafter")
    options = ["--backend", "tensorrt_rtx", "--precision", "bf16", "--model", tmp_path / "model"]
    options += ["--drafter", tmp_path / "drafter", "--beam-length", 2, "--method-name", METHOD]
    done = invoke(build.main, *options, "--output", tmp_path / "bundle")
    assert done.exit_code == 0, done.output
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.config.limits == LimitsInfo(slots=16, max_len=2048, max_tree=32, prefill_chunk=512)
    contract = Contract("BFLOAT16", 2048 + 32, VOCAB, draft=(2, 4, 8))
    networks = {"target": contract.target(layers=2), f"drafter.{METHOD}": contract.drafter(context_layers=2)}
    for name, values in networks.items():
        assert values_of(bundle.path / f"{name}.onnx") == values
        report = report_of(bundle.path / f"{name}.onnx")
        assert (report["layers"]["ATTENTION_INPUT"], report["layers"]["KV_CACHE_UPDATE"]) == (2, 4)
        assert report["profiles"] == 2


@pytest.mark.parametrize(
    ("variant", "construction"),
    [
        *((variant, "beam") for variant in ("hidden_state", "draft_lm, model", "block", "parallel_eagle3")),
        *(("eagle3", "gumbel_top_k"), ("block, causal", "stochastic_beam")),
    ],
)
@torch.no_grad()
def test_what_does_not_ship_is_built_from_a_verified_file(variant, construction, tmp_path):
    """Chains that come out, heads of other sizes, blocks, random draws. ONNX Runtime's drafts from the
    file, over several calls beside a sequence of padding, are the module's."""
    target = tiny_target()
    drafter, draws = tiny_drafter_of(target, variant), construction in RANDOM_CONSTRUCTIONS
    shape = {"levels": LEVELS[construction], "support": SUPPORT} if draws else {}
    plan = DRAFTING.model_copy(update={"drafter": drafter.name, "construction": construction, **shape})
    config = bundle_config(target, {METHOD: plan}, OTHER_LIMITS, backend="tensorrt_rtx")
    method, loop = drafting_loop(drafter, plan, config)
    heads, network = method.context, tmp_path / "drafter.onnx"
    cache_rows, raw_logits = OTHER_LIMITS.max_len + heads.draft_rows, drafter.has_raw_logits and not draws
    save(export_drafter_native(loop, cache_rows, raw_logits=raw_logits), network)
    report = EngineBuilder(config).build_drafter(network, drafter.reads_context)
    assert report.network_sha256 == network_sha256(network)
    assert report.layers["KV_CACHE_UPDATE"] == 2 * drafter.context_layers
    assert (tmp_path / "drafter.engine").stat().st_size == report.engine_bytes
    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    cache = (4, heads.num_kv_heads, cache_rows, heads.head_size)
    caches = {name: np.zeros(cache, np.float32) for name in cache_names(heads.layers)}
    rows = [torch.zeros(cache) for _ in caches]
    sampling = vars(sampling_of(construction, 4)) if draws else {}
    lengths = np.array([0, 0, 0, OTHER_LIMITS.max_len])
    for counts in ([5, 1, 3, 1], [1, 4, 2, 1]):
        hidden = rng.standard_normal((4, max(counts), 96)).astype(np.float32)
        tokens = rng.integers(0, VOCAB, (4, max(counts))).astype(np.int32)
        inputs = {"features": hidden, "tokens": tokens, "pair_counts": np.array(counts), "write_indices": lengths}
        results = session.run(None, inputs | caches | sampling)
        caches = dict(zip(caches, results[-len(caches) :], strict=True))
        found, ours = [array[:3] for array in results], counts[:3]
        pairs = [torch.from_numpy(np.concatenate([x[b, :n] for b, n in enumerate(ours)])) for x in (hidden, tokens)]
        places = [np.cumsum([0, *ours]), np.arange(3), lengths[:3]]
        filters = [torch.from_numpy(array[:3]) for array in sampling.values()]
        expected = loop([*pairs, *(torch.from_numpy(x).int() for x in places), *rows, *filters])
        if draws:
            assert_same_draws(DraftDraws(*found[:3]), DraftDraws(*(array.numpy() for array in expected)))
        else:
            assert_same_drafts(found, expected)
        if raw_logits:
            np.testing.assert_allclose(found[3].reshape(3 * plan.beam_length, 50), expected[3], atol=2e-4, rtol=1e-4)
        lengths[:3] += ours


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "form"),
    [("hidden_state", InfoForm.bf16), ("block", InfoForm.low_rank), ("parallel_eagle3", None)],
)
def test_what_drafts_again_from_chains_is_built_from_a_verified_file(variant, form, tmp_path):
    """The network of a method that asks for it; ONNX Runtime's drafts from the file are the module's."""
    target = tiny_target()
    drafter = tiny_drafter_of(target, variant)
    plan = DRAFTING.model_copy(update={"drafter": drafter.name, "resample_above": 0, "beam_length": 4})
    config = bundle_config(target, {METHOD: plan}, OTHER_LIMITS, backend="tensorrt_rtx")
    assert drafting_loop(drafter, DRAFTING, config)[0].chain_levels == 0
    method, loop = drafting_loop(drafter, plan, config, form)
    again = resampling_loop(config.model_copy(update={"methods": {METHOD: method}}), METHOD, loop)
    network = tmp_path / "resampler.onnx"
    save(export_resampler_native(again), network)
    report = EngineBuilder(config).build_drafter(network, reads_context=False)
    assert (tmp_path / "resampler.engine").stat().st_size == report.engine_bytes
    chains, tokens = torch.randn(3, 3, 50), torch.tensor([4, 110, 98], dtype=torch.int32)
    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    for company in ([0, 1, 2], [2], [1, 0]):
        raw_logits, roots, sequences = chains[company], tokens[company], torch.arange(len(company), dtype=torch.int32)
        inputs = {"raw_logits": raw_logits.numpy(), "sequences": sequences.numpy(), "tokens": roots.numpy()}
        assert_same_drafts(session.run(None, inputs), again([raw_logits.flatten(0, 1), sequences, roots]))


def assert_same_drafts(found: list[np.ndarray], expected: tuple[torch.Tensor, ...]) -> None:
    """Candidates, log-probabilities and parents."""
    assert [array.dtype for array in found[:3]] == [np.int32, np.float32, np.int32]
    for got, want in zip(found[:3], expected, strict=False):
        np.testing.assert_allclose(got, want.numpy(), atol=2e-4, rtol=1e-4)
