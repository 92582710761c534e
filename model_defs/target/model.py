"""The target: every family's decoder as one torch module.

The module computes everything but attention's access to context; that is a callable, so that the
same definition trains drafters (dense attention), generates (a preallocated cache) and is exported
(plugin and native forms).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.files import StoredTensors, require_finite, weight_files
from redraft.model_defs.target.attention import HeadNorms, rms_norm
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.families.base import Weights
from redraft.model_defs.target.families.registry import FAMILIES
from redraft.model_defs.weights.blocks import BlockSource, StoredBlocks
from redraft.model_defs.weights.folder import gguf_file, quantized_weights

HEAD = "lm_head.weight"
"""What Hugging Face calls the LM head, in every family"""
ENDS = ("embedding.weight", "lm_head.weight")
"""The parameters that drafters share"""
Attend = Callable[[int, Tensor, HeadNorms | None], Tensor]
"""attend(layer, qkv, norms) -> out: `qkv` [..., (heads + 2 kv_heads) * head_size], the fused projections of
the rows before norms and RoPE; `out` [..., heads * head_size]. It applies both, keeps the cache, and attends."""


class Join(Protocol):
    """How the residual stream takes what a block gives, both [..., hidden_size]."""

    def __call__(self, stream: Tensor | None, part: Tensor) -> Tensor:
        """Their sum; of a shard, whose blocks give parts, the sum over all ranks. Without a stream, the parts' sum."""
        ...


def add(stream: Tensor | None, part: Tensor) -> Tensor:
    """The `Join` of a whole target."""
    return part if stream is None else stream + part


class States(NamedTuple):
    """What a forward of the target gives for each token."""

    hidden: Tensor
    """[..., hidden_size], after the final norm: what the LM head reads"""
    features: Tensor
    """[..., feature_size], what drafters read: `hidden`, unless the target has `feature_readers`"""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, in_float32: bool = False):
        """`in_float32`: see `TargetConfig.float32_norms`."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.in_float32 = eps, in_float32

    def forward(self, x: Tensor) -> Tensor:
        if self.in_float32:
            return rms_norm(x, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


Norm = RMSNorm | nn.LayerNorm


def norm_of(config: TargetConfig) -> Norm:
    """A norm of hidden states, of the target's kind."""
    if config.layer_norm:
        return nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.float32_norms)


def table(rows: int, size: int) -> nn.Embedding:
    """An embedding with random numbers; on device "meta" without any, which torch would import its compiler for."""
    weight = torch.empty(rows, size)
    return nn.Embedding.from_pretrained(weight if weight.is_meta else weight.normal_(), freeze=False)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class MixtureOfExperts(nn.Module):
    """The sum of a few experts' outputs, which a router chooses and weighs for each row.

    All experts compute all rows, as two grouped products; those that are not chosen have weight 0.
    """

    def __init__(self, config: TargetConfig):
        super().__init__()
        assert config.experts is not None
        self.settings, self.activation = config.experts, ACTIVATIONS[config.activation]
        count, hidden, columns = config.experts.count, config.hidden_size, config.intermediate_size
        self.router = nn.Linear(hidden, count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * columns, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, columns))

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.ndim == 2 else x.flatten(0, -2)
        chosen, ids = self.router(rows).float().softmax(-1).topk(self.settings.chosen)
        if self.settings.normalized:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        here = ids[..., None] == torch.arange(self.settings.count, device=ids.device)
        weights = (here * chosen[..., None]).sum(-2).to(x.dtype)
        gate, up = (rows[None] @ self.gate_up.transpose(1, 2)).chunk(2, dim=-1)
        each = (self.activation(gate) * up) @ self.down.transpose(1, 2)
        out = (each * weights.T[..., None]).sum(0)
        return out if x.ndim == 2 else out.unflatten(0, x.shape[:-1])


