"""The reference backend: the module's numbers from an exported program, and the same as the embedded engine's.

The slow cases would catch a kind of drafter or construction whose padded rows change its drafts, or whose program is
in another precision than its bundle.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from redraft.batch import DraftBatch, DraftCandidates
from redraft.bundle.budget import BudgetTable
from redraft.engines import load_engine
from redraft.engines.api import ResamplingEngine
from redraft.engines.cuda.buckets import Bucket, decode_buckets, draft_buckets
from redraft.engines.cuda.device import describe
from redraft.engines.cuda.graphs import CudaGraphCache
from redraft.engines.cuda.transfer import Results
from redraft.engines.features import on_host
from redraft.engines.memory import cache_bytes, output_bytes
from redraft.errors import BundleError
from redraft.method import MethodPlan
from redraft.plugins.cuda.compile import nvcc
from tests.engines.draws import LEVELS, SUPPORT, assert_same_draws, draft_batch, sampling_of
from tests.engines.graphs import FakeGraphs
from tests.engines.scheduling import TABLE, generate
from tests.engines.test_context_drafters import Drafting, arrays_of, draft
from tests.engines.tiny import (
    CONTEXT_DRAFTERS,
    LIMITS,
    METHOD,
    VOCAB,
    chain,
    expected,
    make_batch,
    random_tree,
    tiny_bundle,
    tiny_drafter_of,
    tiny_lm,
    tiny_target,
)
from tests.tiers import slow, slow_but

KINDS = ["recurrent", "medusa", *CONTEXT_DRAFTERS]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_bundle(tmp_path_factory.mktemp("torch"), tiny_target(), backend="torch")


@pytest.fixture(scope="module")
def engine(bundle):
    return load_engine(bundle)


@pytest.fixture(scope="module", params=slow_but(["recurrent"], KINDS))
def bundle_of_kind(request, target, tmp_path_factory):
    """With a drafter of every kind."""
    trained = tiny_drafter_of(target, request.param)
    return tiny_bundle(tmp_path_factory.mktemp("kind"), target, "torch", trained=trained)


def test_trees_prefill_and_commits_agree_with_the_module(engine, target):
    rng = np.random.default_rng(0)
    contexts = {slot: rng.integers(0, VOCAB, n).tolist() for slot, n in ((1, 12), (4, 5))}
    engine.execute(make_batch([chain(slot, [], tokens, causal=True) for slot, tokens in contexts.items()]))
    first = random_tree(rng, 1, contexts[1], 35)
    step = [first, chain(7, [], rng.integers(0, VOCAB, 16).tolist(), causal=True), random_tree(rng, 4, contexts[4], 3)]
    logits, hidden = engine.execute(make_batch(step))
    want = expected(target, step)
    np.testing.assert_allclose(logits, want[0], atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(hidden, want[1], atol=1e-4, rtol=1e-5)

    path = first.ancestors(34)[::-1]
    accepted = contexts[1] + [first.tokens[row] for row in path]
    following = dataclasses.replace(random_tree(rng, 1, accepted, 4), commit=path)
    np.testing.assert_allclose(
        engine.execute(make_batch([following]))[0], expected(target, [following])[0], atol=1e-4, rtol=1e-5
    )


def test_drafts_are_those_of_the_embedded_engine(engine, fp32_bundle):
    hidden = np.random.default_rng(1).standard_normal((2, 96), dtype=np.float32)
    batch = DraftBatch.of_roots(hidden, np.array([3, 110], np.int32))
    ours, reference = load_engine(fp32_bundle).drafters[METHOD].draft(batch), engine.drafters[METHOD].draft(batch)
    present = np.isfinite(reference.log_probs)
    np.testing.assert_array_equal(ours.candidates[present], reference.candidates[present])
    np.testing.assert_allclose(ours.log_probs, reference.log_probs, atol=1e-4)
    np.testing.assert_array_equal(ours.parents[:, 1], reference.parents[:, 1])


def test_bf16(tmp_path, target):
    """Logits, and drafts from hidden states that are on the device: log-probabilities of all that the drafter knows sum
    to 1, as they are float32's."""
    engine = load_engine(tiny_bundle(tmp_path, tiny_target(), backend="torch", precision="bf16", candidates=50))
    step = [chain(0, [], [5, 6, 7], causal=True)]
    logits, hidden = engine.execute(make_batch(step))
    want = expected(target, step)[0]
    assert np.abs(logits - want).max() < 0.1 * np.abs(want).max()
    assert hidden.dtype == torch.bfloat16
    drafted = engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden[1:], np.array([3, 110], np.int32)))
    np.testing.assert_allclose(np.exp(drafted.log_probs[:, 0, 0]).sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_programs_of_drafters_are_in_the_bundles_precision(tmp_path):
    """Half the bytes; what the kernels and the tables of token info need in float32 stays so."""
    sizes = {}
    for precision in ("fp32", "bf16"):
        target = tiny_target()
        trained = tiny_drafter_of(target, "hidden_state")
        bundle = tiny_bundle(tmp_path / precision, target, "torch", precision, trained=trained)
        program = torch.export.load(bundle.path / f"drafter.{METHOD}.pt2")
        tensors = program.state_dict | {n: x for n, x in program.constants.items() if isinstance(x, torch.Tensor)}
        floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
        kept = {name for name, x in floats.items() if x.dtype == torch.float32}
        sizes[precision] = sum(x.numel() * x.element_size() for name, x in floats.items())
        if precision == "bf16":
            assert {name.split(".")[-1] for name in kept} == {"rope_table", "scales"}
    assert sizes["bf16"] < 0.6 * sizes["fp32"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_agrees_with_the_cpu(precision, tmp_path, monkeypatch):
    """By the kernels and CUDA graphs, in two steps of changing company; head size 64."""
    target = tiny_lm()
    bundle = tiny_bundle(tmp_path, target, "torch", precision, trained=tiny_drafter_of(target, "eagle"))
    found = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("redraft.engines.torch.available_device", lambda device=device: torch.device(device))
        engine, rng, given = load_engine(bundle), np.random.default_rng(2), []
        sequences = [Drafting(slot, torch.zeros(0, 56)) for slot in (8, 0, 3)]
        for company in ([0], [1, 0, 2], [2, 0]):
            trees = [random_tree(rng, sequences[place].slot, [], 3 + place) for place in company]
            given += copied(engine.execute(make_batch(trees)))
            for place in company:
                sequences[place].grow(rng, 4)
            given.append(draft_for(engine, [sequences[place] for place in company]).log_probs[:, 0, 0])
        found.append(given)
    for cpu, gpu in zip(*found, strict=True):
        np.testing.assert_allclose(gpu, cpu, atol=1e-3 if precision == "fp32" else 0.1 * np.abs(cpu).max())


def copied(given) -> list[np.ndarray]:
    """Logits and hidden states, which the next call overwrites."""
    return [on_host(rows).copy() for rows in given]


def unpadded(monkeypatch) -> None:
    monkeypatch.setattr("redraft.engines.torch.fitting", lambda _, sequences, rows: Bucket(sequences, rows))


def test_padding_changes_nothing(bundle_of_kind, monkeypatch):
    """Padded rows, pairs and sequences: the same logits, hidden states, drafts and caches, in changing company."""
    found = []
    for padded in (True, False):
        if not padded:
            unpadded(monkeypatch)
        engine, rng, given = load_engine(bundle_of_kind), np.random.default_rng(2), []
        sequences = [Drafting(slot) for slot in (8, 0, 3, 5, 1)]
        for company, counts in (([0], [5]), ([1, 0, 2, 3, 4], [1, 2, 9, 1, 4]), ([2, 4, 3], [1, 6, 1])):
            steps = [random_tree(rng, sequences[place].slot, [], 1 + 7 * place) for place in company]
            given += copied(engine.execute(make_batch(steps)))
            for place, count in zip(company, counts, strict=True):
                sequences[place].grow(rng, count)
            given += arrays_of(draft_for(engine, [sequences[place] for place in company]))
        given += [cache[..., :80, :].float().numpy() for cache in engine.caches[0] + engine.caches[1]]
        given += [cache[:9].float().numpy() for cache in engine.drafters[METHOD].caches]
        found.append(given)
    for padded, plain in zip(*found, strict=True):
        assert padded.shape == plain.shape
        np.testing.assert_allclose(padded, plain, rtol=5e-5, atol=1e-5)


def draft_for(engine, sequences: list[Drafting]) -> DraftCandidates:
    """A draft, for any kind of drafter."""
    if engine.drafters[METHOD].reads_context:
        return draft(engine, sequences)
    hidden = np.stack([s.hidden[-1].numpy() for s in sequences])
    roots = np.array([s.tokens[-1] for s in sequences], np.int32)
    return engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden, roots))


