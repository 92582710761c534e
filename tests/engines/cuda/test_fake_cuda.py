"""The exported programs on fake CUDA tensors: shapes, dtypes and devices as on a GPU, without its numbers.

Slow, as each drafter is exported and traced. It would catch a tensor that a kernel gets in another dtype, or from the
other device, than it was declared with: on the CPU nothing shows it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.export.passes import move_to_device_pass

from redraft.batch import DraftBatch, DraftSampling
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.engines import load_engine
from redraft.engines.cuda.graphs import CudaGraphCache, Inputs
from redraft.engines.torch import TorchEngine
from redraft.plugins.cuda.launch import TORCH_DTYPES
from redraft.plugins.operators.add_norm.cuda import add_norm as add_norm_kernel
from redraft.plugins.operators.add_norm.torch_op import add_norm
from redraft.plugins.operators.beam_step import torch_op as beam_op
from redraft.plugins.operators.beam_step.cuda import beam_step
from redraft.plugins.operators.draft_rows import torch_op as rows_op
from redraft.plugins.operators.draft_rows.cuda import draft_rows
from redraft.plugins.operators.silu_product.cuda import silu_product as silu_product_kernel
from redraft.plugins.operators.silu_product.torch_op import silu_product
from redraft.plugins.operators.top_log_probs.cuda import top_log_probs as top_log_probs_kernel
from redraft.plugins.operators.top_log_probs.torch_op import top_log_probs
from redraft.plugins.operators.tree_attention import torch_op
from tests.engines.draws import LEVELS, SUPPORT
from tests.engines.tiny import VOCAB, bundle_of_methods, chain, make_batch, tiny_drafter_of, tiny_lm

pytestmark = pytest.mark.slow

CUDA = torch.device("cuda", 0)
HIDDEN = tiny_lm().config.hidden_size
DRAWS = ("independent",)
METHODS = {
    "fp32": ("eagle",),
    "bf16": ("recurrent", "medusa", "hidden_state", "eagle", "draft_lm", *DRAWS),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPERATORS = {
    add_norm: add_norm_kernel,
    silu_product: silu_product_kernel,
    top_log_probs: top_log_probs_kernel,
    beam_op._beam_step: lambda *given: tuple(beam_step(*given)),
    rows_op._draft_rows: lambda *given: tuple(draft_rows(*given)),
}
"""What kernels with declarations compute, beside attention, by operator"""
HOT = 50
"""Tokens that a tiny drafter knows."""
COUNT = 3
"""Sequences of a batch."""


@pytest.fixture(scope="module", params=METHODS)
def bundle(request, tmp_path_factory):
    target = tiny_lm()
    methods: dict[str, tuple[Any, dict[str, Any]]] = {}
    for name in METHODS[request.param]:
        if name in DRAWS:
            plan = {"construction": name, "levels": LEVELS[name], "support": SUPPORT, "ngram": False}
            methods[name] = tiny_drafter_of(target, "recurrent"), plan
        else:
            again = {"resample_above": 0} if name == "hidden_state" else {}
            methods[name] = tiny_drafter_of(target, name), {"beam_length": 2, **again}
    folder = tmp_path_factory.mktemp("fake")
    return bundle_of_methods(folder, target, methods, backend="torch", precision=request.param)


def declared(kernel, inputs, attributes) -> list[torch.Tensor]:
    """What the launch of a kernel checks and gives, without the launch."""
    for argument, tensor in zip(kernel.inputs, inputs, strict=True):
        wanted = (TORCH_DTYPES[argument.dtype], True, "cuda")
        found = (tensor.dtype, tensor.is_contiguous(), tensor.device.type)
        assert found == wanted, f"{kernel.name}: {argument.name}"
    sizes = kernel.sizes([tensor.shape for tensor in inputs], attributes)
    names = [argument.name for argument in kernel.inputs]
    return [
        inputs[names.index(output.in_place_of)]
        if output.in_place_of
        else torch.empty([sizes[n] for n in output.shape], dtype=TORCH_DTYPES[output.dtype], device=CUDA)
        for output in kernel.outputs
    ]


def fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A CUDA tensor like this one, which is real or of a mode of its own."""
    with tensor.fake_mode if isinstance(tensor, FakeTensor) else mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)