class DecoderLayer(nn.Module):
    def __init__(self, config: TargetConfig):
        super().__init__()
        hidden, heads = config.hidden_size, config.num_heads * config.head_size
        kv = config.num_kv_heads * config.head_size
        self.config, self.activation = config, ACTIVATIONS[config.activation]
        self.attention_norm = norm_of(config)
        self.qkv = nn.Linear(hidden, heads + 2 * kv, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_size, config.rms_norm_eps, config.float32_norms) for _ in "qk"
            )
        self.attention_out = nn.Linear(heads, hidden, bias=config.output_bias)
        self.mlp_norm = norm_of(config)
        if config.sandwich_norms:
            self.attention_post_norm, self.mlp_post_norm = norm_of(config), norm_of(config)
        if config.experts:
            self.experts = MixtureOfExperts(config)
            return
        if config.gated:
            self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=config.output_bias)
        else:
            self.up = nn.Linear(hidden, config.intermediate_size, bias=config.output_bias)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=config.output_bias)

    def forward(self, x: Tensor, layer: int, attend: Attend, rows: Tensor | None = None, join: Join = add) -> Tensor:
        """One layer. `rows` int32 [n]: the rows of x [N, H] that go on after attention; others are only context."""
        attended = attend(layer, self.qkv(self.attention_norm(x)), self.head_norms)
        if rows is not None:
            x, attended = F.embedding(rows, x), F.embedding(rows, attended)
        part = self.attention_out(attended)
        x = x + self.attention_post_norm(join(None, part)) if self.config.sandwich_norms else join(x, part)
        part = self.mlp(self.mlp_norm(x))
        return x + self.mlp_post_norm(join(None, part)) if self.config.sandwich_norms else join(x, part)

    @property
    def head_norms(self) -> HeadNorms | None:
        """What attention normalizes heads with, if it does."""
        if not self.config.qk_norm:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.config.rms_norm_eps)

    def mlp(self, x: Tensor) -> Tensor:
        """What is added, but for a sandwich norm, for rows x [..., H] after their norm."""
        if self.config.experts:
            return self.experts(x)
        if not self.config.gated:
            return self.down(self.activation(self.up(x)))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


def copy_weights(layer: nn.Module, source: nn.Module) -> None:
    """Copy the weights that both layers have: all of them, except from a mixture of experts to an MLP."""
    state = layer.state_dict()
    layer.load_state_dict({name: weight for name, weight in source.state_dict().items() if name in state}, strict=False)


class FeatureReader(nn.Module):
    """A part of the features: what enters some layers, side by side, through a module that fuses it; without layers,
    the hidden states."""

    def __init__(self, size: int, layers: tuple[int, ...] = (), fuse: nn.Module | None = None):
        """size: width of what it gives. Layer n of n is what leaves the last one, before the final norm."""
        super().__init__()
        self.size, self.layers, self.fuse = size, layers, fuse

    def forward(self, entering: Mapping[int, Tensor], hidden: Tensor) -> Tensor:
        """[..., size], from what enters each layer [..., hidden_size] and the hidden states."""
        read = torch.cat([entering[layer] for layer in self.layers], dim=-1) if self.layers else hidden
        return read if self.fuse is None else self.fuse(read)


