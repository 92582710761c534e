"""The weights of a checkpoint's files, by Hugging Face's names: as they are stored, dequantized, or in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from redraft.model_defs.files import FLOATS, StoredTensors, load_pickled, row_chunks
from redraft.model_defs.weights.names import whole_name
from redraft.model_defs.weights.quantized import SMALL, Quantization, QuantizationError, QuantizedWeight
from redraft.plugins.operators.linear.blocks import BlockWeight


class CheckpointWeights:
    """The weights of safetensors files, or of files in torch's format. A file is mapped while one tensor is read."""

    def __init__(self, folder: Path, files: Sequence[Path], quantization: Quantization | None):
        """Read the headers of a folder's files. Raises ValueError for a damaged file, or two weights of one name."""
        self._folder, self._quantization = folder, quantization
        self._pickled: dict[Path, dict[str, Tensor]] = {}
        self._shaped: dict[str, QuantizedWeight] = {}
        self._last: tuple[str, QuantizedWeight] | None = None
        self.places: dict[str, tuple[Path, str]] = {}
        """The file of each stored tensor, and its name there"""
        self.stored: dict[str, Tensor] = {}
        """Meta tensors of what is stored"""
        for file in files:
            for name, tensor in _headers(file).items():
                whole = whole_name(name)
                self._require_one(whole, file, name)
                self.places[whole], self.stored[whole] = (file, name), tensor

    def add_name(self, name: str, of: str) -> None:
        """Give a stored tensor a second name."""
        self.places[name], self.stored[name] = self.places[of], self.stored[of]

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name. Matrices are bfloat16 there, in which they are kept where floats of their
        own size are asked for, and others float32."""
        suffixes = self._quantization.suffixes if self._quantization else ()
        shapes = {}
        for name, stored in self.stored.items():
            layer, _, suffix = name.rpartition(".")
            if not stored.ndim or suffix in suffixes[1:]:  # scales of activations are single numbers too
                continue
            weight = f"{layer}.weight" if suffix in suffixes else name
            if (header := self.header(weight)) is not None:
                dtype = torch.bfloat16 if header.ndim > 1 else torch.float32
                shapes[weight] = torch.empty(header.shape, dtype=dtype, device="meta")
        return shapes

    def header(self, name: str) -> Tensor | None:
        """A weight's shape as a meta tensor; None where the files lack it. Raises ValueError for what is no weight."""
        if not self.is_quantized(name):
            if not (stored := self.stored[name]).ndim:
                raise ValueError(f"{self._folder}: {name} is a single number, expected rows")
            return stored
        if self._quantization is None:
            if name in self.stored:
                raise ValueError(f"{self._folder}: {name} is {self.stored[name].dtype}, expected floating point")
            return None
        try:
            return torch.empty(self._shape_of(name).codes.shape, device="meta")
        except KeyError:
            return None

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is not stored as floats."""
        stored = self.stored.get(name)
        return stored is None or stored.dtype not in FLOATS

    def parts(self, name: str) -> list[str]:
        """The names of the tensors that a weight is stored as."""
        if not self._quantization or not self.is_quantized(name):
            return [name]
        return [f"{name.removesuffix('weight')}{suffix}" for suffix in self._quantization.suffixes]

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A weight's rows in order, as chunks [rows, ...] of the stored dtype, or float32 of a quantized one."""
        if not self.is_quantized(name):
            tensor = self._of_file(*self.places[name])
            return (tensor[rows] for rows in row_chunks(tuple(tensor.shape)))
        weight = self._weight(name, self._part)
        return (weight.dequantized(rows) for rows in row_chunks(tuple(weight.codes.shape)))

    def read(self, name: str) -> Tensor:
        """A weight: float32, or a matrix of floats as it is stored."""
        if self.is_quantized(name):
            return self._weight(name, self._part).dequantized()
        tensor = self._of_file(*self.places[name])
        return tensor if tensor.ndim > 1 else tensor.float()

    def form(self, name: str) -> str | None:
        """The form of a weight that operators take as it is stored; None for others."""
        form = self._shape_of(name).form if self.is_quantized(name) else None
        return form.name if form else None

    def is_served(self, name: str) -> bool:
        """Whether a quantized weight is served as it is stored: in blocks, or as E4M3, whose blocks' scales may become
        rows'."""
        return self.form(name) is not None or self._shape_of(name).in_e4m3

    def quantization(self, name: str) -> str | None:
        """What the checkpoint calls the way in which a weight is quantized; None for floats."""
        return self._quantization.title if self._quantization and self.is_quantized(name) else None

    def row_scale(self, name: str) -> Tensor | None:
        """The scale of each row, float32 [N], of a weight in E4M3 with one for each row or for all; None for others."""
        if not self.is_quantized(name) or not self._shape_of(name).in_rows:
            return None
        scale = self._weight(name, lambda part: self.stored[name] if part == name else self._part(part)).scale[:, 0]
        return torch.where(scale == 0, 1.0, scale)

    def feature_order(self, name: str) -> np.ndarray | None:
        """The order of the features of a weight in blocks, int32 [K]; None where that is their own."""
        span = self._shape_of(name).span
        return None if span is None or span.order is None else span.order.int().numpy()

    def in_blocks(self, name: str, rows: np.ndarray) -> BlockWeight:
        """These rows of a weight that has a form. Raises ValueError for scales that are not finite."""
        if self._last is None or self._last[0] != name:  # a weight is asked for some rows at a time
            self._last = name, self._weight(name, self._part)
        weight = self._last[1].blocks(torch.from_numpy(rows))
        if not np.isfinite(weight.parts["scale"]).all():
            raise ValueError(f"{self._folder}: {name} holds NaN or infinity: the file is damaged")
        return weight

    def _shape_of(self, name: str) -> QuantizedWeight:
        """A quantized weight whose numbers are meta tensors, but for the order of its features. Raises as `_weight`."""
        if name not in self._shaped:
            self._shaped[name] = self._weight(name, self._part_header)
        return self._shaped[name]

    def _weight(self, name: str, read: Callable[[str], Tensor | None]) -> QuantizedWeight:
        """A quantized weight, of which `read` gives the stored tensors. Raises KeyError where one is missing, or
        ValueError where they do not fit together."""
        assert self._quantization is not None
        layer = name.removesuffix(".weight")
        try:
            return self._quantization.weight(lambda suffix: read(f"{layer}.{suffix}"))
        except QuantizationError as refusal:
            raise ValueError(f"{self._folder}: {layer}.{refusal}") from None
        except (IndexError, RuntimeError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(
                f"{self._folder}: {layer} is not quantized as its tensors and quantization_config say together "
                f"({str(error).partition(chr(10))[0]})"
            ) from error

    def _part(self, name: str) -> Tensor | None:
        """A stored tensor; None where there is none."""
        return self._of_file(*self.places[name]) if name in self.places else None

    def _part_header(self, name: str) -> Tensor | None:
        """A stored tensor's shape as a meta tensor, or the tensor where it is needed to tell a weight's."""
        return self._part(name) if name.endswith(SMALL) else self.stored.get(name)

    def _of_file(self, file: Path, name: str) -> Tensor:
        if file.suffix == ".safetensors":
            with StoredTensors.open([file]) as stored:
                return stored.read(name)
        if file not in self._pickled:  # the last one is kept, as one of torch's old format is read as a whole
            self._pickled = {file: load_pickled(file, mmap=True)}
        return self._pickled[file][name]

    def _require_one(self, whole: str, file: Path, name: str) -> None:
        """Raise ValueError where another file, or another name, has another weight in this one's place."""
        if whole in self.places and not torch.equal(self._of_file(file, name), self._of_file(*self.places[whole])):
            both = " and ".join(f"{name} in {file.name}" for file, name in (self.places[whole], (file, name)))
            raise ValueError(f"{self._folder} holds two different weights for one place: {both}")


def _headers(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with StoredTensors.open([file]) as stored:
            return stored.shapes()
    return {name: tensor.to("meta") for name, tensor in load_pickled(file, mmap=True).items()}