@pytest.fixture
def engine(bundle, monkeypatch):
    """Loaded onto a GPU that there is not. Its calls run the programs and raise `Ran`."""
    mode = FakeTensorMode()

    def move(program, device):
        """`Tensor.to` would initialize CUDA."""
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", lambda tensor, _: fake(tensor, mode))
            return move_to_device_pass(program, device)

    def load(path, load=torch.export.load):
        with unset_fake_temporarily():
            return load(path)

    def call(calls: CudaGraphCache, inputs: Inputs, sizes: dict[str, int] | None = None):
        """The function on zeros, with the inputs' shapes and dtypes."""
        given = {}
        for name, x in inputs.items():
            dtype = torch.from_numpy(x).dtype if isinstance(x, np.ndarray) else x.dtype
            given[name] = torch.zeros((sizes or {}).get(name, len(x)), *x.shape[1:], dtype=dtype, device=CUDA)
        raise Ran(calls._function(given))

    monkeypatch.setattr(torch.export, "load", load)
    monkeypatch.setattr("redraft.engines.torch.move_to_device_pass", move)
    monkeypatch.setattr("redraft.engines.torch.available_device", lambda: CUDA)
    monkeypatch.setattr("redraft.engines.torch.available_graphs", lambda _: None)
    monkeypatch.setattr("redraft.engines.torch.require_kernels", lambda *_: None)
    monkeypatch.setattr("redraft.engines.torch.draws_on", lambda _: True)
    monkeypatch.setattr("redraft.engines.cuda.device.free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "no GPU")
    monkeypatch.setattr(CudaGraphCache, "__call__", call)
    monkeypatch.setattr(CudaGraphCache, "eager", call)
    monkeypatch.setattr(TorchEngine, "self_test", lambda _: None)
    monkeypatch.setattr(torch, "as_tensor", lambda given, device: given)
    by_kernels = OPERATORS | {torch_op.tree_attention: partial(torch_op.by_kernels, run=declared)}
    for operator in OPERATORS:
        monkeypatch.setattr(f"redraft.plugins.operators.{operator._name.strip('_')}.cuda.run", declared)
    with mode:
        engine = load_engine(bundle)
        usual = {operator: operator._abstract_fn for operator in by_kernels}
        for operator, function in by_kernels.items():
            torch.library.register_fake(operator, function)
        yield engine
        for operator, function in usual.items():
            torch.library.register_fake(operator, function)


def ran(call) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what the call's program gives."""
    with pytest.raises(Ran) as raised:
        call()
    (outputs,) = raised.value.args
    assert all(output.device.type == "cuda" for output in outputs)
    return [(tuple(output.shape), output.dtype) for output in outputs]


def test_every_program_runs(bundle, engine: TorchEngine):
    """Those of the target and of all drafters, of one engine, as it takes long to load."""
    check_steps(bundle, engine)
    check_drafts(bundle, engine)


def check_steps(bundle, engine: TorchEngine) -> None:
    """A decode step, and a step with a part of a prompt, in their buckets."""
    dtype = DTYPES[bundle.config.precision]
    tree, prompt = chain(0, [], [5, 6, 7]), chain(1, [], [4] * 9, causal=True)
    assert ran(lambda: engine.execute(make_batch([tree]))) == [((4, VOCAB), dtype), ((4, HIDDEN), dtype)]
    batch = make_batch([tree, prompt])
    batch.logit_rows = batch.logit_rows[:3]
    assert ran(lambda: engine.execute(batch)) == [((16, VOCAB), dtype), ((16, HIDDEN), dtype)]


def check_drafts(bundle, engine: TorchEngine) -> None:
    """From hidden states in the bundle's precision; what comes to the host is float32 and int32."""
    hidden = torch.zeros(COUNT, HIDDEN, dtype=DTYPES[bundle.config.precision], device=CUDA)
    batch, methods, count = DraftBatch.of_roots(hidden, np.ones(COUNT, np.int32)), bundle.config.methods, COUNT + 1
    for name, drafter in engine.drafters.items():
        if name in DRAWS:
            rows = sum(RANDOM_CONSTRUCTIONS[name].shape(LEVELS[name]).noise_rows)
            noise, ones = np.zeros((COUNT, rows, SUPPORT), np.float32), np.ones(COUNT, np.float32)
            sampling = DraftSampling(noise, ones, np.zeros(COUNT, np.int32), ones)
            found = ran(lambda drafter=drafter, sampling=sampling: drafter.draw(batch, sampling))
            assert [dtype for _, dtype in found] == [torch.int32, torch.float32, torch.int32], name
            continue
        levels = methods[name].beam_length
        nodes, levels_of_all = (count, levels, methods[name].beam_width), count * levels
        candidates = (*nodes, methods[name].candidates)
        expected = [(candidates, torch.int32), (candidates, torch.float32), (nodes, torch.int32)]
        chained = [((levels_of_all, HOT), torch.float32)] if name == "hidden_state" else []
        assert ran(lambda drafter=drafter: drafter.draft(batch)) == expected + chained, name
        if chained:
            chains, roots = [np.zeros((1, HOT), np.float32)] * COUNT, np.zeros(COUNT, np.int32)
            found = ran(lambda drafter=drafter, chains=chains, roots=roots: drafter.resample(chains, roots))
            assert [dtype for _, dtype in found] == [torch.int32, torch.float32, torch.int32]


class Ran(Exception):
    """What a program gave."""