class Target(nn.Module):
    """Token ids to states, of which `hidden` gives the logits and `features` are for drafters."""

    norm: Norm
    feature_readers: nn.ModuleList
    """The parts of the features, side by side; none: they are the hidden states"""
    blocks: StoredBlocks | None = None
    """The weights that stay in their source's blocks: parameters without storage stand for them"""
    row_scales: Mapping[str, Tensor | None] = MappingProxyType({})
    """The scales float32 [N] of the rows of matrices that the source stores in E4M3, and None for those that it spares:
    see `weights.float8`"""

    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config = config
        self.embedding = table(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.positions = table(config.max_position, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.feature_readers = nn.ModuleList()

    @property
    def feature_size(self) -> int:
        """F, the width of the features."""
        readers = cast(Iterable[FeatureReader], self.feature_readers)
        return sum(reader.size for reader in readers) or self.config.hidden_size

    def in_dtype(self, dtype: torch.dtype) -> Target:
        """Itself with weights of another dtype, except norms that stay in float32 (`TargetConfig.float32_norms`)."""
        norms = [norm for norm in self.modules() if isinstance(norm, RMSNorm) and norm.in_float32]
        weights = [norm.weight.detach() for norm in norms]
        self.to(dtype)
        for norm, weight in zip(norms, weights, strict=True):
            norm.weight = nn.Parameter(weight, requires_grad=False)
        return self

    def first_rows(self, name: str, count: int) -> Tensor:
        """The first rows of a parameter, also of one that stays in blocks."""
        if self.blocks is not None and name in self.blocks:
            return self.blocks.first_rows(name, count)
        return self.get_parameter(name)[:count]

    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """The first layer's input [..., H] for int [...] token ids at int [...] positions; without positions, the last
        dimension's are 0, 1, ... Only a target with learned positions reads them; drafted nodes may stand beyond the
        last one, and are never kept."""
        x = self.embedding(input_ids)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.config.learned_positions:
            if positions is None:
                positions = torch.arange(input_ids.shape[-1], device=input_ids.device)
            x = x + self.positions(positions.clamp(max=self.config.max_position - 1))
        return x

    def forward(self, input_ids: Tensor, attend: Attend, join: Join = add, positions: Tensor | None = None) -> States:
        """States of int [...] token ids; `positions`: see `embed`."""

        def run(index: int, x: Tensor) -> Tensor:
            return self.layers[index](x, index, attend, join=join)

        return self.states(self.embed(input_ids, positions), run)

    def states(self, x: Tensor, run: Callable[[int, Tensor], Tensor]) -> States:
        """States of the first layer's input [..., H]; run(index, x) is what a layer makes of its input."""
        entering = {0: x}
        for index in range(self.config.num_layers):
            x = run(index, x)
            entering[index + 1] = x
        hidden = self.norm(x)
        parts = [reader(entering, hidden) for reader in self.feature_readers]
        return States(hidden, torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0] if parts else hidden)

    @classmethod
    def check_weights(cls, hf: Mapping[str, Tensor], config: TargetConfig) -> Target:
        """A target without storage (device "meta"), for which these Hugging Face weights do; meta tensors are enough.

        Raises ValueError naming a missing weight, or one of another shape.
        """
        with torch.device("meta"):
            target = cls(config)
        expected = target.state_dict()
        for name, weight in weights_of(config).items():
            try:
                shapes = [hf[source].shape for source in weight.sources]
            except KeyError as missing:
                raise ValueError(f"weight {missing} is missing") from None
            actual = tuple(shapes[0])
            if len(shapes) > 1:
                actual = (sum(shape[:1].numel() for shape in shapes), *shapes[0][1:])
            if weight.change is not None:
                with suppress(RuntimeError, IndexError):  # a shape that does not fit the change
                    actual = tuple(weight.change(torch.empty(actual, device="meta")).shape)
            if actual != expected[name].shape or any(other[1:] != shapes[0][1:] for other in shapes):
                raise ValueError(f"{name} has shape {actual}, expected {tuple(expected[name].shape)}")
        return target

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        dtype: torch.dtype | None = torch.float32,
        in_blocks: bool = False,
        float_ends: bool = True,
        beside_blocks: bool = False,
    ) -> Target:
        """Load a model folder's weights, converted to `dtype`, or as they are stored where it is None, except for norms
        that are computed from what is stored, which are in float32 then. Matrices of a GGUF file or beside quantized
        ones are bfloat16 then. With `in_blocks` weights that are stored in blocks are not loaded, and `blocks` reads
        them; embedding and LM head are floats too then, with `float_ends`. With `beside_blocks` all are floats, and
        `blocks` reads those that are stored so.

        The files are mapped, and one weight at a time is concatenated and converted: memory beyond the target's own is
        that of the largest. Raises UnsupportedModelError, FileNotFoundError or ValueError (a missing weight, one of
        another shape, or one that is not finite).
        """
        config = TargetConfig.load(folder)
        weights: dict[str, Tensor] = {}
        with stored_weights(folder, config) as stored:
            shapes = stored.shapes()
            if has_own_head(config, shapes, lambda a, b: torch.equal(stored.read(a), stored.read(b))):
                config = replace(config, tie_embeddings=False)
            target = cls.check_weights(shapes, config)
            if in_blocks:
                target.blocks = StoredBlocks(weights_of(config), stored_blocks(stored, folder), config.tie_embeddings)
            elif beside_blocks and isinstance(stored, BlockSource):
                target.blocks = StoredBlocks(weights_of(config), stored, config.tie_embeddings)
            ends = ENDS if float_ends else ()
            for name, weight in weights_of(config).items():
                if in_blocks and target.blocks and name in target.blocks and name not in ends:
                    weights[name] = stand_in(len(weights), target.get_parameter(name).shape)
                    continue
                parts = [stored.read(source) for source in weight.sources]
                for source, part in zip(weight.sources, parts, strict=True):
                    require_finite(part, source, folder)
                read = weight.read(parts)
                as_stored = read.dtype if read.ndim == 1 else shapes[weight.sources[0]].dtype
                weights[name] = read.to(dtype or as_stored)
        if config.tie_embeddings:
            weights["lm_head.weight"] = weights["embedding.weight"]
        target.load_state_dict(weights, assign=True)
        if config.tie_embeddings:
            target.lm_head.weight = target.embedding.weight
        return target.eval().requires_grad_(False)