@pytest.mark.parametrize("construction", slow_but(["stochastic_beam"], LEVELS))
def test_padding_changes_no_draws(construction, target, tmp_path, monkeypatch):
    plan = {"levels": LEVELS[construction], "support": SUPPORT, "construction": construction, "ngram": False}
    bundle, drawn = tiny_bundle(tmp_path, target, "torch", **plan), []
    batch, sampling = draft_batch(5), sampling_of(construction, 5)
    for padded in (True, False):
        if not padded:
            unpadded(monkeypatch)
        drawn.append(load_engine(bundle).drafters[METHOD].draw(batch, sampling))
    assert_same_draws(*drawn)


@pytest.fixture
def graphs(monkeypatch):
    """As on a GPU: what bundles are loaded with from now on."""
    graphs = FakeGraphs()
    monkeypatch.setattr("redraft.engines.torch.available_graphs", lambda _: graphs)
    return graphs


@pytest.mark.parametrize("bundle_of_kind", ["recurrent", slow("hidden_state"), slow("eagle")], indirect=True)
def test_all_graphs_are_captured_at_load_from_the_largest_down(bundle_of_kind, graphs):
    """No step and no draft captures another one, and the caches are as they were."""
    engine = load_engine(bundle_of_kind)
    steps, drafter = decode_buckets(LIMITS), engine.drafters[METHOD]
    drafts = draft_buckets(LIMITS, drafter.reads_context)
    again = len(drafter.resamples) if isinstance(drafter, ResamplingEngine) and drafter._chains else 0
    captured = len(steps) + len(drafts) + again
    assert graphs.captured == captured == len(engine.steps) + len(drafter.drafts) + again
    assert [shapes[0] for shapes in graphs.results[: len(steps)]] == [(bucket.rows, VOCAB) for bucket in steps]
    assert graphs.results[len(steps)][0][0] == LIMITS.slots
    assert not any(cache.any() for cache in engine.caches[0] + engine.caches[1])
    assert not any(cache[: LIMITS.slots].any() for cache in drafter.caches)
    tokens, scheduler = generate(engine, MethodPlan(construction="best_first", budget=TABLE))
    assert graphs.captured == captured
    assert graphs.replayed > scheduler.totals.steps
    assert tokens == generate(engine, None)[0]


