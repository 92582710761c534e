"""The build script on a tiny target: what it writes.

The slow cases would catch a network that is exported once per method, or weights that are stored once per method.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import typer

from redraft.batch import DraftBatch
from redraft.bundle.backends import OPENVINO, TENSORRT, TORCH, Precision
from redraft.bundle.config import BundleConfig
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import MethodConfig
from redraft.cli import build, inspect
from redraft.compiler.bundle import load_target
from redraft.compiler.writers import openvino, tensorrt
from redraft.engines import load_engine
from redraft.engines.tensorrt.library import LIBRARIES
from redraft.errors import BundleError
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import give_layers
from redraft.runtime import Runtime
from redraft.serving.settings import ServeSettings, TextScope
from redraft.worker.server import text_options
from tests.cli.commands import invoke
from tests.conftest import slow
from tests.engines.tiny import (
    VOCAB,
    chain,
    make_batch,
    tiny_bundle,
    tiny_drafter,
    tiny_drafter_of,
    tiny_target,
    write_model,
)
from tests.toy_engine import toy_tokenizer

run = partial(invoke, build.main)


def test_a_bundle_with_drafter(model, tmp_path, capsys):
    tiny_drafter(tiny_target()).save(tmp_path / "drafter")
    np.save(tmp_path / "drafter" / "bigrams.npy", np.zeros(VOCAB, np.int32))
    options = ["--model", model, "--drafter", tmp_path / "drafter", "--output", tmp_path / "b", "--max-len", 64]
    done = run(*options, "--slots", 3, "--construction", "beam", "--beam-width", 2, "--candidates", 2)
    assert done.exit_code == 0, done.output
    bundle = Bundle.load(tmp_path / "b")
    method = bundle.config.methods["recurrent"]
    assert (bundle.config.limits.slots, method.construction, method.ngram) == (3, "beam", True)
    assert bundle.manifest.command.startswith("redraft build")
    files = {"target.onnx", "drafter.recurrent.onnx", "drafters.weights", "bigrams.npy", "tokenizer.json"}
    assert files < set(bundle.manifest.files)
    inspect.main(tmp_path / "b")
    printed = capsys.readouterr().out
    assert "2 TreeAttention" in printed
    assert "beam width 2" in printed
    (tmp_path / "b" / "scores.json").write_text("{")
    with pytest.raises(typer.Exit):
        inspect.main(tmp_path / "b")
    printed = capsys.readouterr().out
    assert "scores.json" in printed
    assert "redraft tune" in printed


def test_a_bundle_for_teacher_data_of_several_layers(model, tmp_path):
    """It gives the hidden states and, after them, what enters the layers, as redraft distill asks for it."""
    options = ["--no-drafter", "--features", "--target-layers", "0+1", "--precision", "fp32", "--max-len", 64]
    done = run("--model", model, *options, "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    target, tokens = tiny_target(), list(range(5, 17))
    give_layers(target, (0, 1))
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.config.target.feature_size == target.feature_size == 3 * target.config.hidden_size
    found = load_engine(bundle).execute(make_batch([chain(0, [], tokens, causal=True)], words=1))[1]
    want = target(torch.tensor([tokens]), causal_attend(target.config, len(tokens))).features[0]
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_a_bundle_that_draws_at_random(model, tmp_path, capsys):
    tiny_drafter(tiny_target()).save(tmp_path / "drafter")
    options = ["--model", model, "--drafter", tmp_path / "drafter", "--output", tmp_path / "b", "--max-len", 64]
    done = run(*options, "--slots", 3, "--construction", "stochastic_beam", "--levels", "3,2", "--support", 9)
    assert done.exit_code == 0, done.output
    method = Bundle.load(tmp_path / "b").config.methods["recurrent"]
    assert (method.levels, method.support, method.tree_budget) == ((3, 2), 9, 5)
    assert (method.verification, method.ngram) == ("recursive_rejection", False)
    inspect.main(tmp_path / "b")
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "stochastic_beam, 3, 2 draws per level from 9 tokens" in printed
    assert "2 DrawStep" in printed
    assert "recursive_rejection" in printed


class EngineStub:
    """Writes a network's bytes in place of an engine: TensorRT takes 20 s for these three."""

    def __init__(self, config: BundleConfig):
        self.library, self.versions = LIBRARIES[config.backend.name], dict[str, str]()

    def build_target(self, network: Path, rank: int) -> None:
        for suffix in (".engine", ".engine.json"):
            network.with_suffix(suffix).write_bytes(network.read_bytes())

    def build_drafter(self, network: Path, reads_context: bool) -> None:
        self.build_target(network, 0)


