"""Weights in blocks: a few bits a number, a scale for each group of features."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

GROUP = 32
"""Features of a row whose codes lie together, and whose activations share a scale."""
HALF_PANEL = 16
"""Weight rows that are stored and multiplied together."""
SUPER_BLOCK = 256
"""Features of a block of the formats whose names end in k."""


@dataclass(frozen=True)
class Part:
    """Numbers of a row that are not codes: one for every so many features."""

    name: str
    """`scale` and `minimum`; `scale_steps` and `minimum_steps` are integers that multiply them."""
    dtype: str
    features: int
    """A row's last part may stand for fewer."""


@dataclass(frozen=True)
class Form:
    """How a weight row is stored."""

    name: str
    bits: int
    """Bits of a code, which is unsigned: 4, 5, 6 or 8."""
    parts: tuple[Part, ...]
    """In the order in which the kernels read them, those of more features first."""
    zero: int | None = 0
    """What is subtracted from codes; None: the part `zero`."""

    @property
    def span(self) -> int:
        """Features that all parts repeat after."""
        return self.parts[0].features


def _form(name: str, bits: int, zero: int = 0, minimum: bool = False) -> Form:
    """A form with float16 scales, and minima, of groups."""
    names = ("scale", "minimum") if minimum else ("scale",)
    return Form(name, bits, tuple(Part(part, "float16", GROUP) for part in names), zero)


def _steps_form(name: str, bits: int) -> Form:
    """A form with integer scales and minima of groups, which float16 numbers of a super-block multiply."""
    floats = tuple(Part(part, "float16", SUPER_BLOCK) for part in ("scale", "minimum"))
    return Form(name, bits, (*floats, *(Part(f"{part.name}_steps", "uint8", GROUP) for part in floats)))


FORMS = {
    form.name: form
    for form in (
        _form("q4_0", 4, zero=8),
        _form("q4_1", 4, minimum=True),
        _form("q5_0", 5, zero=16),
        _form("q5_1", 5, minimum=True),
        _form("q8_0", 8, zero=128),
        _steps_form("q4_k", 4),
        _steps_form("q5_k", 5),
        Form("q6_k", 6, (Part("scale", "float16", SUPER_BLOCK), Part("scale_steps", "int8", 16)), zero=32),
    )
}
"""The forms with a name of their own, which are those of GGUF files; `block_form` has the others."""
GGUF_FORMS = {name: name for name in FORMS} | {"q3_k": "q6_k", "iq4_nl": "q8_0"}
"""The form that each type of a GGUF file is read into, which changes none of its numbers."""


ROUNDED = {"int4": "q4_1", "int8": "q8_0"}
"""The form that a precision rounds weights to."""


def block_form(name: str) -> Form:
    """The form of a name: one of `FORMS`, or for instance `i4g128`: codes of 4 (or 8) bits with a float32 scale and an
    integer zero for every 128 features, a multiple of 32. Raises ValueError that lists them."""
    if name in FORMS:
        return FORMS[name]
    match = re.fullmatch(r"i([48])g([1-9]\d*)", name)
    if not match or int(match[2]) % GROUP:
        raise ValueError(
            f"block form {name!r}: expected one of {', '.join(FORMS)}, or i4gN or i8gN, N a multiple of 32"
        )
    span = int(match[2])
    return Form(name, int(match[1]), (Part("scale", "float32", span), Part("zero", "uint8", span)), zero=None)


