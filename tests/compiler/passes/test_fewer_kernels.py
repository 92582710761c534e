"""Programs with fewer kernels: the same bits on the CPU, and the nodes that are left."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from redraft.compiler.passes.fewer_kernels import fuse
from redraft.model_defs.export.drafter import DrafterInputs
from redraft.model_defs.export.programs import export_drafter_torch, export_target_torch, in_precision
from redraft.model_defs.export.target import CacheShape
from redraft.model_defs.loops.beam_search import BeamSearch
from tests.engines.tiny import tiny_drafter_of, tiny_of, tiny_target

SHAPE = CacheShape(3, 40, 8)


def calls(program) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")


def arguments(target) -> tuple:
    config = target.config
    size = (3, config.num_kv_heads, SHAPE.rows, config.head_size)
    caches = [[torch.zeros(size).bfloat16() for _ in range(config.num_layers)] for _ in "kv"]
    ints = [[0, 1, 2, 0, 1], [0, 3, 5], [2, 0], [0, 0], [[0]] * 5, [], [0, 0, 0]]
    rows = [torch.tensor(values, dtype=torch.int32) for values in ints]
    return torch.tensor([5, 110, 7, 3, 9], dtype=torch.int32), rows, torch.arange(5, dtype=torch.int32), *caches


@pytest.mark.parametrize("layers", ["llama", "qwen3", "gemma3", "opt", "mixtral"])
def test_a_targets_results_stay_the_same_bit_for_bit(layers):
    target = (tiny_target() if layers == "llama" else tiny_of(layers)).bfloat16()
    before = export_target_torch(target, SHAPE)
    after = export_target_torch(target, SHAPE, rewrite=fuse)
    for ours, theirs in zip(after.module()(*arguments(target)), before.module()(*arguments(target)), strict=True):
        assert torch.equal(ours, theirs)
    counts = calls(after)
    norms = 0 if layers in ("gemma3", "opt") else 2 * target.config.num_layers  # Gemma 3 computes them in float32
    assert counts["redraft.add_norm.default"] == norms
    assert counts["redraft.silu_product.default"] == (0 if layers in ("gemma3", "opt") else 2)


class Odd(nn.Module):
    """What looks like it and is not: a broadcast sum, halves the other way round, a gate that others read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first, second = x.chunk(2, -1)
        gate = nn.functional.silu(first)
        total = first + second[:1]
        normed = nn.functional.rms_norm(total, (16,), self.weight, 1e-5)
        return [nn.functional.silu(second) * first, gate * second, gate, normed, total]


class Sum(nn.Module):
    """What it is, in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x + x, (32,), self.weight, 1e-5)


@pytest.mark.parametrize(
    ("module", "dtype", "fused"),
    [(Odd, torch.bfloat16, 0), (Sum, torch.float32, 0), (Sum, torch.bfloat16, 1)],
)
def test_what_only_looks_like_it_stays(module, dtype, fused):
    x = (torch.randn(3, 32).to(dtype),)
    program = torch.export.export(module().to(dtype), x)
    counts = calls(torch.export.export(fuse(program.module(check_guards=False)), x))
    assert sum(count for name, count in counts.items() if name.startswith("redraft")) == fused


@pytest.mark.parametrize("kind", ["recurrent", "eagle"])
def test_a_drafters_head_is_one_operator_a_level(kind):
    drafter = tiny_drafter_of(tiny_target(), kind)
    drafter.prepare(40, 2)
    loop = in_precision(BeamSearch(drafter, 3, 2, 5), torch.bfloat16)
    inputs = DrafterInputs.of(loop, torch.bfloat16).examples
    inputs[0] = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, after = export_drafter_torch(loop), export_drafter_torch(loop, fuse)
    ours, theirs = (program.module()([x.clone() for x in inputs])[1] for program in (after, before))
    assert torch.equal(ours[:, 0], theirs[:, 0]), "below, the order of equal tokens decides"
    counts = calls(after)
    assert counts["redraft.top_log_probs.default"] == 2
    assert not counts["aten.topk.default"] + counts["aten.log_softmax.int"]


class Head(nn.Module):
    """A choice that is a head's, and others that only look like one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.randperm(111).long())

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scores = x.float().log_softmax(-1)
        values, columns = scores.topk(4)
        others = scores.topk(4, largest=False), x.float().log_softmax(0).topk(4), x.float().topk(4)
        shifted = (self.ids + 1)[scores.topk(4)[1]].to(torch.int32)
        return [values, self.ids[columns].to(torch.int32), shifted, *(tensor for pair in others for tensor in pair)]


def test_what_only_looks_like_a_head_stays():
    x = torch.randperm(3 * 111, generator=torch.Generator().manual_seed(0)).reshape(3, 111) / 64
    x = (x[:, torch.arange(111)].bfloat16(),)
    module = Head()
    program = torch.export.export(module, x)
    after = torch.export.export(fuse(program.module(check_guards=False)), x)
    counts = calls(after)
    assert (counts["redraft.top_log_probs.default"], counts["aten.topk.default"]) == (1, 4)


def test_norms_of_heads_are_stored_in_float32():
    target = tiny_of("qwen3").bfloat16()
    program = export_target_torch(target, SHAPE, rewrite=fuse)
    tensors = program.state_dict | program.constants
    size = (target.config.head_size,)
    dtypes = [x.dtype for x in tensors.values() if isinstance(x, torch.Tensor) and x.shape == size]
    assert dtypes == [torch.float32] * 2 * target.config.num_layers
    assert "aten.to.dtype" not in calls(program)