def test_steps_share_the_memory_of_their_results(bundle, graphs):
    engine = load_engine(bundle)
    logits, hidden = engine.steps.outputs
    assert len(logits) == len(hidden) == LIMITS.slots * LIMITS.max_tree
    assert sum(output.numel() * output.element_size() for output in (logits, hidden)) == output_bytes(bundle.config)
    rng = np.random.default_rng(0)
    for rows in (1, 9, 40):
        assert engine.execute(make_batch([random_tree(rng, 0, [], rows)]))[1].data_ptr() == hidden.data_ptr()
    assert engine.execute(make_batch([chain(0, [], [5] * 9, causal=True)]))[1].data_ptr() == hidden.data_ptr()
    prompt = make_batch([chain(0, [], [5] * 9, causal=True)])
    prompt.logit_rows = prompt.logit_rows[-1:]
    assert engine.execute(prompt)[1].data_ptr() != hidden.data_ptr()


def test_too_little_memory_for_the_graphs_says_what_would_fit(bundle, monkeypatch):
    """Nothing is given up and tried again."""
    for room in (0, 3):
        graphs = FakeGraphs(room)
        monkeypatch.setattr("redraft.engines.torch.available_graphs", lambda _, graphs=graphs: graphs)
        with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed"):
            load_engine(bundle)
        assert len(graphs.results) == room + 1


