"""Drafting loops as ONNX networks: in plugin form with a `redraft::BeamStep` or `DrawStep` node for each level; in
native form, of standard operators only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.export.networks import attention_attributes, cache_names, export_network
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.loops.chains import Resampler
from redraft.model_defs.loops.context_cache import CacheTables
from redraft.model_defs.loops.operators import STANDARD, TORCH, Operators
from redraft.model_defs.loops.padded_context_cache import NativeContext
from redraft.model_defs.loops.random_draws import RandomDraws
from redraft.model_defs.target.attention import HeadNorms

if TYPE_CHECKING:
    import onnx_ir as ir


class NodeOperators(Operators):
    """The operators of a drafter as plugin nodes: a level of its beam search, or of its random draws, is one."""

    @staticmethod
    def beam_step(values: Tensor, ids: Tensor, width: int, *draft: Tensor) -> tuple[Tensor, ...]:
        batch = draft[0].shape[0] if draft else values.shape[0]
        level = (batch, draft[0].shape[1] + 1 if draft else 1, width)
        candidates, nodes, ints = (*level, values.shape[1]), (batch * width,), torch.int32
        dtypes = (ints, values.dtype, ints, ints, ints, ints)
        shapes = (candidates, candidates, level, (batch, width), nodes, nodes)
        return _node("BeamStep", (values, ids, *draft), {"width": width}, dtypes, shapes)

    @staticmethod
    def draw_step(
        values: Tensor,
        ids: Tensor,
        noise: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        rule: str,
        count: int,
        *draft: Tensor,
    ) -> tuple[Tensor, ...]:
        batch, (expanded, drawn) = noise.shape[0], (draft[0].shape[1], draft[2].shape[1]) if draft else (0, 0)
        nodes = drawn + 1 - expanded
        size = nodes * count if rule == "gumbel_top_k" else count
        state = 2 if rule == "stochastic_beam" else 0
        level, floats, ints = (batch, expanded + nodes, values.shape[1]), values.dtype, torch.int32
        inputs = (values, ids, noise, temperature, top_k, top_p, *draft)
        dtypes = (ints, floats, ints, *[floats] * state, *[ints] * 3)
        shapes = (level, level, (batch, drawn + size), *[(batch, size)] * state, *[(batch * size,)] * 3)
        return _node("DrawStep", inputs, {"rule": rule, "count": count}, dtypes, shapes)

    @staticmethod
    def perturbed_topk(values: Tensor, ids: Tensor, *noise: Tensor, level: int, k: int) -> tuple[Tensor, Tensor]:
        inputs = (values, ids, *noise)
        shapes, dtypes = [(values.shape[0], k)] * 2, [values.dtype, torch.int32]
        best, chosen = _node("PerturbedTopK", inputs, {"level": level, "k": k}, dtypes, shapes)
        return best, chosen

    @staticmethod
    def tree_attention(
        qkv: Tensor,
        *rows: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        window: int,
        norms: HeadNorms | None,
    ) -> Tensor:
        attributes = attention_attributes(num_heads, num_kv_heads, head_size, window, norms)
        shapes = [(qkv.shape[0], num_heads * head_size)]
        (out,) = _node("TreeAttention", (qkv, *rows, *(norms or ())[:2]), attributes, [qkv.dtype], shapes)
        return out

    @staticmethod
    def pair_rows(tokens: Tensor, row_offsets: Tensor, cache_lengths: Tensor) -> tuple[Tensor, ...]:
        shapes = [tokens.shape, *[cache_lengths.shape] * 4]
        return _node("PairRows", (tokens, row_offsets, cache_lengths), {}, [torch.int32] * 5, shapes)

    @staticmethod
    def draft_rows(
        contexts: Tensor, *grown: Tensor, level: int, first: int, width: int, words: int
    ) -> tuple[Tensor, ...]:
        batch = contexts.shape[0]
        shapes = [(batch * width,), (batch + 1,), (batch * width, words), (batch,)]
        attributes = {"level": level, "first": first, "width": width, "words": words}
        return _node("DraftRows", (contexts, *grown), attributes, [torch.int32] * 4, shapes)

    @staticmethod
    def token_info_topk(
        logits: Tensor,
        sequences: Tensor,
        tokens: Tensor,
        ids: Tensor,
        *info: Tensor,
        k: int,
        level: int,
        levels: int,
    ) -> tuple[Tensor, Tensor]:
        attributes, shapes = {"k": k, "level": level, "levels": levels}, [(sequences.shape[0], k)] * 2
        inputs, dtypes = (logits, sequences, tokens, ids, *info), [logits.dtype, torch.int32]
        values, top_ids = _node("TokenInfoTopK", inputs, attributes, dtypes, shapes)
        return values, top_ids


def _node(op: str, inputs: Sequence[Tensor], attributes: dict, dtypes: Sequence, shapes: Sequence) -> Any:
    return torch.onnx.ops.symbolic_multi_out(
        f"redraft::{op}", inputs, attrs=attributes, dtypes=dtypes, shapes=shapes, version=1
    )


OUTPUTS = ["candidates", "log_probs", "parents"]
"""Outputs of a beam search."""
DRAWS = ["ids", "log_probs", "draws"]
"""Outputs of random draws."""
CHAINS = ["raw_logits", "sequences", "tokens"]
"""Inputs of a resampler."""
NOISE = {
    "seeds": torch.zeros(3, 2, dtype=torch.int32),
    "positions": torch.zeros(3, dtype=torch.int32),
    "temperature": torch.ones(3),
    "top_k": torch.zeros(3, dtype=torch.int32),
    "top_p": torch.ones(3),
    "sharpness": torch.ones(3),
}
"""The last inputs of a beam search with a support, for 3 sequences: see `SharedNoise`."""

Drafting = BeamSearch | RandomDraws
"""A drafting loop, with its drafter."""


@dataclass(frozen=True)
class DrafterInputs:
    """The inputs of a drafter's network.

    features [P, F] in the module's dtype, tokens int32 [P] and, for a drafter with a context, row_offsets int32
    [B + 1], slots and cache_lengths int32 [B] (see `DraftBatch`), then k_cache.{l} and v_cache.{l} [slots, kv_heads,
    rows, head_size]. Without a context P is B. For random draws, noise [B, R, M], temperature [B], top_k int32 [B] and
    top_p [B] come last (see `DraftSampling`); for a beam search with a support, those of `NOISE`.
    """

    names: list[str]
    examples: list[Tensor]
    axes: list[dict[int, str]]

    @classmethod
    def of(cls, drafting: Drafting, cache_dtype: torch.dtype) -> DrafterInputs:
        drafter: Drafter = drafting.drafter
        pairs, ints = ("P", 5) if drafter.reads_context else ("B", 3), torch.int32
        dtype = next(drafter.parameters()).dtype
        inputs = {
            "features": (torch.zeros(pairs[1], drafter.feature_size, dtype=dtype), pairs[0]),
            "tokens": (torch.ones(pairs[1], dtype=ints), pairs[0]),
        }
        if drafter.reads_context:
            tables = cast(CacheTables, drafter.tables)
            config, layers = tables.config, drafter.context_layers
            inputs |= {
                "row_offsets": (torch.tensor([0, 1, 4, 5], dtype=ints), "B1"),
                "slots": (torch.zeros(3, dtype=ints), "B"),
                "cache_lengths": (torch.zeros(3, dtype=ints), "B"),
            }
            shape = (7, config.num_kv_heads, tables.rows, config.head_size)
            inputs |= {name: (torch.zeros(shape, dtype=cache_dtype), "slots") for name in cache_names(layers)}
        if isinstance(drafting, RandomDraws):
            inputs |= {
                "noise": (torch.zeros(3, drafting.noise_rows, drafting.support), "B"),
                "temperature": (torch.ones(3), "B"),
                "top_k": (torch.zeros(3, dtype=ints), "B"),
                "top_p": (torch.ones(3), "B"),
            }
        elif drafting.support:
            inputs |= {name: (example, "B") for name, example in NOISE.items()}
        return cls(
            list(inputs), [example for example, _ in inputs.values()], [{0: axis} for _, axis in inputs.values()]
        )


class _PluginDrafter(nn.Module):
    """The drafting loop, of plugin nodes."""

    def __init__(self, drafting: Drafting):
        super().__init__()
        self.drafting = drafting

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.drafting(inputs, NodeOperators())


def export_drafter_plugin(drafting: Drafting, cache_dtype: torch.dtype = torch.float32) -> ir.Model:
    """The drafter's network in plugin form; activations and weights in the module's dtype.

    Inputs: see `DrafterInputs`; caches are of `cache_dtype` and updated in place. Outputs: candidates int32 and
    log_probs [B, L, W, K], parents int32 [B, L, W] and, of a drafter with a chain, raw_logits [B * L, K];
    of random draws ids int32 and log_probs [B, E, M] and draws int32 [B, D].
    """
    inputs = DrafterInputs.of(drafting, cache_dtype)
    if isinstance(drafting, RandomDraws):
        outputs = DRAWS
    else:
        outputs = [*OUTPUTS, *(["raw_logits"] if drafting.drafter.has_raw_logits else [])]
    return export_network(_PluginDrafter(drafting), (inputs.examples,), (inputs.axes,), inputs.names, outputs)


def export_drafter_native(drafting: Drafting, cache_rows: int = 0, raw_logits: bool = False) -> ir.Model:
    """The drafter's network in native form; activations, weights and caches in the module's dtype.

    Without a context its inputs are those of the plugin form. With one they are features [B, N, F], tokens int32
    [B, N], pair_counts int64 [B] (how many of the N pairs there are), write_indices int64 [B] (the cache row that takes
    a sequence's first pair) and k_cache.{l} and v_cache.{l} [B, kv_heads, cache_rows, head_size]; noise and filters as
    there. Outputs: candidates, log_probs float32 and parents, or ids, log_probs and draws; with `raw_logits`, of a beam
    search over a drafter with a chain, raw_logits [B, L, K]; then k_cache.{l}.updated and v_cache.{l}.updated. Raises
    ValueError for a beam search with a support.
    """
    _refuse_noise(drafting)
    inputs = _native_inputs(drafting, cache_rows)
    outputs = DRAWS if isinstance(drafting, RandomDraws) else OUTPUTS
    outputs = [*outputs, *(["raw_logits"] if raw_logits else [])]
    updated = cache_names(drafting.drafter.context_layers, ".updated")
    network = _NativeDrafter(drafting, raw_logits)
    return export_network(network, (inputs.examples,), (inputs.axes,), inputs.names, [*outputs, *updated])


def _refuse_noise(drafting: Drafting) -> None:
    """Raise ValueError for a loop that takes the target's noise, a hash of 32-bit words."""
    if isinstance(drafting, BeamSearch) and drafting.support:
        raise ValueError(
            f"support is {drafting.support}, expected 0: networks in native form cannot make the target's noise, since "
            "TensorRT has no operators on the bits of integers"
        )


class NativeOperators(Operators):
    """Standard operators; a context is one of padded rows."""

    made: NativeContext

    def context(self, tables: CacheTables, inputs: Sequence[Tensor]) -> NativeContext:
        self.made = NativeContext(tables, inputs)
        return self.made


class _NativeDrafter(nn.Module):
    """The drafting loop; a context is one of padded rows."""

    def __init__(self, drafting: Drafting, raw_logits: bool):
        super().__init__()
        self.drafting, self.raw_logits = drafting, raw_logits

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if not self.drafting.drafter.reads_context:
            return list(self.drafting(inputs, STANDARD)[:3])
        operators = NativeOperators()
        features, tokens, *others = inputs
        outputs = self.drafting([features.flatten(0, 1), tokens.flatten(), *others], operators)
        levels = [outputs[3].unflatten(0, (-1, self.drafting.length))] if self.raw_logits else []
        caches = operators.made.caches.values()
        return [*outputs[:3], *levels, *(k for k, _ in caches), *(v for _, v in caches)]


def _native_inputs(drafting: Drafting, cache_rows: int) -> DrafterInputs:
    drafter = drafting.drafter
    dtype = next(drafter.parameters()).dtype
    inputs = DrafterInputs.of(drafting, dtype)
    if not drafter.reads_context:
        return inputs
    config = cast(CacheTables, drafter.tables).config
    batch, pairs = 3, 5
    shape = (batch, config.num_kv_heads, cache_rows, config.head_size)
    given = {
        "features": torch.zeros(batch, pairs, drafter.feature_size, dtype=dtype),
        "tokens": torch.ones(batch, pairs, dtype=torch.int32),
        "pair_counts": torch.ones(batch, dtype=torch.int64),
        "write_indices": torch.zeros(batch, dtype=torch.int64),
        **{name: torch.zeros(shape, dtype=dtype) for name in cache_names(drafter.context_layers)},
    }
    axes = [{0: "B", 1: "N"}, {0: "B", 1: "N"}, *[{0: "B"}] * (len(given) - 2)]
    if not isinstance(drafting, RandomDraws):
        return DrafterInputs(list(given), list(given.values()), axes)
    sampling = inputs.names.index("noise")
    names, examples = [*given, *inputs.names[sampling:]], [*given.values(), *inputs.examples[sampling:]]
    return DrafterInputs(names, examples, [*axes, *inputs.axes[sampling:]])


def export_resampler_plugin(drafting: BeamSearch) -> ir.Model:
    """The network that re-samples from chains: inputs raw_logits [B * L, K], sequences int32 [B] (0, 1, ...) and tokens
    int32 [B], then those of `NOISE` with a support; its outputs are the drafter's but for raw logits. Its drafting
    loop's drafter is a `Resampler`."""
    chains, *others = resampling_examples(drafting)
    module, axes = Resampling(drafting, NodeOperators()), [{0: "R"}, *[{0: "B"}] * len(others)]
    names = [*CHAINS, *(NOISE if drafting.support else ())]
    return export_network(module, ([chains.flatten(0, 1), *others],), (axes,), names, OUTPUTS)


def export_resampler_native(drafting: BeamSearch) -> ir.Model:
    """The same of standard operators: raw_logits are [B, L, K], in the module's dtype as the drafter's are."""
    _refuse_noise(drafting)
    axes = [{0: "B"}] * 3
    module = Resampling(drafting, STANDARD)
    return export_network(module, (resampling_examples(drafting),), (axes,), CHAINS, OUTPUTS)


class Resampling(nn.Module):
    """A drafting loop over chains that are there already; the module holds what it looks up."""

    def __init__(self, drafting: BeamSearch, operators: Operators = TORCH):
        super().__init__()
        resampler: Resampler = drafting.drafter
        self.drafting, self.operators, self.drafter = drafting, operators, resampler.drafter

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """inputs: raw_logits [B, L, K] or [B * L, K], and the others."""
        raw_logits, *others = inputs
        return self.drafting([raw_logits.flatten(0, -2), *others], self.operators)[:3]


def resampling_examples(drafting: BeamSearch) -> list[Tensor]:
    """The inputs of `Resampling` for 3 sequences: raw_logits [B, L, K] in the module's dtype, sequences int32 [B] (0,
    1, ...), tokens int32 [B] and, with a support, those of `NOISE`."""
    resampler: Resampler = drafting.drafter
    shape, dtype = (3, resampler.levels, len(resampler.drafter.hot_ids)), next(resampler.drafter.parameters()).dtype
    sequences = torch.arange(3, dtype=torch.int32)
    noise = NOISE.values() if drafting.support else ()
    return [torch.zeros(shape, dtype=dtype), sequences, torch.ones_like(sequences), *noise]
