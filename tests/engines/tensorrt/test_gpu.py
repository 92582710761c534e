"""The TensorRT backends' path of a GPU, with a stand-in for one: where the host waits, and what CUDA graphs replay.

The slow cases would catch one more wait for the GPU in a step, which costs time and changes no output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redraft.bundle.budget import BudgetTable
from redraft.engines import load_engine
from redraft.engines.cuda import transfer
from redraft.engines.tensorrt import drafter as tensorrt_drafter
from redraft.engines.tensorrt import engine as tensorrt
from redraft.engines.tensorrt import session
from redraft.method import MethodPlan
from redraft.request import GenerateRequest
from redraft.scheduling.scheduler import Limits, Scheduler
from redraft.sequence import Sequence
from tests.conftest import slow
from tests.engines.scheduling import CODEC, METHOD, SAMPLINGS
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tensorrt.bundles import BACKENDS, LIMITS, bundle_of, recorded_steps
from tests.engines.tiny import Rows, chain, expected, make_batch, tiny_drafter_of


class StandIn:
    """torch, whose GPU is the CPU's memory: a graph keeps what is enqueued in its capture, and replays it."""

    def __init__(self) -> None:
        self.cuda, self.cuda_stream, self.events = self, 7, list[str]()
        self.capturing: list[Callable[[], bool]] | None = None

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def zeros(self, *size, pin_memory=False, **options) -> torch.Tensor:
        return torch.zeros(*size, **options)

    def empty(self, *size, pin_memory=False, **options) -> torch.Tensor:
        return torch.empty(*size, **options)

    def current_stream(self, device=None) -> StandIn:
        return self

    Stream = current_stream

    def wait_stream(self, other: StandIn) -> None:
        pass

    def stream(self, stream: StandIn):
        return nullcontext()

    def synchronize(self) -> None:
        self.events.append("wait")

    def CUDAGraph(self) -> SimpleNamespace:
        calls = list[Callable[[], bool]]()

        def replay() -> None:
            self.events.append("replay")
            assert all(call() for call in calls)

        return SimpleNamespace(calls=calls, replay=replay)

    @contextmanager
    def graph(self, graph: SimpleNamespace, stream: StandIn, capture_error_mode: str):
        self.events.append("capture")
        self.capturing = graph.calls
        try:
            yield
        finally:
            self.capturing = None