def same_order(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether two weights have their features in one order, as `BlockWeight.feature_order` says it."""
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def segments_of(dtype: str) -> np.ndarray:
    """An operator's `dtype`, such as `q4_k:1792,i4g128:256`, as the kernels take it: int32 [segments, 3], the form's
    number, rows and span."""
    kernel_forms = [*FORMS, "i4", "i8"]
    segments = [(block_form(name), int(rows)) for name, rows in (part.split(":") for part in dtype.split(","))]
    numbers = [(kernel_forms.index(form.name.split("g")[0]), rows, form.span) for form, rows in segments]
    return np.array(numbers, np.int32)


class BlockRows(Protocol):
    """A weight matrix [N, K] in one form, some rows of which are made when they are asked for."""

    @property
    def form(self) -> Form:
        """How its rows are stored."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """N and K"""
        ...

    @property
    def feature_order(self) -> np.ndarray | None:
        """The feature that each column is of, int32 [K]; None: they are in order."""
        ...

    def rows(self, index: slice) -> BlockWeight:
        """Some rows. Raises ValueError for damaged blocks."""
        ...


@dataclass(frozen=True)
class RoundedRows:
    """Float [N, K], whose rows `BlockWeight.quantized` rounds when they are asked for."""

    weight: np.ndarray
    precision: str

    @property
    def form(self) -> Form:
        return FORMS[ROUNDED[self.precision]]

    @property
    def shape(self) -> tuple[int, int]:
        rows, features = self.weight.shape
        return rows, features

    @property
    def feature_order(self) -> None:
        return None

    def rows(self, index: slice) -> BlockWeight:
        return BlockWeight.quantized(self.weight[index], self.precision)


@dataclass(frozen=True)
class BlockWeight:
    """Rows of a weight matrix [N, K] in one form."""

    form: Form
    codes: np.ndarray
    """uint8 [N, K]"""
    parts: Mapping[str, np.ndarray]
    """The form's parts by name: [N, ⌈K / its features⌉] of its dtype."""
    feature_order: np.ndarray | None = None
    """The feature that each column of the codes is of, int32 [K]; None: they are in order"""

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.dtype != np.uint8:
            raise ValueError(f"codes {self.codes.dtype} {self.codes.shape}: expected uint8 [rows, features]")
        rows, features = self.codes.shape
        for part in self.form.parts:
            array, shape = self.parts[part.name], (rows, -(-features // part.features))
            if array.shape != shape or array.dtype != part.dtype:
                raise ValueError(
                    f"{part.name} of {self.form.name}: {array.dtype} {array.shape}, expected {part.dtype} {shape}"
                )

    @classmethod
    def from_gguf(cls, type: str, raw: np.ndarray) -> BlockWeight:
        """The rows of a GGUF file's tensor: its type, such as `q4_k`, and uint8 [N, bytes of a row].

        Raises ValueError for another type, or for rows that are not whole blocks.
        """
        name = type.lower()
        if name not in GGUF_FORMS:
            raise ValueError(f"block type {type}: expected one of {', '.join(GGUF_FORMS).upper()}")
        form, size = FORMS[GGUF_FORMS[name]], sum(_GGUF_FIELDS[name].values())
        if raw.ndim != 2 or raw.dtype != np.uint8 or raw.shape[1] % size:
            raise ValueError(f"{raw.dtype} {raw.shape}: expected uint8 rows of whole {name} blocks, {size} bytes each")
        fields = _gguf_fields(name, raw)
        parts = {part.name: fields[part.name].view(part.dtype).reshape(len(raw), -1) for part in form.parts}
        return cls(form, fields["codes"].reshape(len(raw), -1), parts)

    @classmethod
    def quantized(cls, weight: np.ndarray, precision: str) -> BlockWeight:
        """Float [N, K] rounded to the nearest that a form of 4 or 8 bits can hold.

        `int4` is q4_1: each group's least number and 15 equal steps to its largest. A mere scale, q4_0, takes a tenth
        less memory, and its errors are an eighth larger (root mean square; SmolLM2's embeddings). `int8` is q8_0: 127
        equal steps from zero to each group's largest magnitude, and as many below.
        """
        form = FORMS[ROUNDED[precision]]
        rows, features = weight.shape
        padded = np.pad(np.asarray(weight, np.float32), ((0, 0), (0, -features % GROUP)), mode="edge")
        groups = padded.reshape(rows, -1, GROUP)
        parts = {}
        if form.bits == 8:
            low, span, steps = np.float32(0), np.abs(groups).max(-1), 127
        else:
            parts["minimum"] = groups.min(-1).astype(np.float16)
            low, steps = parts["minimum"][..., None], 15
            span = groups.max(-1) - parts["minimum"]
        parts["scale"] = (span / np.float32(steps)).astype(np.float16)
        wide = parts["scale"].astype(np.float32)[..., None]
        codes = np.divide(groups - low, wide, out=np.zeros_like(groups), where=wide != 0)
        codes = np.rint(codes) + np.float32(form.zero or 0)
        codes = codes.clip(0, (1 << form.bits) - 1).astype(np.uint8).reshape(rows, -1)[:, :features]
        return cls(form, np.ascontiguousarray(codes), parts)

    @property
    def shape(self) -> tuple[int, int]:
        rows, features = self.codes.shape
        return rows, features

    def rows(self, index: np.ndarray | slice) -> BlockWeight:
        """These rows, in this order."""
        parts = {name: array[index] for name, array in self.parts.items()}
        return BlockWeight(self.form, self.codes[index], parts, self.feature_order)

    def features(self, chosen: range) -> BlockWeight:
        """Neighbouring features, from the beginning of a span, or anywhere between groups of a row in one span."""
        if chosen == range(self.shape[1]):
            return self
        parts = {
            part.name: self.parts[part.name][:, chosen.start // part.features : -(-chosen.stop // part.features)]
            for part in self.form.parts
        }
        return BlockWeight(self.form, self.codes[:, chosen.start : chosen.stop], parts)

    def dequantized(self) -> np.ndarray:
        """float32 [N, K], its features in order, bit for bit what the format's own arithmetic gives: scale * (code -
        zero) + minimum."""
        size = min(part.features for part in self.form.parts)
        rows, features = self.shape
        codes = np.pad(self.codes, ((0, 0), (0, -features % size))) if features % size else self.codes
        values = codes.reshape(rows, -1, size).astype(np.float32)
        scale, minimum, zero = (self.factor(name, size) for name in ("scale", "minimum", "zero"))
        assert scale is not None
        values -= np.float32(self.form.zero or 0) if zero is None else zero[..., None]
        values *= scale[..., None]
        if minimum is not None:
            values += minimum[..., None]
        values = np.ascontiguousarray(values.reshape(rows, -1)[:, :features])
        return values if self.feature_order is None else values[:, np.argsort(self.feature_order)]

    def factor(self, name: str, size: int) -> np.ndarray | None:
        """`scale`, `minimum` or `zero` for every group of `size` features, float32 [N, ⌈K / size⌉], times its integer
        steps where it has them; None where the form has no such part. A minimum that is subtracted is negative here."""
        features = {part.name: part.features for part in self.form.parts}
        if name not in features:
            return None
        count, steps = -(-self.shape[1] // size), f"{name}_steps"
        spread = [
            self.parts[part].astype(np.float32).repeat(features[part] // size, axis=1)[:, :count]
            for part in (name, steps)
            if part in features
        ]
        value = spread[0] * spread[1] if len(spread) == 2 else spread[0]
        return -value if name == "minimum" and steps in features else value


# The fields of a GGUF file's blocks in their order, and the bytes of each. `high` are the codes' bits beyond four.
_GGUF_FIELDS = {
    "q4_0": {"scale": 2, "codes": 16},
    "q4_1": {"scale": 2, "minimum": 2, "codes": 16},
    "q5_0": {"scale": 2, "high": 4, "codes": 16},
    "q5_1": {"scale": 2, "minimum": 2, "high": 4, "codes": 16},
    "q8_0": {"scale": 2, "codes": 32},
    "iq4_nl": {"scale": 2, "codes": 16},
    "q3_k": {"high": 32, "codes": 64, "steps": 12, "scale": 2},
    "q4_k": {"scale": 2, "minimum": 2, "steps": 12, "codes": 128},
    "q5_k": {"scale": 2, "minimum": 2, "steps": 12, "high": 32, "codes": 128},
    "q6_k": {"codes": 128, "high": 64, "scale_steps": 16, "scale": 2},
}
_GGUF_RUN = {"q4_k": 32, "q5_k": 32, "q6_k": 64}
"""Bytes whose low halves are the codes of as many features, and whose high halves those of as many more; else 16."""
_IQ4_NL_NUMBERS = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)
"""What the codes of iq4_nl stand for: integers from -127 to 113, 128 greater."""


def _gguf_fields(name: str, raw: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of blocks, uint8 [N, bytes], as codes and parts, contiguous uint8 [N, blocks, bytes of each in a block]."""
    sizes = _GGUF_FIELDS[name]
    blocks = raw.reshape(len(raw), -1, sum(sizes.values()))
    cut = np.split(blocks, np.cumsum(list(sizes.values()))[:-1], axis=-1)
    fields = {field: np.ascontiguousarray(array) for field, array in zip(sizes, cut, strict=True)}
    if name == "q3_k":
        fields["scale_steps"] = _signed_six_bits(fields.pop("steps"))
        three_bits = _two_bits(fields["codes"]) | _one_bit(fields.pop("high")) << 2  # 4 greater
        fields["codes"] = three_bits + np.uint8(28)
        return fields
    if "steps" in fields:
        fields["scale_steps"], fields["minimum_steps"] = _six_bits(fields.pop("steps"))
    if name == "q8_0":
        fields["codes"] = fields["codes"] ^ np.uint8(128)  # int8, 128 greater
        return fields
    runs = fields["codes"].reshape(*blocks.shape[:2], -1, _GGUF_RUN.get(name, 16))
    fields["codes"] = np.concatenate([runs & 15, runs >> 4], axis=-1).reshape(*blocks.shape[:2], -1)
    if name == "iq4_nl":
        fields["codes"] = _IQ4_NL_NUMBERS[fields["codes"]]
    if "high" in fields:
        fields["codes"] |= _HIGH_BITS[name](fields.pop("high")) << 4
    return fields


def _six_bits(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima of six bits, each uint8 [..., 8], of 12 bytes: four scales, four minima, and the
    other four of both in halves, whose upper two bits the first eight bytes carry."""
    scale, minimum, low = np.split(steps, 3, axis=-1)
    return (
        np.concatenate([scale & 63, low & 15 | scale >> 6 << 4], axis=-1),
        np.concatenate([minimum & 63, low >> 4 | minimum >> 6 << 4], axis=-1),
    )


def _signed_six_bits(steps: np.ndarray) -> np.ndarray:
    """Sixteen scales of six bits, 32 greater than they are, as int8 [..., 16], of 12 bytes: eight have the lower halves
    of the first eight scales, then those of the others; four the upper two bits, of scales i, 4 + i, 8 + i and 12 + i
    in byte i."""
    low, high = steps[..., :8], steps[..., None, 8:]
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(*steps.shape[:-1], 16)
    return (np.concatenate([low & 15, low >> 4], axis=-1) | high << 4).view(np.int8) - np.int8(32)


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """Two bits of each feature, uint8 [N, blocks, features]: of 128 features, those of byte i are features i, 32 + i,
    64 + i and 96 + i."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    rows, blocks, _ = packed.shape
    return (packed.reshape(rows, blocks, 2, 1, 32) >> shifts & 3).reshape(rows, blocks, -1)


def _one_bit(packed: np.ndarray) -> np.ndarray:
    """A bit of each feature of a super-block, uint8 [N, blocks, features]: bit b of byte i is feature 32 b + i."""
    bits = _next_bit(packed)
    return bits.reshape(*bits.shape[:2], GROUP, 8).swapaxes(-1, -2).reshape(bits.shape)


def _next_bit(packed: np.ndarray) -> np.ndarray:
    """A bit of each feature, uint8 [N, blocks, features], in their order."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


_HIGH_BITS = {"q5_0": _next_bit, "q5_1": _next_bit, "q5_k": _one_bit, "q6_k": _two_bits}
"""How a type's bits beyond four are stored."""
