"""Programs in FP8 against the same module whose products are replaced by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from redraft.bundle.backends import Precision
from redraft.compiler.passes import float8
from redraft.compiler.writers.torch import rewritten
from redraft.model_defs.export.programs import export_target_torch
from redraft.plugins.operators.fp8_linear.reference import E4M3, fp8_linear, quantize_rows
from tests.compiler.passes.test_fewer_kernels import SHAPE, arguments, calls
from tests.engines.tiny import tiny_of

HIDDEN, ROWS, HEAD = 40, 56, 111
"""None but the second is a multiple of 8 numbers that the operator takes, 16"""


class Module(nn.Module):
    """A product with a bias, two with the halves of one matrix, a head that is the embedding too, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(HEAD, HIDDEN)
        self.up = nn.Linear(HIDDEN, ROWS)
        self.fuse = nn.Linear(2 * ROWS, HIDDEN, bias=False)
        self.router = nn.Linear(HIDDEN, 5, bias=False)
        self.head = nn.Linear(HIDDEN, HEAD, bias=False)
        self.head.weight = self.embedding.weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.linear(self.embedding(ids), self.up.weight, self.up.bias)
        weight = self.fuse.weight
        for _ in range(2):
            y = self.linear(x, weight[:, :ROWS]) + self.linear(x, weight[:, ROWS:])
        return [
            self.linear(y, self.head.weight.to(y.dtype)),
            F.linear(y, self.router.weight),
            y @ self.embedding(ids).T,
        ]


class ByHand(Module):
    """What the pass makes of it. A half has the scales of its own rows."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        codes, scale = quantize_rows(weight)
        more = -len(weight) % 16
        padded = F.pad(codes.float(), (0, -weight.shape[1] % 16, 0, more)).to(E4M3)
        bias = bias if bias is None else F.pad(bias, (0, more))
        out = fp8_linear(F.pad(x, (0, -x.shape[-1] % 16)), padded, F.pad(scale, (0, more), value=1.0), bias)
        return out[..., : len(weight)]


@pytest.fixture
def program():
    """Of a random module, exported, in FP8, and exported again."""
    torch.manual_seed(0)
    module = Module().bfloat16().eval().requires_grad_(False)
    ids, shapes = torch.tensor([3, 110, 7]), ({0: Dim("T", min=1)},)
    rewritten = float8.quantize(torch.export.export(module, (ids,), dynamic_shapes=shapes).module(check_guards=False))
    return module, torch.export.export(rewritten, (ids,), dynamic_shapes=shapes)


def test_products_with_constants_are_in_fp8_and_nothing_else(program):
    module, exported = program
    by_hand = ByHand().bfloat16().eval()
    by_hand.load_state_dict(module.state_dict())
    for ids in (torch.tensor([5]), torch.tensor([1, 2, 3, 4, 5, 6, 7])):
        for ours, expected in zip(exported.module()(ids), by_hand(ids), strict=True):
            assert torch.equal(ours, expected)


def test_a_matrix_is_stored_once_and_its_floats_only_where_others_read_them(program, tmp_path):
    _, exported = program
    torch.export.save(exported, tmp_path / "p.pt2")
    tensors = torch.export.load(tmp_path / "p.pt2").state_dict
    shapes = sorted(tuple(x.shape) for x in tensors.values() if x.dtype == E4M3)
    assert shapes == [(48, 64), (48, 64), (64, 48), (112, 48)], "the program reads the halves twice"
    floats = {tuple(x.shape) for x in tensors.values() if x.dtype == torch.bfloat16}
    assert floats == {(HEAD, HIDDEN), (ROWS,), (5, HIDDEN)}


def test_a_source_s_own_scales_are_taken():
    torch.manual_seed(0)
    layer = nn.Linear(48, 32, bias=False).requires_grad_(False)
    codes, scale = (torch.randn(32, 48) * 9).to(E4M3), torch.rand(32) + 0.5
    layer.weight = nn.Parameter((codes.float() * scale[:, None]).bfloat16(), False)
    x = torch.randn(3, 48).bfloat16()
    module = torch.export.export(layer, (x,)).module(check_guards=False)
    rewritten = float8.quantize(module, {"weight": scale})
    stored = rewritten.state_dict()
    assert torch.equal(stored["fp8_weight_0"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(rewritten(x), fp8_linear(x, codes, scale))


@pytest.mark.parametrize(("layers", "norms", "gates"), [("qwen3", 3, 2), ("mixtral", 1, 0)])
def test_operators_before_products_give_codes(layers, norms, gates):
    """In the same bits, where only products take them: an expert's router takes the norm too, and the last norm's rows
    are chosen first."""
    sizes = {} if layers == "mixtral" else {"intermediate_size": 208}
    target = tiny_of(layers, **sizes).bfloat16()
    plain = export_target_torch(target, SHAPE, rewrite=float8.quantize)
    fused = export_target_torch(target, SHAPE, rewrite=partial(rewritten, Precision.fp8))
    for ours, theirs in zip(fused.module()(*arguments(target)), plain.module()(*arguments(target)), strict=True):
        assert torch.equal(ours, theirs)
    counts = calls(fused)
    quantized = [counts[f"redraft.{name}_quantized.default"] for name in ("add_norm", "silu_product")]
    assert quantized == [norms, gates]
    assert counts["redraft.fp8_product.default"] == norms + gates
    assert counts["redraft.add_norm.default"] == 2 * target.config.num_layers - norms
