"""Weights of quantized checkpoints, dequantized: AWQ, GPTQ, compressed-tensors and block-wise fp8.

A layer's weight is stored as a few tensors that share its name: `read` gives one by its suffix, or None. Layouts are
those that the formats' own loaders read, with weights float32 [out, in] in the end. All of this works on tensors of
device "meta" too, which gives shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redraft.compiler.checkpoints.source import FetchError

Read = Callable[[str], Tensor | None]

WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each four bits of a word, the lowest first."""
GPTQ_FORMATS = ("gptq", "gptq_v2")
FLOAT_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores its quantized weights."""

    title: str
    """For messages: AWQ, 4 bits"""
    weight: Callable[[Read], Tensor]
    """A layer's weight float32 [out, in]. Raises KeyError, the suffix of a missing tensor, or FetchError that begins
    with a tensor's suffix."""


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a `config.json` names; None for plain weights.

    Raises FetchError for one that cannot be read, with those that can.
    """
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method")
    if method is None:
        return None
    bits = settings.get("bits", settings.get("w_bit", 4))
    if method == "awq" and bits == 4 and (settings.get("version") or "gemm").lower() == "gemm":
        return Quantization("AWQ, 4 bits", awq)
    if method == "gptq" and bits in (2, 4, 8) and gptq_format(settings) in GPTQ_FORMATS:
        other_bits = [
            rule["bits"] for rule in (settings.get("dynamic") or {}).values() if rule.get("bits", bits) != bits
        ]
        if other_bits:
            raise FetchError(
                f"unsupported quantization: its `dynamic` has layers of {other_bits[0]} bits, expected {bits} in all"
            )
        return Quantization(f"GPTQ, {bits} bits", lambda read: gptq(read, bits, settings))
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization("fp8", lambda read: scaled(read, settings.get("weight_block_size")))
    supported = "awq (gemm, 4 bits), gptq (2, 4 or 8 bits), compressed-tensors (pack-quantized, int8, fp8), fp8"
    named = {key: settings[key] for key in ("bits", "version", "format", "checkpoint_format") if key in settings}
    raise FetchError(
        f"unsupported quantization {method!r} {named or ''}: expected {supported}, float weights or a GGUF"
    )


def gptq_format(settings: Mapping[str, Any]) -> str:
    """The version of GPTQ's format, by its older or its newer name."""
    return str(settings.get("checkpoint_format") or settings.get("format") or GPTQ_FORMATS[0]).lower()


def _compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    if settings.get("transform_config"):
        raise FetchError(
            "unsupported quantization: its transform_config rotates what layers read; expected weights without one"
        )
    groups = [group["weights"] for group in settings.get("config_groups", {}).values() if group.get("weights")]
    form = settings.get("format")
    if len({str(group) for group in groups}) > 1:
        raise FetchError(f"unsupported quantization: {len(groups)} groups of layers that differ, expected one for all")
    bits = groups[0]["num_bits"] if groups else 8
    symmetric = groups[0].get("symmetric") is not False if groups else True
    if form == "pack-quantized" and bits in (4, 8):
        return Quantization(f"compressed-tensors, {bits} bits", lambda read: packed(read, bits, symmetric))
    if form in FLOAT_FORMATS and bits == 8:
        block, kind = (groups[0].get("block_structure"), groups[0]["type"]) if groups else (None, "int")
        return Quantization(f"compressed-tensors, {kind}8", lambda read: scaled(read, block, symmetric))
    raise FetchError(
        f"unsupported quantization compressed-tensors, format {form!r} of {bits} bits: expected pack-quantized of 4 or "
        f"8 bits, or one of {', '.join(FLOAT_FORMATS)} of 8"
    )


def awq(read: Read) -> Tensor:
    """qweight int32 [in, out / 8] and qzeros [groups, out / 8] with columns in AWQ_ORDER, scales [groups, out]:
    (q - zero) scale."""
    words, zero_words, scales = (needed(read, name) for name in ("qweight", "qzeros", "scales"))
    order = [AWQ_ORDER.index(column) for column in range(8)]
    values, zeros = (unpack(x, 4).unflatten(-1, (-1, 8))[..., order].flatten(-2) for x in (words, zero_words))
    rows = torch.arange(len(values), device=values.device) // (len(values) // len(scales))
    return ((values - zeros[rows]).float() * scales[rows].float()).T