@pytest.mark.parametrize(
    ("backend", "writer", "form", "suffixes"),
    [
        ("openvino", openvino, "plugin", [".onnx"]),
        slow("tensorrt_rtx", tensorrt, "native", [".onnx", ".engine", ".engine.json"]),
    ],
)
def test_methods_of_one_network_export_it_once(model, tmp_path, monkeypatch, backend, writer, form, suffixes):
    name = f"export_drafter_{form}"
    exported, export = [], getattr(writer, name)
    monkeypatch.setattr(writer, name, lambda *given, **named: exported.append(given) or export(*given, **named))
    monkeypatch.setattr(tensorrt, "EngineBuilder", EngineStub)
    tiny_drafter(tiny_target()).save(tmp_path / "drafter")
    drafter = f'drafter = "{tmp_path / "drafter"}"\n'
    beams = drafter + 'construction = "beam"\nngram = false\n'
    methods = {"grown": drafter, "beams": beams, "narrow": beams + "beam_width = 2\n"}
    text = "".join(f"[{method}]\ncandidates = 4\n{settings}" for method, settings in methods.items())
    (tmp_path / "methods.toml").write_text(text)
    options = ["--model", model, "--methods", tmp_path / "methods.toml", "--output", tmp_path / "b", "--max-len", 64]
    done = run(*options, "--slots", 3, "--backend", backend)
    assert done.exit_code == 0, done.output
    assert len(exported) == 2
    for suffix in suffixes:
        grown, beams, narrow = ((tmp_path / "b" / f"drafter.{method}{suffix}").read_bytes() for method in methods)
        assert grown == beams != narrow
    if backend == "openvino":
        assert set(load_engine(Bundle.load(tmp_path / "b")).drafters) == set(methods)