def test_a_bundle_of_another_torch_names_the_command(bundle, monkeypatch):
    monkeypatch.setattr("redraft.engines.torch.load_program", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("torch.__version__", "2.11.1+cu130")
    with pytest.raises(
        BundleError, match=r"was exported by torch 2\.\d+.*, this is 2\.11\.1.* rebuild it with: python "
    ):
        load_engine(bundle)
    versions = bundle.manifest.versions | {"torch": "2.11.0"}
    manifest = bundle.manifest.model_copy(update={"versions": versions})
    with pytest.raises(pytest.fail.Exception):
        load_engine(dataclasses.replace(bundle, manifest=manifest))


PLANS = {
    "best first": {"construction": "best_first", "budget": TABLE},
    "beams and n-grams": {"construction": "beam", "ngram": True, "budget": BudgetTable.constant(12)},
}


@pytest.fixture
def overwritten(monkeypatch):
    """As on a GPU, where graphs share their memory: a call of any function overwrites all results of the last one, but
    not what was fetched of them."""
    call, last = CudaGraphCache.__call__, list[torch.Tensor]()

    def calling(calls, inputs, rows):
        assert "features" not in inputs or not (inputs["features"] == -1).all(1).any()
        found = call(calls, inputs, rows)
        for tensor in last:
            tensor.fill_(-1)
        last[:] = found
        return found

    monkeypatch.setattr(CudaGraphCache, "__call__", calling)
    monkeypatch.setattr(Results, "fetch", lambda self, outputs: [output.numpy().copy() for output in outputs])


@pytest.mark.parametrize("kind", ["recurrent", slow("eagle"), slow("draft_lm")])
def test_the_scheduler_speculates_to_the_same_text(kind, target, tmp_path, overwritten):
    """Whether tokens are chosen on the device or on the host, from logits; what crosses the bus is as said."""
    bundle = tiny_bundle(tmp_path, target, "torch", trained=tiny_drafter_of(target, kind))
    engine, fetched = load_engine(bundle), list[tuple[int, int]]()
    execute = engine.execute

    def counted(batch, samplers):
        rows, hidden = execute(batch, samplers)
        owners = np.searchsorted(batch.row_offsets, batch.logit_rows, side="right") - 1
        fetched.append((len(rows._logits), sum(samplers[owner] is None for owner in owners)))
        assert isinstance(hidden, torch.Tensor)
        return rows, hidden

    engine.execute = lambda batch, samplers: execute(batch)
    expected = generate(engine, None)[0]
    engine.execute = counted
    assert generate(engine, None)[0] == expected
    for name, plan in PLANS.items():
        tokens, scheduler = generate(engine, MethodPlan(**plan))
        assert tokens == expected, name
        assert scheduler.totals.drafted > scheduler.totals.accepted
    assert all(logits == of_penalized for logits, of_penalized in fetched)
    assert {0} < {logits for logits, _ in fetched}


@pytest.mark.parametrize("construction", ["stochastic_beam", slow("independent")])
def test_rejection_takes_the_same_tokens_from_logits_of_its_rows(construction, target, tmp_path, overwritten):
    """The device gives logits where sampled requests need them, and tokens to greedy ones."""
    levels = {"construction": construction, "levels": LEVELS[construction], "support": SUPPORT}
    verification = "recursive_rejection" if construction == "stochastic_beam" else "k_seq"
    plan = MethodPlan(**levels, verification=verification, budget=BudgetTable.constant(7))
    found = []
    for backend in ("torch", "openvino"):
        engine = load_engine(tiny_bundle(tmp_path / backend, target, backend, verification=verification, **levels))
        found.append(generate(engine, plan)[0])
    assert found[0] == found[1]


def test_programs_hold_weights_and_no_caches(tmp_path):
    """Those that they were exported with are as large as the limits ask."""
    few, many = (
        tiny_bundle(tmp_path / str(slots), tiny_target(), "torch", limits=LIMITS.model_copy(update={"slots": slots}))
        for slots in (2, 200)
    )
    for program in few.path.glob("*.pt2"):
        assert (many.path / program.name).stat().st_size < program.stat().st_size + 10_000


def test_what_a_gpu_cannot_run_is_refused(bundle, monkeypatch):
    monkeypatch.setattr("redraft.engines.torch.available_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    with pytest.raises(BundleError, match=r"Tesla T4 has compute capability 7\.5: the CUDA kernels need 8\.0 or later"):
        load_engine(bundle)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (10, 0))
    with pytest.raises(
        BundleError, match=r"heads of size 32, and the CUDA kernels take \(64, 128\); an empty CUDA_VIS"
    ):
        load_engine(bundle)
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    nvcc.cache_clear()
    with pytest.raises(BundleError, match=r"nvcc not found at NVCC=/nowhere/nvcc.*pip install"):
        load_engine(bundle)
    nvcc.cache_clear()


def test_too_little_memory_of_a_gpu_says_what_would_fit(bundle, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("redraft.engines.torch.available_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("redraft.engines.torch.require_kernels", lambda *_: None)
    monkeypatch.setattr("redraft.engines.torch.available_graphs", lambda _: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "the GPU")
    monkeypatch.setattr("redraft.engines.memory.DRAW_BYTES", 0)  # of so small a target more than all the rest
    size = sum(file.stat().st_size for file in bundle.path.glob("*.pt2"))
    least = size + cache_bytes(bundle.config) + output_bytes(bundle.config)
    loads = []
    monkeypatch.setattr("redraft.engines.torch.load_program", lambda *_: loads.append(0) or full())
    for free, remedy in (
        (least, r"--slots \d would fit"),
        (least - 1, r"--slots \d would fit"),
        (size, "no limits would fit beside the weights"),
    ):
        monkeypatch.setattr("redraft.engines.cuda.device.free_bytes", lambda _, free=free: free)
        with pytest.raises(
            BundleError, match=rf"does not fit this GPU: about .* \(weights {size / 1e9:.2f}.*; {remedy}"
        ):
            load_engine(bundle)
    assert len(loads) == 1, "what cannot fit is refused before anything is loaded"


@pytest.mark.slow
def test_too_little_memory_of_a_gpu_in_a_step_says_so_too(target, monkeypatch, tmp_path):
    """In the target's, in both of a drafter's, and where tokens are chosen."""
    options = {"trained": tiny_drafter_of(target, "hidden_state"), "resample_above": 0}
    engine = load_engine(tiny_bundle(tmp_path, target, "torch", **options))
    drafter, tree = engine.drafters[METHOD], make_batch([chain(0, [], [5, 6, 7])])

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def refused(call):
        with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed"):
            call()

    with monkeypatch.context() as patch:
        patch.setattr("redraft.engines.torch.sample", full)
        refused(lambda: engine.execute(tree))
    monkeypatch.setattr(CudaGraphCache, "eager", full)
    prompt = make_batch([chain(0, [], [5] * 9)])
    prompt.logit_rows = prompt.logit_rows[-1:]
    refused(lambda: engine.execute(prompt))
    monkeypatch.setattr(CudaGraphCache, "__call__", full)
    refused(lambda: drafter.draft(draft_batch(3)))
    refused(lambda: drafter.resample([np.zeros((1, 50), np.float32)], np.zeros(1, np.int32)))


def test_batches_outside_of_the_limits_are_refused_before_the_kernels_see_them(bundle, monkeypatch):
    """The CUDA kernels clamp, and say nothing."""
    engine = load_engine(bundle)
    monkeypatch.setattr(CudaGraphCache, "__call__", lambda *_: pytest.fail("executed"))
    batch = make_batch([chain(0, [], [5, 6, 7])])
    batch.slots = np.full(1, LIMITS.slots, np.int32)
    with pytest.raises(ValueError, match="slots"):
        engine.execute(batch)


def test_closing_frees_what_drafters_hold(tmp_path, target):
    trained = tiny_drafter_of(target, "eagle")
    engine = load_engine(tiny_bundle(tmp_path, target, "torch", trained=trained))
    held = [weakref.ref(tensor) for tensor in engine.drafters[METHOD].caches]
    assert held
    gc.disable()
    try:
        engine.close()
        assert not any(reference() is not None for reference in held)
    finally:
        gc.enable()


def test_what_executes_is_said_and_why_it_is_no_gpu(bundle, monkeypatch, tmp_path, capfd):
    """Where the driver or torch's CUDA build is there, and nobody hides the GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("redraft.engines.cuda.device.DRIVER_FILE", tmp_path / "version")
    said = []
    for cuda, hidden in ((None, False), ("13.0", False), ("13.0", True)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        if hidden:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        load_engine(bundle)
        said.append(capfd.readouterr().err.removeprefix(f"{bundle.path} executes on the CPU").strip())
    assert said[0] == said[2] == ""
    assert said[1].startswith(", without a GPU: NVIDIA's driver is not loaded: on a machine with a GPU install release")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "the GPU")
    assert describe(torch.device("cuda")) == "the GPU"