def gptq(read: Read, bits: int, settings: Mapping[str, Any]) -> Tensor:
    """qweight int32 [in bits / 32, out], packed down the rows, qzeros [groups, out bits / 32], scales [groups, out] and
    g_idx int32 [in], each row's group: (q - zero) scale. Rows are in order where g_idx is missing, or has group 0 for
    all rows of several groups, as some writers leave it."""
    words, zero_words, scales = (needed(read, name) for name in ("qweight", "qzeros", "scales"))
    values = unpack(words.T, bits).T
    # GPTQModel subtracts from whole words: where a zero of 0 borrowed from the next one, adding to words gives it back.
    ones = sum(1 << shift for shift in range(0, WORD, bits))
    zeros = unpack(zero_words + _offset_of_zeros(unpack(zero_words, bits), bits, settings) * ones, bits)
    groups = read("g_idx")
    if groups is None or (len(scales) > 1 and not groups.is_meta and not groups.any()):
        size = settings.get("group_size") or -1
        size = size if size > 0 else len(values)
        if -(-len(values) // size) != len(scales):
            raise FetchError(
                f"scales has {len(scales)} groups of {len(values)} rows, and the checkpoint says group_size "
                f"{settings.get('group_size')}"
            )
        groups = torch.arange(len(values), device=values.device) // size
    return ((values - zeros[groups.long()]).float() * scales[groups.long()].float()).T


def _offset_of_zeros(stored: Tensor, bits: int, settings: Mapping[str, Any]) -> int:
    """What is added to GPTQ's stored zeros: 1 in the first version of the format, 0 in the second.

    Zeros of symmetric weights are the middle, which shows the version: some files of the second say that they are of
    the first. Raises FetchError for symmetric weights with other zeros.
    """
    if not settings.get("sym") or stored.is_meta:
        return 0 if gptq_format(settings) == "gptq_v2" else 1
    middle, low, high = 2 ** (bits - 1), int(stored.min()), int(stored.max())
    if low != high or middle - low not in (0, 1):
        raise FetchError(
            f"qzeros has {low} to {high}, and the checkpoint says sym true: expected only {middle - 1} or {middle}"
        )
    return middle - low


def packed(read: Read, bits: int, symmetric: bool = True) -> Tensor:
    """compressed-tensors: weight_packed int32 [out, in bits / 32] of numbers less their smallest, weight_scale [out,
    groups], where it is not symmetric weight_zero_point, packed down the rows or, in older files, int8 [out, groups],
    and weight_g_idx [in], unless it is -1, where columns of a group do not lie together."""
    words, scales = needed(read, "weight_packed"), _of_groups(needed(read, "weight_scale"))
    shape, zero_words, groups = read("weight_shape"), _zero_points(read, symmetric), read("weight_g_idx")
    smallest = 2 ** (bits - 1)
    values = unpack(words, bits) - smallest
    if shape is not None and not shape.is_meta:
        values = values[:, : int(shape[1])]
    columns = values.shape[1]
    if groups is None or (not groups.is_meta and int(groups[0]) < 0):
        groups = torch.arange(columns, device=values.device) // -(-columns // scales.shape[1])
    if zero_words is not None:
        plain = zero_words.dtype == torch.int8
        zeros = _of_groups(zero_words) if plain else unpack(zero_words.T, bits).T[: len(values)] - smallest
        values = values - zeros[:, groups.long()]
    return values.float() * scales[:, groups.long()]


def scaled(read: Read, block: list[int] | None = None, symmetric: bool = True) -> Tensor:
    """A weight in 8 bits [out, in] times its scale: one for all, for each row, for each group of a row, or for each
    block of so many rows and columns. Blocks' scales may be called weight_scale_inv; they multiply all the same."""
    weight, scale = needed(read, "weight").float(), read("weight_scale_inv")
    scale = needed(read, "weight_scale") if scale is None else scale
    zero = _zero_points(read, symmetric)

    def for_each(numbers: Tensor) -> Tensor:
        numbers = _of_groups(numbers)
        for axis in range(2):
            size = -(-weight.shape[axis] // numbers.shape[axis])
            size = min(block[axis], weight.shape[axis]) if block else size  # a hostile block may be of any size
            numbers = numbers.repeat_interleave(size, axis).narrow(axis, 0, weight.shape[axis])
        return numbers

    return (weight if zero is None else weight - for_each(zero)) * for_each(scale)


def _zero_points(read: Read, symmetric: bool) -> Tensor | None:
    """compressed-tensors' zeros. Raises FetchError for weights without them that are not symmetric."""
    zeros = read("weight_zero_point")
    if zeros is None and not symmetric:
        raise FetchError("weight_zero_point is missing, and the checkpoint says symmetric false")
    return zeros


def _of_groups(numbers: Tensor) -> Tensor:
    """float32 [out or 1, groups]; one for each row, or for all, may be stored without the second axis."""
    return numbers.float() if numbers.ndim == 2 else numbers.float().reshape(-1, 1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] to its numbers of so many bits, int32 [..., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def needed(read: Read, suffix: str) -> Tensor:
    """A tensor that must be there. Raises KeyError."""
    tensor = read(suffix)
    if tensor is None:
        raise KeyError(suffix)
    return tensor