class HiddenWaits(TorchDispatchMode):
    """Operators that read a tensor on the host, for which it would wait for a GPU: masks as indices among them."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        indices = arguments[1] if function.name().startswith("aten::index") else ()
        masked = isinstance(indices, list) and any(x is not None and x.dtype == torch.bool for x in indices)
        if masked or function in self.READS:
            self.events.append(f"wait for {function}")
        return function(*arguments, **(options or {}))


class HostReads:
    """Records tensors' methods that copy to the host, which a GPU would be waited for, but within `allowed`."""

    def __init__(self, events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.events, self.inside = events, 0
        for name in ("cpu", "numpy", "tolist"):
            monkeypatch.setattr(torch.Tensor, name, self.recorded(name))

    def recorded(self, name: str) -> Callable:
        own = getattr(torch.Tensor, name)

        def read(tensor, *arguments, **options):
            self.events.extend([] if self.inside else [f"wait for {name}"])
            return own(tensor, *arguments, **options)

        return read

    def allowed(self, function: Callable) -> Callable:
        def call(*arguments, **options):
            self.inside += 1
            try:
                return function(*arguments, **options)
            finally:
                self.inside -= 1

        return call


@pytest.fixture
def gpu(monkeypatch) -> StandIn:
    """Where engines execute; tensors are on torch's CPU device all the same."""
    stand_in, device = StandIn(), SimpleNamespace(type="cuda")
    reads = HostReads(stand_in.events, monkeypatch)
    execute = reads.allowed(stand_in_tensorrt.Context.execute_async_v3)
    monkeypatch.setattr(transfer.Results, "fetch", reads.allowed(transfer.Results.fetch))

    def stream_of(own: torch.device) -> session.Stream:
        stream = session_stream(device)
        stream.device = own
        return stream

    def enqueue(context: stand_in_tensorrt.Context, stream: int) -> bool:
        assert stream == stand_in.cuda_stream
        if stand_in.capturing is not None:
            stand_in.capturing.append(lambda: execute(context, stream))
            return True
        stand_in.events.append("execute")
        return execute(context, stream)

    session_stream, results = session.Stream, transfer.Results
    for module in (session, transfer):
        monkeypatch.setattr(module, "torch", stand_in)
    for module in (tensorrt, tensorrt_drafter):
        monkeypatch.setattr(module, "Results", lambda _: results(device))
    monkeypatch.setattr(tensorrt, "Stream", stream_of)
    monkeypatch.setattr(stand_in_tensorrt.Context, "execute_async_v3", enqueue)
    return stand_in


@pytest.mark.parametrize("backend", ["tensorrt_rtx", slow("tensorrt")])
def test_a_step_waits_for_candidates_and_for_chosen_tokens(backend, gpu, monkeypatch, tmp_path):
    """Once for each, and for nothing else: with all samplings, prompts of one chunk and of several."""
    drafter = tiny_drafter_of(BACKENDS[backend][0](), "eagle")
    monkeypatch.setattr(session.Step, "capture", lambda _: None)
    engine = load_engine(bundle_of(backend, monkeypatch, tmp_path, trained=drafter))
    limits = Limits(LIMITS.slots, LIMITS.max_len, LIMITS.max_tree, LIMITS.prefill_chunk)
    for plans in ({METHOD: MethodPlan("best_first", budget=BudgetTable.constant(5))}, {}):
        scheduler, seen = Scheduler(engine, limits, plans), set[tuple[bool, tuple[str, ...]]]()
        for key, count in enumerate((20, 5, 16, 1)):
            prompt = list(range(1, count + 1))
            request = GenerateRequest(id=str(key), input_ids=prompt, max_tokens=4, sampling=SAMPLINGS[key])
            scheduler.submit(Sequence(key, request, prompt, CODEC, frozenset({0})))
        while not scheduler.idle:
            gpu.events.clear()
            drafted = scheduler.clock.draft_s
            with HiddenWaits(gpu.events):
                scheduler.step()
            waits = tuple(event for event in gpu.events if event.startswith("wait"))
            seen.add((scheduler.clock.draft_s > drafted, waits))
        assert seen == {(False, ("wait",)), *([(True, ("wait", "wait"))] if plans else [])}


@pytest.mark.parametrize(
    ("backend", "capturable"), [("tensorrt", True), ("tensorrt_rtx", True), ("tensorrt_rtx", False)]
)
def test_all_steps_are_captured_when_a_bundle_is_loaded(backend, capturable, gpu, monkeypatch, tmp_path):
    """Then they are replayed, with each step's own inputs, after its commits. A prefill never is, nor what TensorRT for
    RTX does not allow."""
    make_target, _, tolerance = BACKENDS[backend]
    bundle = bundle_of(backend, monkeypatch, tmp_path, drafts=False)
    monkeypatch.setattr(stand_in_tensorrt.Context, "is_stream_capturable", lambda *_: capturable)
    compiles, create = list[str](), stand_in_tensorrt.Engine.create_execution_context

    def recorded(own: stand_in_tensorrt.Engine, chosen):
        compiles.extend([] if isinstance(chosen, str) else [chosen.dynamic_shapes_kernel_specialization_strategy])
        return create(own, chosen)

    monkeypatch.setattr(stand_in_tensorrt.Engine, "create_execution_context", recorded)
    with recorded_steps() as prepared:
        engine = load_engine(bundle)
    steps = len({id(step) for _, step in prepared})
    assert compiles == (["eager"] * steps + ["lazy"] if backend == "tensorrt_rtx" else []), "steps, then prefill"
    assert gpu.events.count("capture") == capturable * steps
    assert not any(cache.any() for cache in engine.caches)

    def events(step: list[Rows]) -> list[str]:
        gpu.events.clear()
        batch = make_batch(step, words=1)
        batch.logit_rows = batch.logit_rows[::2]
        with HiddenWaits(gpu.events):
            logits, _ = engine.execute(batch)
        done = gpu.events.copy()
        want = expected(make_target(), step)[0][::2]
        assert np.abs(logits - want).max() < tolerance * np.abs(want).max()
        return done

    beyond = (16, 8, 8, 8, 8) if backend == "tensorrt" else (16,)
    for first in (1, 40, 70):
        prompts = [chain(slot, [], [first + slot + i for i in range(n)], causal=True) for slot, n in enumerate(beyond)]
        assert events(prompts) == ["execute", "wait"]
    context, commit = prompts[0].tokens, list[int]()
    for token in range(5, 9):
        step = Rows(0, context, [token, 3 * token, 99], [-1, 0, 0], commit)
        assert events([step]) == ["replay" if capturable else "execute", "wait"]
        context, commit = [*context, token, 99], [0, 2]