def stand_in(number: int, shape: Sequence[int]) -> Tensor:
    """A weight without storage, for one that stays in blocks; of other numbers than any other: the exporter takes equal
    constants for one."""
    return torch.tensor(float(number)).expand(*shape)


def is_stand_in(weight: Tensor) -> bool:
    """Whether a weight only stands for one in blocks."""
    return not any(weight.stride())


class StoredWeights(Protocol):
    """The tensors of a folder, of which only headers are read until one is asked for."""

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor."""
        ...


def stored_blocks(stored: StoredWeights, folder: Path) -> BlockSource:
    """A folder's weights as a source of blocks. Raises ValueError for a folder without any."""
    if not isinstance(stored, BlockSource) or not any(map(stored.form, stored.shapes())):
        raise ValueError(
            f"{folder} holds no blocks to serve as they are: fetch the model again from a source that is quantized so, "
            "with --replace, or choose another --precision"
        )
    return stored


@contextmanager
def stored_weights(folder: Path, config: TargetConfig) -> Iterator[StoredWeights]:
    """The weights of a model folder with this configuration, while its files are open. Raises FileNotFoundError, or
    ValueError for a damaged file."""
    if file := gguf_file(folder):
        from redraft.model_defs.weights.gguf import GgufWeights  # the package reads no other folders
        from redraft.model_defs.weights.gguf_header import read_header

        yield GgufWeights(file, read_header(file).tensors, config, weight_names(config))
        return
    if quantized := quantized_weights(folder):
        yield quantized
        return
    with StoredTensors.open(weight_files(folder)) as stored:
        yield stored


def has_own_head(config: TargetConfig, names: Container[str], is_same: Callable[[str, str], bool]) -> bool:
    """Whether weights of these Hugging Face names have an LM head of their own though the configuration ties it to the
    embeddings: transformers ties only those that `is_same` holds for."""
    (embedding,) = weights_of(config)["embedding.weight"].sources
    return config.tie_embeddings and HEAD in names and embedding in names and not is_same(embedding, HEAD)


def give_layers(target: Target, layers: tuple[int, ...]) -> None:
    """Have the features be the hidden states and, after them, what enters these layers."""
    size = target.config.hidden_size
    target.feature_readers = nn.ModuleList([FeatureReader(size), FeatureReader(len(layers) * size, layers)])


def weights_of(config: TargetConfig) -> Weights:
    """Our names of weights, each with the Hugging Face weights that it is read from."""
    return FAMILIES[config.family].weights(config)


def weight_names(config: TargetConfig) -> list[str]:
    """The Hugging Face names of all weights of a target."""
    return [name for weight in weights_of(config).values() for name in weight.sources]
