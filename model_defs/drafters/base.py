"""The base of all drafters: a module that predicts the next tokens from the target's features and the text."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.drafters.token_info import TokenInfo, TokenInfoFactors
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.files import read_json, read_tensors, require_finite, save_tensors
from redraft.model_defs.target.model import FeatureReader, Target

RIDGE = 1e-2


class DrafterConfig(Protocol):
    """Fields that the configuration of every drafter has, a frozen dataclass."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hot_vocabulary(self) -> int | None:
        """Rows of the head, or None for all tokens."""


class Decay(StrEnum):
    cosine = "cosine"
    linear = "linear"


@dataclass(frozen=True)
class Recipe:
    """Defaults of a drafter's training, which the command line can change."""

    peak_rate: float
    """Adam's learning rate at its peak"""
    decay: Decay = Decay.cosine
    window: int = 32
    """positions of a window"""
    batch: int = 16
    """windows of a step"""
    hidden_weight: float = 0.0
    """weight of the squared error of the predicted hidden states beside the cross-entropy"""
    depth_shares: tuple[float, ...] = (1.0, 0.5, 0.5, 0.25)
    """share of a batch's positions that is trained to each depth; the last holds for all that are deeper"""


class Drafter(nn.Module):
    """A draft model with a head: rows of the target's LM head, frozen, or rows of its own, which are trained.

    A subclass names itself and its configuration, computes what the head reads in `unroll`, and may start
    from something better than random weights. `hot_ids` int64 [K] are the target's ids of the head's rows.
    """

    name: ClassVar[str]
    config_type: ClassVar[type]
    recipe: ClassVar[Recipe]
    is_trained: ClassVar[bool] = True
    """Whether redraft train trains it; others are read from the hub"""
    reads_context: ClassVar[bool] = False
    """Whether it attends to all that was committed, prompts included."""

    reads_text: ClassVar[bool] = False
    """Whether it reads the text from its first token on, which no features precede"""
    has_raw_logits: ClassVar[bool] = False
    """Whether its paths have `raw_logits`, from which drafts can be re-sampled"""
    owns_embedding: bool = False
    """Whether its embedding is not the target's"""
    context_layers: int = 0
    """Layers of its context cache"""
    block_rows: int = 0
    """Rows of that cache that each of its drafts takes; 0: one for every node that a draft expands"""
    block_size: int = 0
    """How many of them there are where none stands twice"""
    feature_layers: tuple[int, ...] = ()
    """The target's layers whose inputs it drafts from; none: from the hidden states"""
    feature_size: int
    """Width F of the target's features that its network takes"""
    feature_at: int = 0
    """The first of its columns of these features, which other drafters may share"""

    config: Any
    hot_ids: Tensor
    embedding: Tensor
    head_rows: Tensor
    """The target's rows [K, H]."""
    own_head: nn.Linear
    """The head of a drafter that does not draft with the target's."""
    fuse: nn.Module
    """Makes one state [..., H] of what enters `feature_layers` [..., n * H]."""
    token_info: TokenInfo | TokenInfoFactors | None

    def __init__(self, config: DrafterConfig, target: Target, hot_ids: Tensor | None = None):
        """`hot_ids` None is the whole vocabulary. Raises ValueError where target or ids do not fit the shape."""
        super().__init__()
        if (target.config.hidden_size, target.config.vocab_size) != (config.hidden_size, config.vocab_size):
            raise ValueError(
                f"the drafter was made for a target of hidden size {config.hidden_size} and vocabulary "
                f"{config.vocab_size}; this one has {target.config.hidden_size} and {target.config.vocab_size}"
            )
        self.config, self.token_info = config, None
        self.feature_size = config.hidden_size
        rows = config.hot_vocabulary or config.vocab_size
        ids = torch.arange(rows) if hot_ids is None else hot_ids.long()
        if ids.shape != (rows,):
            raise ValueError(f"hot_ids has shape {tuple(ids.shape)}, expected ({rows},)")
        if not ids.is_meta and len(wrong := ids[(ids < 0) | (ids >= config.vocab_size)]):
            # An operator would read beside its table at such an id.
            raise ValueError(f"hot_ids holds {int(wrong[0])}, expected ids from 0 to {config.vocab_size - 1}")
        self.register_buffer("hot_ids", ids, persistent=False)
        self.register_buffer("embedding", target.embedding.weight.detach(), persistent=False)
        self.register_buffer("head_rows", target.lm_head.weight.detach()[ids], persistent=False)

    def prepare(self, cache_rows: int, levels: int, context: int = 0) -> None:
        """Make the constants of drafting, for a context cache of `cache_rows` rows, drafts of `levels` levels, and
        texts of up to `context` positions (default: all rows).

        Raises ValueError where it cannot draft so many levels.
        """

    def feature_reader(self) -> FeatureReader:
        """What gives, in the target's network, the features [..., H] of a drafter with `feature_layers`."""
        return FeatureReader(self.config.hidden_size, self.feature_layers, copy.deepcopy(self.fuse))

    def features_of(self, windows: Windows) -> Tensor:
        """The features [W, S, H] in training."""
        if not self.feature_layers:
            return windows.hidden
        assert windows.layers is not None
        return self.fuse(windows.layers)

    def own_features(self, features: Tensor) -> Tensor:
        """Its columns [..., H] of features [..., F]."""
        size = self.config.hidden_size
        return features if self.feature_size == size else features[..., self.feature_at : self.feature_at + size]

    def most_likely(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Paths.most_likely`, from what the head reads."""
        return self.rank(hidden, self.head_weight, count)

    def rank(self, hidden: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The same with a head's weight [K, H]."""
        scores = F.log_softmax(F.linear(hidden, head.to(hidden.dtype)).float(), dim=-1)
        values, rows = scores.topk(count, dim=-1)
        return values, self.hot_ids[rows].to(torch.int32)

    @property
    def head_weight(self) -> Tensor:
        """The head's weight [K, H]."""
        return self.own_head.weight if hasattr(self, "own_head") else self.head_rows

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def unroll(self, windows: Windows, kept: Sequence[int]) -> Iterator[Tensor]:
        """What the head reads [W * kept[d], H] at the draft's depths d = 0, 1, ..., for the first kept[d] positions of
        each window (numbers that do not grow): what drafting computes where every draft token is the text's."""
        raise NotImplementedError

    @property
    def longest_context(self) -> int | None:
        """The longest context that it reads, None for any."""
        return None

    @property
    def most_steps(self) -> int | None:
        """The most steps that it drafts, None for any number."""
        return None

    def require_steps(self, steps: int, given: str = "") -> None:
        """Raise ValueError where the drafter cannot draft so many steps; `given` is the flag, with its value, that asks
        for them."""
        if (most := self.most_steps) is not None and steps > most:
            raise ValueError(
                f"{given or f'{steps} drafting steps'}: expected at most {most}, as many steps as this drafter "
                f"{self.name!r} drafts"
            )

    def initialize(self, target: Target, windows: Windows) -> None:
        """Set the weights in closed form from the target and a sample of teacher data."""

    @classmethod
    def configure(cls, target: Target, rows: int | None = None, settings: Mapping[str, Any] | None = None) -> Any:
        """The configuration of a drafter for a target, with `rows` head rows (None: all); `settings` are more of its
        fields, values may be text. Raises ValueError for a setting that is unknown or does not fit."""
        sizes = {
            "hidden_size": target.config.hidden_size,
            "vocab_size": target.config.vocab_size,
            "hot_vocabulary": rows,
        }
        names = {field.name for field in fields(cls.config_type)} - set(sizes)
        if unknown := set(settings or {}) - names:
            raise ValueError(f"a drafter {cls.name!r} has no setting {sorted(unknown)}; it has {sorted(names)}")
        return cls.config_type(**sizes) if not settings else cls.checked(sizes | dict(settings))

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> Any:
        """The configuration of these fields, whose values may be text. Raises ValueError for one that does not fit."""
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls.config_type).validate_python(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"setting {first['loc'][-1]} is {first['input']!r}: {first['msg']}") from None

    def save(self, folder: Path, card: Mapping[str, Any] | None = None) -> None:
        """Write `config.json` (with the entries of `card`) and `drafter.safetensors` (bfloat16)."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        if self.config.hot_vocabulary:
            weights["hot_ids"] = self.hot_ids.to(torch.int32)
        if self.owns_embedding:
            weights["embedding"] = self.embedding.to(torch.bfloat16)
        save_tensors(weights, folder / "drafter.safetensors")
        config = {"drafter": self.name, **asdict(self.config), **(card or {})}
        partial = folder / ".config.json.partial"
        partial.write_text(json.dumps(config, indent=2) + "\n")
        partial.replace(folder / "config.json")

    @classmethod
    def load(cls, folder: Path, target: Target) -> Self:
        """Load what `save` wrote. Raises ValueError when the drafter does not fit the target, or is not whole."""
        raw = read_json(folder / "config.json")
        if raw.get("drafter") != cls.name:
            raise ValueError(f"{folder}/config.json describes a drafter {raw.get('drafter')!r}, expected {cls.name!r}")
        needed = [field.name for field in fields(cls.config_type) if field.default is MISSING]
        if missing := [name for name in needed if name not in raw]:
            raise ValueError(f"{folder} is not a whole drafter: config.json does not say {', '.join(missing)}")
        values = {field.name: raw[field.name] for field in fields(cls.config_type) if field.name in raw}
        config = cls.checked(values)
        weights = read_weights(folder / "drafter.safetensors")
        others = weights.pop("hot_ids", None), weights.pop("embedding", None)
        try:
            return cls.of_weights(config, target, weights, *others)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None

    @classmethod
    def of_weights(
        cls,
        config: DrafterConfig,
        target: Target,
        weights: Mapping[str, Tensor],
        hot_ids: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Self:
        """A drafter of float32 weights, by our names; `embedding` [V, H] is its own where it is not the target's.

        Raises ValueError where the drafter does not fit the target, or the weights are not its own.
        """
        drafter = cls(config, target, hot_ids)
        if embedding is not None:
            if embedding.shape != drafter.embedding.shape:
                shapes = f"{tuple(embedding.shape)}, the target's has {tuple(drafter.embedding.shape)}"
                raise ValueError(f"the drafter's embedding has shape {shapes}")
            drafter.owns_embedding = not is_same(embedding, drafter.embedding)
            drafter.embedding = embedding if drafter.owns_embedding else drafter.embedding
        expected = drafter.state_dict()
        for name, tensor in expected.items():
            if name not in weights:
                raise ValueError(f"it is not a whole drafter: the weight {name} is missing")
            if weights[name].shape != tensor.shape:
                shapes = f"{tuple(weights[name].shape)}, expected {tuple(tensor.shape)}"
                raise ValueError(f"it is not a whole drafter: the weight {name} has shape {shapes}")
        if more := sorted(weights.keys() - expected.keys()):
            raise ValueError(f"it has weights that a drafter {cls.name!r} of its configuration has not: {more[0]}")
        drafter.load_state_dict(weights)
        return drafter.eval()


def is_same(weight: Tensor, other: Tensor) -> bool:
    """Whether two weights are one after rounding to bfloat16, in which targets and drafters are stored."""
    return torch.equal(weight.to(torch.bfloat16), other.to(torch.bfloat16))


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file as float32. Raises ValueError for one that is not finite."""
    tensors = read_tensors(file)
    for name, tensor in tensors.items():
        require_finite(tensor, name, file)
    return {name: tensor.float() for name, tensor in tensors.items()}


@torch.no_grad()
def ridge(x: Tensor, y: Tensor) -> Tensor:
    """The weight W [b, a] of a linear layer that maps rows x [N, a] to y [N, b] with the least squared error, pulled
    towards zero by RIDGE times the mean square of x."""
    gram = x.T @ x
    damping = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=x.device)
    return torch.linalg.solve(gram + damping, x.T @ y).T.contiguous()
