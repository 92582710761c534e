"""Both TensorRT backends over a stand-in library whose engines compute: buckets, padding, buffers, aliases, results."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from model_defs.token_info import InfoForm
from plugins.all_reduce import nccl
from redraft.budget import BudgetTable
from redraft.bundle import Bundle, BundleError, LimitsInfo
from redraft.drafting import DraftingPlan
from redraft.engines import gpu, load_engine, tensorrt_drafter, tensorrt_target
from redraft.engines.flavour import Messages
from redraft.engines.hidden import on_host
from redraft.engines.interface import DraftCandidates
from redraft.engines.session import Session
from redraft.engines.tensorrt import TensorRTEngine
from tests.engines import stand_in_tensorrt, tiny
from tests.engines.draws import LEVELS, SUPPORT, draft_batch, sampling_of
from tests.engines.ranks import answers
from tests.engines.scheduling import generate
from tests.engines.tensorrt_ranks import steps
from tests.engines.test_context_drafters import Drafting, check, draft, following
from tests.engines.tiny import (
    CONTEXT_DRAFTERS,
    METHOD,
    VOCAB,
    chain,
    expected,
    grouped_target,
    make_batch,
    random_tree,
    tiny_bundle,
    tiny_drafter,
    tiny_drafter_of,
    tiny_lm,
    tiny_target,
)
from tests.mpi import run_ranks

LIMITS = LimitsInfo(slots=5, max_len=80, max_tree=8, prefill_chunk=16)
RANKS_SCRIPT = Path(__file__).with_name("tensorrt_ranks.py")
BACKENDS = {"tensorrt": (tiny_lm, "bf16", 0.1), "tensorrt_rtx": (tiny_target, "fp32", 1e-5)}
"""The target, which full TensorRT's kernels must have the head size of; the precision; tolerated errors, as a share of
the largest number."""


def bundle_of(backend: str, monkeypatch, folder, **options) -> Bundle:
    stand_in_tensorrt.install(monkeypatch, backend)
    target, precision, _ = BACKENDS[backend]
    given = {"target": target(), "precision": precision, "limits": LIMITS} | options
    return tiny_bundle(folder, backend=backend, **given)


@pytest.mark.parametrize(
    ("backend", "make_target", "precision", "tolerance"),
    [*((backend, *case) for backend, case in BACKENDS.items()), ("tensorrt_rtx", tiny_lm, "bf16", 0.15)],
)
def test_steps_are_those_of_the_module(backend, make_target, precision, tolerance, monkeypatch, tmp_path):
    """Prompts beyond a tree's rows, trees with an absent neighbour between them, commits; steps of the same and of
    other extents."""
    target = make_target()
    engine = load_engine(bundle_of(backend, monkeypatch, tmp_path, target=make_target(), precision=precision))
    rng = np.random.default_rng(0)
    contexts = {slot: rng.integers(0, VOCAB, n).tolist() for slot, n in ((0, 11), (1, 16), (3, 5), (4, 1))}

    def check(step: list) -> None:
        batch = make_batch(step, words=1)
        batch.logit_rows = batch.logit_rows[:: 1 if len(batch.logit_rows) % 3 else 2]
        logits, hidden = engine.execute(batch)
        for found, want in zip((logits, on_host(hidden)), expected(target, step), strict=True):
            want = want[batch.logit_rows] if found is logits else want
            assert found.dtype == np.float32
            error = np.abs(found - want) / np.abs(want).max()
            assert error.max() < tolerance
            assert np.sqrt(np.square(error).mean()) < tolerance / 5

    check([chain(slot, [], tokens, causal=True) for slot, tokens in contexts.items()])
    first = random_tree(rng, 1, contexts[1], 8)
    check([random_tree(rng, 3, contexts[3], 3), first, chain(0, contexts[0], [7])])
    path = first.ancestors(7)[::-1]
    accepted = contexts[1] + [first.tokens[row] for row in path]
    for _ in range(2):  # the second time it is the same extent, and the committed rows stay
        step = dataclasses.replace(random_tree(rng, 1, accepted, 4), commit=path)
        check([step, chain(4, contexts[4], [3, 4], causal=True)])
        accepted, path = accepted + step.tokens[:1], [0]
    check([chain(2, [], rng.integers(0, VOCAB, 16).tolist(), causal=True), random_tree(rng, 1, accepted[:-1], 5)])
    check([random_tree(rng, 3, contexts[3], 8)])


@pytest.mark.parametrize("variant", [*CONTEXT_DRAFTERS, "medusa"])
@torch.no_grad()
def test_drafts_are_those_of_the_module(variant, monkeypatch, tmp_path):
    """Prompts longer than a chunk, then a few pairs at a time, in changing company."""
    target = tiny_target()
    drafter = tiny_drafter_of(target, variant)
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path, trained=drafter))
    rng, sequences = np.random.default_rng(3), [Drafting(slot) for slot in (4, 0, 2)]
    steps = [([0], [40]), ([0, 1], [1, 9]), ([2, 0], [8, 3]), ([1, 0, 2], [4, 1, 5]), ([2], [1])]
    for company, counts in steps:
        drafting = [sequences[place] for place in company]
        for s, count in zip(drafting, counts, strict=True):
            s.grow(rng, count)
        if not drafter.reads_context:
            for s in drafting:
                s.ingested = len(s.tokens) - 1
        drafted = draft(engine, drafting)
        for b, s in enumerate(drafting):
            check(drafter, drafted, b, partial(following, drafter, s.hidden, s.tokens, form=InfoForm.bf16))
            assert drafted.log_probs.dtype == np.float32
    assert drafted.raw_logits is None
    with pytest.raises(RuntimeError, match="this drafter leaves no chain to draft again from"):
        engine.drafters[METHOD].resample([np.zeros((1, 50), np.float32)], np.zeros(1, np.int32))


def test_drafts_and_draws_are_the_torch_backends(monkeypatch, tmp_path):
    for plan in ({}, {"construction": "stochastic_beam", "levels": LEVELS["stochastic_beam"], "support": SUPPORT}):
        for variant in ("recurrent", "eagle"):
            target = tiny_target()
            drafter = tiny_drafter(target) if variant == "recurrent" else tiny_drafter_of(target, variant)
            options = {"trained": drafter, "limits": LIMITS, **plan}
            name = f"{variant}{len(plan)}"
            ours = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path / f"{name} rtx", **options))
            torchs = load_engine(tiny_bundle(tmp_path / f"{name} torch", tiny_target(), "torch", **options))
            batch = draft_batch(3)
            batch.slots = np.array([3, 0, 4], np.int32)
            found = []
            for engine in (ours, torchs):
                drafter = engine.drafters[METHOD]
                found.append(drafter.draw(batch, sampling_of("stochastic_beam", 3)) if plan else drafter.draft(batch))
            for field, kept in vars(found[0]).items():
                want = getattr(found[1], field)
                if kept is not None:
                    np.testing.assert_allclose(kept, want, atol=1e-4, rtol=1e-4, err_msg=field)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scheduler_speculates_to_the_same_text(backend, monkeypatch, tmp_path):
    target, *_ = BACKENDS[backend]
    options = {"trained": tiny_drafter_of(target(), "eagle"), "limits": tiny.LIMITS}
    engine = load_engine(bundle_of(backend, monkeypatch, tmp_path, **options))
    plan = DraftingPlan("best_first", budget=BudgetTable.constant(5))
    tokens, scheduler = generate(engine, plan)
    assert scheduler.totals.drafted > scheduler.totals.accepted
    if backend == "tensorrt_rtx":
        assert tokens == generate(engine, None)[0]


@pytest.mark.parametrize(
    ("backend", "make_target", "limits"),
    [("tensorrt", tiny_lm, LIMITS), ("tensorrt_rtx", grouped_target, tiny.LIMITS)],
)
def test_two_ranks_give_what_one_gives(backend, make_target, limits, monkeypatch, tmp_path):
    """Two KV groups as 1 + 1, three as 2 + 1. In float32 the tokens are the same too."""
    target, tolerance = make_target(), BACKENDS[backend][2]
    options = {"target": target, "trained": tiny_drafter_of(target, "medusa"), "limits": limits}
    two = bundle_of(backend, monkeypatch, tmp_path / "2", tensor_parallel=2, **options)
    assert not list((two.path / "rank1").glob("drafter.*"))
    plans = {"best first": {"construction": "best_first"}} if backend == "tensorrt_rtx" else {}
    output = tmp_path / "report.npz"
    done = run_ranks(2, RANKS_SCRIPT, two.path, json.dumps(plans), output)
    assert done.returncode == 0, done.stdout + done.stderr
    report = np.load(output)
    for number, step in enumerate(steps()):
        for name, want in zip(("logits", "hidden"), expected(make_target(), step), strict=True):
            error = np.abs(report[f"{name}{number}"] - want) / np.abs(want).max()
            assert error.max() < tolerance, (name, number)
    if plans:
        one = load_engine(bundle_of(backend, monkeypatch, tmp_path / "1", **options))
        assert json.loads(str(report["answers"])) == answers(one, plans)


def test_nccl_that_tensorrt_does_not_take(monkeypatch, tmp_path):
    options = {"target": grouped_target(), "drafts": False, "tensor_parallel": 2}
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, **options)
    monkeypatch.setattr(nccl, "communicator", object)
    monkeypatch.setattr(stand_in_tensorrt.Context, "set_communicator", lambda *_: False, raising=False)
    engine = TensorRTEngine(bundle, rank=1)
    with pytest.raises(BundleError, match=r"cannot take NCCL's communicator: .*; .* in LD_LIBRARY_PATH, or build .* 1"):
        engine.self_test()
    (bundle.path / "rank1" / "target.engine").write_bytes(b"plan")
    with pytest.raises(
        BundleError, match=r"cannot load .*; rebuild the bundle here; its ranks sum over NCCL, .*-parallel 1"
    ):
        TensorRTEngine(bundle, rank=1)


def test_a_precision_that_the_gpu_has_no_tensor_cores_for(monkeypatch, tmp_path):
    """Engines of TensorRT for RTX are built for any GPU."""
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, target=tiny_lm(), precision="bf16", drafts=False)
    stand_in_tensorrt.install(monkeypatch, "tensorrt_rtx", capability="7.5")
    with pytest.raises(
        BundleError, match=r"compute capability 7.5: bf16 engines need 8.0 or later; .* --precision int8"
    ):
        load_engine(bundle)


@pytest.fixture(scope="module")
def resampling(tmp_path_factory) -> list:
    """Engines of TensorRT for RTX and of torch whose drafters draft again from chains."""
    options = {"trained": tiny_drafter_of(tiny_target(), "hidden_state"), "resample_above": 0}
    options |= {"token_info": InfoForm.bf16, "limits": tiny.LIMITS}
    folder = tmp_path_factory.mktemp("resampling")
    with pytest.MonkeyPatch.context() as monkeypatch:
        ours = load_engine(bundle_of("tensorrt_rtx", monkeypatch, folder / "rtx", **options))
    return [ours, load_engine(tiny_bundle(folder / "torch", tiny_target(), "torch", **options))]


def test_drafting_again_gives_the_torch_backends_candidates(resampling):
    """From chains of several lengths, below other roots, in companies that fill a bucket or do not."""
    ours, torchs = (engine.drafters[METHOD] for engine in resampling)
    batch, rng = draft_batch(3), np.random.default_rng(5)
    batch.slots = np.array([3, 0, 1], np.int32)

    def compared(found: DraftCandidates, expected: DraftCandidates) -> DraftCandidates:
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4, rtol=1e-4)
        there = np.isfinite(expected.log_probs)
        np.testing.assert_array_equal(found.candidates[there], expected.candidates[there])
        np.testing.assert_array_equal(found.parents[there.any(-1)], expected.parents[there.any(-1)])
        return found

    drafted, expected = ours.draft(batch), torchs.draft(batch)
    chains = compared(drafted, expected).raw_logits.copy()
    assert chains.shape == (3, 4, 50)
    np.testing.assert_allclose(chains, expected.raw_logits, atol=1e-4, rtol=1e-4)
    for company, starts in (((0, 1, 2), (1, 3, 2)), ((2,), (1,)), ((1, 0), (2, 1)), ((0, 1, 2, 0, 1), (2, 1, 1, 3, 2))):
        left = [chains[b, start:] for b, start in zip(company, starts, strict=True)]
        roots = rng.integers(0, VOCAB, len(company)).astype(np.int32)
        again = compared(ours.resample(left, roots), torchs.resample(left, roots))
        assert again.candidates.shape == (len(company), 3, 3, 5)
    with pytest.raises(ValueError, match="1 chains of up to 4 levels, 1 roots: expected one of each for 1 to 9"):
        ours.resample([chains[0]], roots[:1])


def test_drafting_again_from_chains_changes_no_text(resampling):
    """And accepts what the torch backend does."""
    plan = DraftingPlan("best_first", budget=BudgetTable.constant(5), resample_above=0, skip_above=1)
    (tokens, found), (_, expected) = (generate(engine, plan) for engine in resampling)
    assert tokens == generate(resampling[0], None)[0]
    for counted in ("steps", "drafted", "accepted", "reused", "rows_executed"):
        assert getattr(found.totals, counted) == getattr(expected.totals, counted), counted


def test_a_step_is_padded_to_the_bucket_that_wastes_least(monkeypatch, tmp_path):
    engine = load_engine(bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False))
    chosen, step = [], Session.step
    monkeypatch.setattr(Session, "step", lambda self, number: chosen.append(number) or step(self, number))
    extents = engine._target._extents
    for rows in ([1], [2], [8], [1, 1, 1], [8, 8]):
        engine.execute(make_batch([chain(slot, [], [5] * n, causal=True) for slot, n in enumerate(rows)], words=1))
    assert [(extents.steps[n].sequences, extents.steps[n].rows) for n in chosen] == [
        *[(1, 1), (1, 2), (1, 8)],
        *[(4, 4), (2, 16)],
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_that_does_not_update_in_place_is_refused(backend, monkeypatch, tmp_path):
    bundle = bundle_of(backend, monkeypatch, tmp_path, drafts=False)
    named = tensorrt_target.named_caches

    def elsewhere(caches):
        return {name: cache.clone() if name == "v_cache.1" else cache for name, cache in named(caches).items()}

    monkeypatch.setattr(tensorrt_target, "named_caches", elsewhere)
    with pytest.raises(BundleError, match=r"the engine does not update v_cache\.1 in place; rebuild it with: "):
        load_engine(bundle)


def test_a_drafters_engine_that_does_not_update_in_place_is_refused(monkeypatch, tmp_path):
    drafter = tiny_drafter_of(tiny_target(), "eagle")
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, trained=drafter)
    named = tensorrt_drafter.named_caches
    monkeypatch.setattr(tensorrt_drafter, "named_caches", lambda caches: named(caches.clone()))
    with pytest.raises(BundleError, match="the engine of tiny does not update its caches in place; rebuild it with: "):
        load_engine(bundle)


def test_batches_beyond_the_limits_are_refused(monkeypatch, tmp_path):
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path))
    with pytest.raises(ValueError, match="slots is 5: expected 0 to 4"):
        engine.execute(make_batch([chain(5, [], [1])], words=1))
    with pytest.raises(ValueError, match=r"input_ids has shape \(1, 17\), which is beyond the shapes"):
        engine.execute(make_batch([chain(1, [], [1] * 17, causal=True)], words=1))


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"tensorrt": "10.16.1"}, r"was built by TensorRT 10\.16\.1, this is 11\.4\.0\.106; on this machine rebuild"),
        ({"compute_capability": "8.0"}, r"was built for a GPU of compute capability 8\.0, this one has 9\.0; on this"),
    ],
)
def test_engines_of_another_gpu_or_version_are_refused(monkeypatch, tmp_path, versions, message):
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False)
    assert bundle.manifest.versions["compute_capability"] == "9.0"
    manifest = bundle.manifest.model_copy(update={"versions": bundle.manifest.versions | versions})
    with pytest.raises(BundleError, match=message):
        load_engine(dataclasses.replace(bundle, manifest=manifest))


def test_an_engine_for_other_extents_is_refused(monkeypatch, tmp_path):
    """As many profiles as expected, one for fewer slots."""
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path)
    engine = bundle.path / f"drafter.{METHOD}.engine"
    head, _, network = engine.read_bytes().partition(b"\n")
    built = json.loads(head)
    assert built["profiles"][0]["tokens"] == [[1], [5], [5]]
    built["profiles"][0]["tokens"] = [[1], [4], [4]]
    engine.write_bytes(json.dumps(built).encode() + b"\n" + network)
    message = (
        r"drafter\.tiny\.engine takes tokens from \(1,\) to \(4,\) in profile 0, expected \(1,\) to \(5,\): rebuild"
    )
    with pytest.raises(BundleError, match=message):
        load_engine(bundle)


def test_an_engine_that_cannot_be_read_is_refused(monkeypatch, tmp_path):
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False)
    (bundle.path / "target.engine").write_bytes(b"plan")
    with pytest.raises(BundleError, match=r"TensorRT cannot load .*target.engine: magic tag does not match; rebuild"):
        load_engine(bundle)


def test_too_little_memory_at_load_says_what_would_fit(monkeypatch, tmp_path):
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("redraft.engines.tensorrt._allocate", full)
    with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed .* would fit"):
        load_engine(bundle)


@pytest.mark.parametrize("call", ["Runtime.deserialize_cuda_engine", "Engine.create_execution_context"])
def test_too_little_memory_inside_the_library_says_so_too(call, monkeypatch, tmp_path):
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False)
    monkeypatch.setattr(Messages, "text", "Requested size was 5 bytes: OutOfMemory")
    monkeypatch.setattr(f"tests.engines.stand_in_tensorrt.{call}", lambda *_: None)
    with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed .* would fit"):
        load_engine(bundle)


def test_an_address_that_is_not_taken_is_named(monkeypatch, tmp_path):
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False)
    monkeypatch.setattr(stand_in_tensorrt.Context, "set_tensor_address", lambda _, name, address: name != "k_cache.1")
    with pytest.raises(RuntimeError, match=r"TensorRT does not take the address of k_cache\.1: "):
        load_engine(bundle)


def test_an_engine_can_be_closed_twice(monkeypatch, tmp_path):
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path))
    for _ in range(2):
        engine.close()
    assert not engine.drafters


@pytest.mark.parametrize(
    ("driver", "devices", "torch_cuda", "message"),
    [
        (None, False, None, "driver is not loaded: .* install release 580 or later .*; .* --backend tensorrt_rtx"),
        (None, False, "13.0", "driver is not loaded"),
        ("580.95.05", False, None, "no GPU is visible: start the container with --gpus all; .* openvino's run on the"),
        ("575.57.08", True, None, r"the driver is 575\.57\.08: CUDA 13 needs release 580 or later"),
        ("580.95.05", True, None, "this torch was built for the CPU; .*pip install -r requirements-gpu.txt"),
        ("unreadable", True, None, "this torch was built for the CPU"),
        ("580.95.05", True, "13.0", "none of this machine's GPUs, and CUDA_VISIBLE_DEVICES is 7: .* name one"),
    ],
)
def test_without_a_gpu_the_reason_is_named(driver, devices, torch_cuda, message, monkeypatch, tmp_path):
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, drafts=False)
    monkeypatch.undo()
    stand_in_tensorrt.install_library(monkeypatch, "tensorrt_rtx")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(gpu, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    if driver:
        line = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build"
        (tmp_path / "version").write_text(f"{line}\nGCC version: gcc version 13.3.0\n")
    if devices:
        (tmp_path / "nvidia0").touch()
    with pytest.raises(BundleError, match=f"no CUDA device: .*{message}"):
        load_engine(bundle)


def test_the_report_says_what_was_built(monkeypatch, tmp_path):
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False)
    report = json.loads((bundle.path / "target.engine.json").read_text())
    layers = tiny_lm().config.num_layers
    names = ("TreeAttentionWrite", "TreeAttentionSplit", "TreeAttentionCombine")
    assert [report["layers"][name] for name in names] == [layers] * 3
    assert "TreeAttention" not in report["layers"]
