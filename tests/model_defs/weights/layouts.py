"""Random weights as each format packs them, written without the readers: a writer makes a layer's tensors, and puts the
weight that they stand for in place of the one it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.model_defs.files import SINGLE

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
TENSORS = "compressed-tensors"
Write = Callable[[Tensor], dict[str, Tensor]]


def pack(values: Tensor, bits: int) -> Tensor:
    """int64 [..., n] of non-negative numbers to int32 words, the lowest bits first."""
    count = 32 // bits
    shifts = torch.arange(count) * bits
    return (values.unflatten(-1, (-1, count)) << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def groups(weight: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random numbers int64 [out, in], zeros [out, groups] and scales fp16 [out, groups] of a weight's shape, with the
    weight that they stand for in place of it."""
    out, columns = weight.shape
    count = -(-columns // size)
    values, zeros = torch.randint(0, 2**bits, (out, columns)), torch.randint(0, 2**bits, (out, count))
    scales = (torch.rand(out, count) + 0.5).half() / 2**bits
    spread = [x.repeat_interleave(size, 1)[:, :columns] for x in (zeros, scales)]
    weight.copy_((values - spread[0]).float() * spread[1].float())
    return values, zeros, scales


def awq(weight: Tensor, size: int = 16) -> dict[str, Tensor]:
    values, zeros, scales = groups(weight, 4, size)
    order = list(AWQ_ORDER)
    q, z = (pack(x.T.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4) for x in (values, zeros))
    return {"qweight": q, "qzeros": z, "scales": scales.T}


def gptq(weight: Tensor, bits: int, bias: int, size: int = 16, order: Tensor | None = None) -> dict[str, Tensor]:
    """With rows of a group that do not lie together (act-order), and zeros of 0. GPTQModel subtracts the bias of all
    zeros from each word at once."""
    values, zeros, scales = groups(weight, bits, size)
    order = torch.randperm(weight.shape[1]) if order is None else order
    weight.copy_(weight[:, order])
    ones = sum(bias << shift for shift in range(0, 32, bits))
    return {
        "qweight": pack(values[:, order], bits).T,
        "qzeros": pack(zeros.T, bits) - ones,
        "scales": scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // size)[order].int(),
    }


def symmetric_gptq(weight: Tensor, zero: int, size: int = 16) -> dict[str, Tensor]:
    """Of 4 bits, with the middle as zeros, stored as `zero`, and group 0 for all rows, which are in order."""
    out, columns = weight.shape
    values, count = torch.randint(0, 16, (out, columns)), -(-columns // size)
    scales = (torch.rand(out, count) + 0.5).half() / 16
    weight.copy_((values - 8).float() * scales.float().repeat_interleave(size, 1)[:, :columns])
    return {
        "qweight": pack(values, 4).T,
        "qzeros": pack(torch.full((count, out), zero), 4),
        "scales": scales.T,
        "g_idx": torch.zeros(columns, dtype=torch.int32),
    }


def compressed(weight: Tensor, bits: int, symmetric: bool, size: int = 16) -> dict[str, Tensor]:
    values, zeros, scales = groups(weight, bits, size)
    stored = {"weight_packed": pack(values, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if symmetric:
        spread = scales.repeat_interleave(size, 1).float()[:, : weight.shape[1]]
        weight.copy_((values - 2 ** (bits - 1)).float() * spread)
        return stored
    return stored | {"weight_zero_point": pack(zeros.T, bits).T}


def older_compressed(weight: Tensor, size: int = 16) -> dict[str, Tensor]:
    """As files from before April 2025 have it: zeros as they are, and order of columns that says there is none."""
    values, zeros, scales = groups(weight, 4, size)
    return {
        "weight_packed": pack(values, 4),
        "weight_scale": scales,
        "weight_zero_point": (zeros - 8).to(torch.int8),
        "weight_g_idx": torch.full(weight.shape[1:], -1, dtype=torch.int32),
    }


def scaled(weight: Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """A scale for each row, or for each block, of which the last ones are cut."""
    stored = (weight.clamp(-2, 2) * (10 if dtype == torch.int8 else 1)).to(dtype)
    rows, columns = block or (1, weight.shape[1])
    scale = (torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) + 0.5).bfloat16()
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    weight.copy_(stored.float() * spread.float())
    return {"weight": stored, "weight_scale_inv" if block else "weight_scale": scale}


def scaled_as_a_whole(weight: Tensor) -> dict[str, Tensor]:
    """One scale for all of a weight."""
    stored = weight.clamp(-2, 2).to(torch.float8_e4m3fn)
    weight.copy_(stored.float() * 0.75)
    return {"weight": stored, "weight_scale": torch.tensor([0.75])}


def group_of(bits: int, kind: str = "int", **more: int) -> dict:
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **more}}}


def quantize(folder: Path, settings: dict, write: Write, spared: Collection[str] = ()) -> dict[str, Tensor]:
    """Quantize the layers of a folder but those of these names. Returns the weights that it stands for then; embeddings
    and norms stay."""
    torch.manual_seed(0)
    weights, plain = {}, load_file(folder / SINGLE)
    for name, weight in plain.items():
        layer = name.removesuffix(".weight")
        if layer.endswith("proj") and layer.removeprefix("model.") not in spared:
            weights |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in write(weight).items()}
        else:
            weights[name] = weight
    save_file(weights, folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return plain