@pytest.mark.slow
def test_a_bundle_of_several_methods(model, tmp_path, capsys):
    """One target, the drafters' weights once, and each method's answers those of a bundle of its own."""
    target = tiny_target()
    tiny_drafter(target).save(tmp_path / "recurrent")
    tiny_drafter_of(target, "hidden_state").save(tmp_path / "hidden")
    (tmp_path / "methods.toml").write_text(
        f"""
        [wide]
        drafter = "{tmp_path}/recurrent"
        beam_width = 5
        [narrow]
        drafter = "{tmp_path}/recurrent"
        beam_width = 2
        ngram = false
        [lyanna]
        drafter = "{tmp_path}/hidden"
        beam_length = 3
        resample_above = 0
        [rsd-s]
        drafter = "{tmp_path}/recurrent"
        construction = "stochastic_beam"
        levels = "3,2"
        support = 9
        [lookup]
        ngram = true
        """
    )
    options = ["--model", model, "--max-len", 64, "--precision", "fp32", "--slots", 3]
    done = run(*options, "--methods", tmp_path / "methods.toml", "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    done = run(*options, "--drafter", tmp_path / "recurrent", "--beam-width", 5, "--output", tmp_path / "alone")
    assert done.exit_code == 0, done.output
    bundle, alone = (Bundle.load(tmp_path / name) for name in ("b", "alone"))
    methods = bundle.config.methods
    assert list(methods) == ["wide", "narrow", "lyanna", "rsd-s", "lookup"]
    assert (methods["wide"].beam_width, methods["narrow"].ngram, methods["lookup"].drafter) == (5, False, None)
    assert methods["rsd-s"].verification == "recursive_rejection"
    sizes = [entry.manifest.files["drafters.weights"].size for entry in (bundle, alone)]
    assert sizes[0] < 3.5 * sizes[1], "three methods of one drafter, whose weights are there once"
    engine, own = load_engine(bundle), load_engine(alone)
    assert set(engine.drafters) == set(methods) - {"lookup"}
    batch = DraftBatch.of_roots(np.ones((2, 96), np.float32), np.array([3, 7], np.int32))
    got, expected = engine.drafters["wide"].draft(batch), own.drafters["recurrent"].draft(batch)
    np.testing.assert_array_equal(got.candidates, expected.candidates)
    np.testing.assert_array_equal(got.log_probs, expected.log_probs)
    assert engine.drafters["narrow"].draft(batch).candidates.shape == (2, 5, 2, 8)
    inspect.main(tmp_path / "b")
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "method narrow recurrent, best_first, beam width 2" in printed
    assert "method lookup no drafter; " in printed


@pytest.mark.parametrize("scope", TextScope)
def test_a_model_without_a_drafter_drafts_from_ngrams_and_what_was_served(tmp_path, scope):
    """By default, and the latter where it is asked for."""
    model = tmp_path / "model"
    write_model(tiny_target(), model)
    toy_tokenizer().save(str(model / "tokenizer.json"))
    done = run("--model", model, "--max-len", 64, "--precision", "fp32", "--tree-budget", 3, "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    runtime = Runtime.load(tmp_path / "b", texts=text_options(ServeSettings(served_texts=scope)))
    (method,) = runtime.methods.values()
    assert (method.drafter, method.construction, method.ngram, method.tree_budget) == (None, None, True, 3)
    assert (runtime.texts is None) == (scope == TextScope.off)
    assert Runtime.load(tmp_path / "b").texts is None


def test_a_bundle_of_a_method_that_is_gone_says_what_to_do(tmp_path, monkeypatch):
    bundle = tiny_bundle(tmp_path, tiny_target(), drafts=False)
    methods = {"ngram_trie": MethodConfig(construction="ngram_trie")}
    old = dataclasses.replace(bundle, config=bundle.config.model_copy(update={"methods": methods}))
    monkeypatch.setattr(Bundle, "load", lambda _: old)
    said = "method ngram_trie: unknown construction 'ngram_trie': .*; build the bundle again, with --no-drafter --ngram"
    with pytest.raises(BundleError, match=said):
        Runtime.load(bundle.path)


def test_the_target_of_a_gpu_backend_is_loaded_as_it_is_stored(tmp_path):
    """What drafters share with it is in float32, as they are; the fingerprint is the same."""
    write_model(tiny_target().to(torch.bfloat16), tmp_path)
    whole, drafted, plain = (
        load_target(tmp_path, backend, Precision.bf16, drafts)
        for backend, drafts in ((OPENVINO, True), (TORCH, True), (TENSORRT, False))
    )
    exact = load_target(tmp_path, TORCH, Precision.fp32, drafts=False)
    assert {weight.dtype for weight in exact.parameters()} == {torch.float32}
    wide = {name for name, weight in drafted.named_parameters() if weight.dtype == torch.float32}
    assert wide == {"embedding.weight", "lm_head.weight"}
    assert {weight.dtype for weight in whole.parameters()} == {torch.float32}
    assert {weight.dtype for weight in plain.parameters()} == {torch.bfloat16}
    assert len({target_fingerprint(target) for target in (whole, drafted, plain)}) == 1


def test_prompts_are_prefilled_by_a_backends_own_chunks(tmp_path, monkeypatch):
    """At most a whole context, and as asked."""
    target, chunks = tiny_target(), []
    target.config = dataclasses.replace(target.config, max_position=1024)
    write_model(target, tmp_path)
    monkeypatch.setattr(build, "build", lambda config, *_: chunks.append(config.limits.prefill_chunk))
    given = ["--model", tmp_path, "--no-drafter", "--output", tmp_path / "b"]
    for options in ([], ["--max-len", 40], ["--max-len", 40, "--prefill-chunk", 50]):
        for backend in ("openvino", "torch", "tensorrt_rtx"):
            done = run(*given, "--backend", backend, *options)
            assert done.exit_code == 0, done.output
    assert chunks == [128, 512, 512, 40, 40, 40, 50, 50, 50]


def test_an_auto_regressive_bundle_has_no_features_output(model, tmp_path):
    assert run("--model", model, "--no-drafter", "--output", tmp_path / "b", "--max-len", 64).exit_code == 0
    assert [output.name for output in ir.load(tmp_path / "b" / "target.onnx").graph.outputs] == ["logits"]
    assert Bundle.load(tmp_path / "b").config.methods == {}


def test_the_fingerprint_is_of_the_weights_not_the_precision():
    target = tiny_target()
    before = target_fingerprint(target)
    assert target_fingerprint(tiny_target().to(torch.bfloat16)) == before
    target.embedding.weight[3, 3] += 1
    assert target_fingerprint(target) != before
