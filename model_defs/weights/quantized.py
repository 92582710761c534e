"""The layouts of quantized checkpoints: AWQ, GPTQ, compressed-tensors and block-wise fp8.

A layer's weight is stored as a few tensors that share its name: `read` gives one by its suffix, or None. Layouts are
those that the formats' own loaders read. Of tensors of device "meta" they give the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redraft.plugins.operators.linear.blocks import GROUP, BlockWeight, Form, block_form

Read = Callable[[str], Tensor | None]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each four bits of a word, the lowest first."""
GPTQ_FORMATS = ("gptq", "gptq_v2")
FLOAT_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
SMALL = ("g_idx", "weight_g_idx", "weight_shape")
"""Tensors that are read for a layer's shape and form too"""
MOST_FEATURES = 1 << 24


class QuantizationError(ValueError):
    """A quantization, or a layer, that is not read; of a layer the message begins with a tensor's suffix."""


class Span(NamedTuple):
    """Features of a row that share a scale and a zero."""

    size: int
    """A multiple of 32; the last one may be cut."""
    order: Tensor | None
    """The features in the order in which spans lie, int64 [in]; None: as they are"""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as it is stored: scale * (code - zero), a scale and a zero for each group of a row's features."""

    codes: Tensor
    """[out, in]: uint8, or float8 numbers"""
    scale: Tensor
    """float32 [out, groups]"""
    zero: Tensor | None
    """[out, groups]: uint8 beside uint8 codes"""
    group: Tensor
    """int64 [in], each feature's"""
    bits: int = 8

    def __post_init__(self) -> None:
        shape = (self.codes.shape[0], self.scale.shape[1])
        if any(x.shape != shape for x in (self.scale, self.zero) if x is not None):
            raise ValueError(f"{tuple(self.codes.shape)} codes and scales for {tuple(self.scale.shape)}")
        if len(self.group) != self.codes.shape[1] or not 0 <= int(self.group.min()) <= int(self.group.max()) < shape[1]:
            raise ValueError(f"{self.codes.shape[1]} columns are not in {shape[1]} groups")

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        """Some rows, float32."""
        values = self.codes[rows].float()
        if self.zero is not None:
            values -= self.zero[rows].float()[:, self.group]
        values *= self.scale[rows][:, self.group]
        return values

    @cached_property
    def span(self) -> Span | None:
        """How groups lie; None where operators do not take them so."""
        features, count = len(self.group), self.scale.shape[1]
        size = -(-features // GROUP) * GROUP if count == 1 else int((self.group == 0).sum())
        order = self.group.argsort(stable=True)
        spans = torch.arange(features) // max(size, 1)
        whole = self.zero is not None and self.codes.dtype == torch.uint8
        if not whole or size % GROUP or -(-features // max(size, 1)) != count:
            return None
        if not torch.equal(self.group[order], spans):
            return None
        return Span(size, None if torch.equal(self.group, spans) else order)

    @property
    def in_e4m3(self) -> bool:
        """Whether codes are numbers of E4M3, with scales only."""
        return self.codes.dtype == torch.float8_e4m3fn and self.zero is None

    @property
    def in_rows(self) -> bool:
        """Whether they are, with one scale for all of a row."""
        return self.in_e4m3 and self.scale.shape[1] == 1

    @property
    def form(self) -> Form | None:
        """The form of its blocks. Codes of two bits are stored in four."""
        return block_form(f"i{max(self.bits, 4)}g{self.span.size}") if self.span else None

    def blocks(self, rows: Tensor) -> BlockWeight:
        """Some rows of one that has a form."""
        form, span = self.form, self.span
        assert form is not None
        assert span is not None
        assert self.zero is not None
        codes = self.codes[rows]
        order = None if span.order is None else span.order.int().numpy()
        if span.order is not None:
            codes = codes[:, span.order]
        return BlockWeight(
            form, codes.numpy(), {"scale": self.scale[rows].numpy(), "zero": self.zero[rows].numpy()}, order
        )


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores its quantized weights."""

    title: str
    """For messages: AWQ, 4 bits"""
    suffixes: tuple[str, ...]
    """Of a layer's tensors, that of the codes first"""
    weight: Callable[[Read], QuantizedWeight]
    """A layer's weight. Raises KeyError, the suffix of a missing tensor, QuantizationError, or any error for tensors
    that do not fit together."""


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a `config.json` names; None for plain weights.

    Raises QuantizationError for one that cannot be read, with those that can.
    """
    try:
        return _quantization_of(config.get("quantization_config") or {})
    except (TypeError, AttributeError, LookupError) as error:
        raise QuantizationError(f"quantization_config is not one that is read ({error})") from None


def _quantization_of(settings: Mapping[str, Any]) -> Quantization | None:
    method = settings.get("quant_method")
    if method is None:
        return None
    bits = settings.get("bits", settings.get("w_bit", 4))
    if method == "awq" and bits == 4 and (settings.get("version") or "gemm").lower() == "gemm":
        return Quantization("AWQ, 4 bits", ("qweight", "qzeros", "scales"), awq)
    if method == "gptq" and bits in (2, 4, 8) and gptq_format(settings) in GPTQ_FORMATS:
        other_bits = [
            rule["bits"] for rule in (settings.get("dynamic") or {}).values() if rule.get("bits", bits) != bits
        ]
        if other_bits:
            raise QuantizationError(
                f"unsupported quantization: its `dynamic` has layers of {other_bits[0]} bits, expected {bits} in all"
            )
        suffixes = ("qweight", "qzeros", "scales", "g_idx")
        return Quantization(f"GPTQ, {bits} bits", suffixes, lambda read: gptq(read, bits, settings))
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization("fp8", SCALED, lambda read: scaled(read, settings.get("weight_block_size")))
    supported = "awq (gemm, 4 bits), gptq (2, 4 or 8 bits), compressed-tensors (pack-quantized, int8, fp8), fp8"
    named = {key: settings[key] for key in ("bits", "version", "format", "checkpoint_format") if key in settings}
    raise QuantizationError(
        f"unsupported quantization {method!r} {named or ''}: expected {supported}, float weights or a GGUF"
    )


def gptq_format(settings: Mapping[str, Any]) -> str:
    """The version of GPTQ's format, by its older or its newer name."""
    return str(settings.get("checkpoint_format") or settings.get("format") or GPTQ_FORMATS[0]).lower()


SCALED = ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point", "input_scale")
"""Activations have a scale for each row here, so that `input_scale`, one for all texts, says nothing"""
PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")


def _compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    if settings.get("transform_config"):
        raise QuantizationError(
            "unsupported quantization: its transform_config rotates what layers read; expected weights without one"
        )
    groups = [group["weights"] for group in settings.get("config_groups", {}).values() if group.get("weights")]
    form = settings.get("format")
    if len({str(group) for group in groups}) > 1:
        raise QuantizationError(
            f"unsupported quantization: {len(groups)} groups of layers that differ, expected one for all"
        )
    bits = groups[0]["num_bits"] if groups else 8
    symmetric = groups[0].get("symmetric") is not False if groups else True
    if form == "pack-quantized" and bits in (4, 8):
        title = f"compressed-tensors, {bits} bits"
        size = groups[0].get("group_size") or 0
        return Quantization(title, PACKED, lambda read: packed(read, bits, symmetric, size))
    if form in FLOAT_FORMATS and bits == 8:
        block, kind = (groups[0].get("block_structure"), groups[0]["type"]) if groups else (None, "int")
        return Quantization(f"compressed-tensors, {kind}8", SCALED, lambda read: scaled(read, block, symmetric))
    raise QuantizationError(
        f"unsupported quantization compressed-tensors, format {form!r} of {bits} bits: expected pack-quantized of 4 or "
        f"8 bits, or one of {', '.join(FLOAT_FORMATS)} of 8"
    )


def awq(read: Read) -> QuantizedWeight:
    """qweight int32 [in, out / 8] and qzeros [groups, out / 8] with columns in AWQ_ORDER, scales [groups, out]."""
    words, zero_words, scales = (needed(read, name) for name in ("qweight", "qzeros", "scales"))
    order = [AWQ_ORDER.index(column) for column in range(8)]
    codes, zeros = (unpack(x, 4).unflatten(-1, (-1, 8))[..., order].flatten(-2) for x in (words, zero_words))
    group = _lying_together(len(codes), len(codes) // len(scales))
    return QuantizedWeight(codes.T.contiguous(), scales.float().T, zeros.T, group, bits=4)


def gptq(read: Read, bits: int, settings: Mapping[str, Any]) -> QuantizedWeight:
    """qweight int32 [in bits / 32, out], packed down the rows, qzeros [groups, out bits / 32], scales [groups, out] and
    g_idx int32 [in], each row's group. Rows are in order where g_idx is missing, or has group 0 for all rows of several
    groups, as some writers leave it."""
    words, zero_words, scales = (needed(read, name) for name in ("qweight", "qzeros", "scales"))
    codes = unpack(words.T, bits)
    # GPTQModel subtracts from whole words: where a zero of 0 borrowed from the next one, adding to words gives it back.
    ones = sum(1 << shift for shift in range(0, 32, bits))
    zeros = unpack(zero_words + _offset_of_zeros(unpack(zero_words, bits), bits, settings) * ones, bits)
    group, features = read("g_idx"), codes.shape[1]
    if group is None or (len(scales) > 1 and not group.any()):
        size = settings.get("group_size") or -1
        size = size if size > 0 else features
        if -(-features // size) != len(scales):
            raise QuantizationError(
                f"scales has {len(scales)} groups of {features} rows, and the checkpoint says group_size "
                f"{settings.get('group_size')}"
            )
        group = _lying_together(features, size)
    return QuantizedWeight(codes, scales.float().T, zeros.T, group.long(), bits)


def _offset_of_zeros(stored: Tensor, bits: int, settings: Mapping[str, Any]) -> int:
    """What is added to GPTQ's stored zeros: 1 in the first version of the format, 0 in the second.

    Zeros of symmetric weights are the middle, which shows the version: some files of the second say that they are of
    the first. Raises QuantizationError for symmetric weights with other zeros.
    """
    if not settings.get("sym") or stored.is_meta:
        return 0 if gptq_format(settings) == "gptq_v2" else 1
    middle, low, high = 2 ** (bits - 1), int(stored.min()), int(stored.max())
    if low != high or middle - low not in (0, 1):
        raise QuantizationError(
            f"qzeros has {low} to {high}, and the checkpoint says sym true: expected only {middle - 1} or {middle}"
        )
    return middle - low


def packed(read: Read, bits: int, symmetric: bool = True, size: int = 0) -> QuantizedWeight:
    """compressed-tensors: weight_packed int32 [out, in bits / 32] of numbers less their smallest, weight_scale [out,
    groups], where it is not symmetric weight_zero_point, packed down the rows or, in older files, int8 [out, groups],
    and weight_g_idx [in], unless it is -1, where columns of a group do not lie together. Groups have `size` columns or,
    where that is not above 0, are equal."""
    words, scale = needed(read, "weight_packed"), _of_groups(needed(read, "weight_scale"))
    shape, zero_words, group = read("weight_shape"), _zero_points(read, symmetric), read("weight_g_idx")
    codes, middle = unpack(words, bits), 2 ** (bits - 1)
    if shape is not None:
        codes = codes[:, : int(shape[1])]
    scale = scale.expand(len(codes), -1)
    if group is None or int(group[0]) < 0:
        size = size if size > 0 else -(-codes.shape[1] // scale.shape[1])
        group = _lying_together(codes.shape[1], size)
    if zero_words is None or zero_words.dtype == torch.int8:
        zero = _unsigned(zero_words, middle, scale)
    else:
        zero = unpack(zero_words.T, bits).T[: len(codes)]
    return QuantizedWeight(codes, scale, zero, group.long(), bits)


def scaled(read: Read, block: list[int] | None = None, symmetric: bool = True) -> QuantizedWeight:
    """A weight in 8 bits [out, in] times its scale: one for all, for each row, for each group of a row, or for each
    block of so many rows and columns. Blocks' scales may be called weight_scale_inv; they multiply all the same."""
    weight, scale = needed(read, "weight"), read("weight_scale_inv")
    scale = _of_groups(needed(read, "weight_scale") if scale is None else scale)
    zero = _zero_points(read, symmetric)
    # A hostile block may be of any size.
    rows, features = (
        min(given, length) if given else -(-length // count)
        for given, length, count in zip(block or (0, 0), weight.shape, scale.shape, strict=True)
    )
    group = _lying_together(weight.shape[1], features)

    def for_rows(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(rows, 0).narrow(0, 0, len(weight))

    scale = for_rows(scale)
    zero = None if zero is None else for_rows(zero if zero.ndim == 2 else zero.reshape(-1, 1))
    if weight.dtype == torch.int8:
        return QuantizedWeight(weight.view(torch.uint8) ^ 128, scale, _unsigned(zero, 128, scale), group)
    return QuantizedWeight(weight, scale, zero, group)


def _lying_together(features: int, size: int) -> Tensor:
    """Each feature's group, int64 [features], where so many lie together."""
    if features > MOST_FEATURES:
        raise ValueError(f"{features} columns")
    return torch.arange(features) // size


def _unsigned(zero: Tensor | None, middle: int, like: Tensor) -> Tensor:
    """Zeros of codes that are `middle` greater, uint8 of a shape; without zeros they are the middle."""
    if zero is None:
        return torch.full(like.shape, middle, dtype=torch.uint8, device=like.device)
    if zero.dtype != torch.int8:
        raise TypeError(f"zeros {zero.dtype}")
    return (zero.view(torch.uint8) + middle).reshape(len(zero), -1).expand(like.shape)


def _zero_points(read: Read, symmetric: bool) -> Tensor | None:
    """compressed-tensors' zeros. Raises QuantizationError for weights without them that are not symmetric."""
    zeros = read("weight_zero_point")
    if zeros is None and not symmetric:
        raise QuantizationError("weight_zero_point is missing, and the checkpoint says symmetric false")
    return zeros


def _of_groups(numbers: Tensor) -> Tensor:
    """float32 [out or 1, groups]; one for each row, or for all, may be stored without the second axis."""
    return numbers.float() if numbers.ndim == 2 else numbers.float().reshape(-1, 1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] to its numbers of so many bits, uint8 [..., n * 32 / bits], the lowest bits first."""
    if words.dtype != torch.int32:
        raise TypeError(f"words are {words.dtype}")
    if words.is_meta:  # operations on such tensors take milliseconds
        return words.new_empty((*words.shape[:-1], words.shape[-1] * 32 // bits), dtype=torch.uint8)
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    numbers = [data >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return torch.stack(numbers, -1).flatten(-2)


def needed(read: Read, suffix: str) -> Tensor:
    """A tensor that must be there. Raises KeyError."""
    tensor = read(suffix)
    if tensor is None:
        raise KeyError(suffix)
    return tensor
