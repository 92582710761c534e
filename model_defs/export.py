"""Networks: ONNX graphs of the target and the drafter, from the torch modules that train and test them.

Two forms of one definition. The *plugin form* takes ragged rows and holds `redraft::TreeAttention` (the target) and
`redraft::BeamStep` nodes (the drafter). The *native form* takes padded rows [slots, rows] and holds standard operators
of opset 24 only. Both keep the KV cache outside of the network: `k_cache.{layer}` and `v_cache.{layer}` are inputs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_defs.attention import rope_table, split_qkv
from model_defs.draft_context import CacheTables
from model_defs.drafter import Drafter
from model_defs.drafting import BeamSearch
from model_defs.random_draws import RandomDraws
from model_defs.target import Target

OPSET = 24


@dataclass(frozen=True)
class CacheShape:
    """Extents of the KV cache: `slots` sequences of up to `max_len` tokens, and behind them `max_tree` rows of a tree
    (its root included)."""

    slots: int
    max_len: int
    max_tree: int

    @property
    def rows(self) -> int:
        return self.max_len + self.max_tree

    @property
    def mask_words(self) -> int:
        """int32 words of one row of the tree mask: a bit per row of a tree."""
        return -(-self.max_tree // 32)


class _PluginTarget(nn.Module):
    """The target over ragged rows; attention is one plugin node per layer."""

    rope_table: Tensor

    def __init__(self, target: Target, cache: CacheShape, aliased_outputs: bool, hidden_output: bool):
        super().__init__()
        self.target, self.aliased_outputs, self.hidden_output = target, aliased_outputs, hidden_output
        self.register_buffer("rope_table", rope_table(target.config, cache.rows))

    def forward(self, input_ids: Tensor, rows: list[Tensor], logit_rows: Tensor, k: list[Tensor], v: list[Tensor]):
        config = self.target.config
        attrs: dict[str, Any] = {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
        }
        k_out: list[Tensor] = []
        v_out: list[Tensor] = []

        def attend(layer: int, qkv: Tensor) -> Tensor:
            out_shape = (qkv.shape[0], config.num_heads * config.head_size)
            caches = (k[layer], v[layer]) if self.aliased_outputs else ()
            out, *updated = torch.onnx.ops.symbolic_multi_out(
                "redraft::TreeAttention",
                (qkv, *rows, self.rope_table, k[layer], v[layer]),
                attrs=attrs,
                dtypes=(qkv.dtype, *(c.dtype for c in caches)),
                shapes=(out_shape, *(c.shape for c in caches)),
                version=1,
            )
            k_out.extend(updated[:1])
            v_out.extend(updated[1:])
            return out

        return [*_outputs(self.target, self.target(input_ids, attend), logit_rows, self.hidden_output), *k_out, *v_out]


class _NativeTarget(nn.Module):
    """The target over padded rows [slots, rows]; attention is RotaryEmbedding, TensorScatter and Attention."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, target: Target, cache: CacheShape, hidden_output: bool):
        super().__init__()
        self.target, self.hidden_output = target, hidden_output
        cos, sin = rope_table(target.config, cache.rows).to(target.norm.weight.dtype).chunk(2, dim=-1)
        self.register_buffer("rope_cos", cos.contiguous())
        self.register_buffer("rope_sin", sin.contiguous())

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        write_indices: Tensor,
        mask: Tensor,
        logit_rows: Tensor,
        k: list[Tensor],
        v: list[Tensor],
    ):
        config = self.target.config
        k_out: list[Tensor] = []
        v_out: list[Tensor] = []

        def attend(layer: int, qkv: Tensor) -> Tensor:
            query, key, value = (x.transpose(1, 2) for x in split_qkv(qkv.unflatten(0, input_ids.shape), config))
            query, key = (
                torch.onnx.ops.rotary_embedding(x, self.rope_cos, self.rope_sin, positions) for x in (query, key)
            )
            for cache, update, updated in ((k, key, k_out), (v, value, v_out)):
                updated.append(
                    torch.onnx.ops.symbolic(
                        "TensorScatter",
                        (cache[layer], update, write_indices),
                        attrs={"axis": 2, "mode": "linear"},
                        dtype=update.dtype,
                        shape=cache[layer].shape,
                    )
                )
            out = torch.onnx.ops.attention(query, k_out[-1], v_out[-1], mask, scale=config.head_size**-0.5)[0]
            return out.transpose(1, 2).flatten(0, 1).flatten(1)

        hidden = self.target(input_ids.flatten(), attend)
        return [*_outputs(self.target, hidden, logit_rows, self.hidden_output), *k_out, *v_out]


def _outputs(target: Target, hidden: Tensor, logit_rows: Tensor, hidden_output: bool) -> list[Tensor]:
    logits = target.lm_head(F.embedding(logit_rows, hidden))  # index_select exports as three nodes, this as one
    return [logits, hidden] if hidden_output else [logits]


def _cache_names(layers: int, suffix: str = "") -> list[str]:
    return [f"{kind}_cache.{layer}{suffix}" for kind in "kv" for layer in range(layers)]


def export_target_plugin(
    target: Target,
    cache: CacheShape,
    *,
    cache_dtype: torch.dtype = torch.float32,
    aliased_outputs: bool = False,
    hidden_output: bool = True,
) -> ir.Model:
    """The target's network in plugin form; activations and weights in the module's dtype.

    Inputs (all int32): input_ids [T], positions [T], row_offsets [B+1], slots [B], cache_lengths [B],
    tree_mask [T, words], commit_src [C], commit_offsets [B+1], logit_rows [R]; then k_cache.{l} and
    v_cache.{l} [slots, kv_heads, rows, head_size] of `cache_dtype`, updated in place. Outputs: logits
    [R, V] and, with `hidden_output`, hidden [T, H]. With `aliased_outputs` (TensorRT) the updated caches are
    outputs too, k_cache.{l}.updated and v_cache.{l}.updated.
    """
    config = target.config
    sizes = {"T": 5, "B": 3, "B1": 4, "C": 2, "R": 6}
    axes = {
        "input_ids": ("T",),
        "positions": ("T",),
        "row_offsets": ("B1",),
        "slots": ("B",),
        "cache_lengths": ("B",),
        "tree_mask": ("T",),
        "commit_src": ("C",),
        "commit_offsets": ("B1",),
        "logit_rows": ("R",),
    }
    examples = [torch.zeros([sizes[a] for a in names], dtype=torch.int32) for names in axes.values()]
    examples[5] = torch.zeros(sizes["T"], cache.mask_words, dtype=torch.int32)
    caches = [_empty_caches(target, cache, 7, cache_dtype) for _ in "kv"]
    shapes = [dict(enumerate(names)) for names in axes.values()]
    # OpenVINO allocates every input whose size it knows: left open, the cache exists once.
    open_slots: list[dict[int, str]] = [{0: "slots"}] * config.num_layers
    return _export(
        _PluginTarget(target, cache, aliased_outputs, hidden_output),
        (examples[0], examples[1:8], examples[8], *caches),
        (shapes[0], shapes[1:8], shapes[8], open_slots, open_slots),
        [*axes, *_cache_names(config.num_layers)],
        _output_names(config.num_layers, hidden_output, aliased_outputs),
    )


def export_target_native(target: Target, cache: CacheShape, *, hidden_output: bool = True) -> ir.Model:
    """The target's network in native form; activations, weights, mask and cache in the module's dtype.

    Inputs: input_ids int32 [B, N], positions int64 [B, N], write_indices int64 [B] (the cache row that takes
    a sequence's first row), mask [B, 1, N, rows] (added to the scores: 0 or a large negative number),
    logit_rows int32 [R] (indices into the B * N rows), k_cache.{l} and v_cache.{l} [B, kv_heads, rows,
    head_size]. Outputs: logits [R, V], hidden [B * N, H] with `hidden_output`, k_cache.{l}.updated and
    v_cache.{l}.updated. The caller moves the rows of an accepted path between executes.
    """
    config, dtype = target.config, target.norm.weight.dtype
    batch, rows = 3, 5
    caches = [_empty_caches(target, cache, batch, dtype) for _ in "kv"]
    examples = (
        torch.zeros(batch, rows, dtype=torch.int32),
        torch.zeros(batch, rows, dtype=torch.int64),
        torch.zeros(batch, dtype=torch.int64),
        torch.zeros(batch, 1, rows, cache.rows, dtype=dtype),
        torch.zeros(7, dtype=torch.int32),
    )
    per_layer: list[dict[int, str]] = [{0: "B"}] * config.num_layers
    return _export(
        _NativeTarget(target, cache, hidden_output),
        (*examples, *caches),
        ({0: "B", 1: "N"}, {0: "B", 1: "N"}, {0: "B"}, {0: "B", 2: "N"}, {0: "R"}, per_layer, per_layer),
        ["input_ids", "positions", "write_indices", "mask", "logit_rows", *_cache_names(config.num_layers)],
        _output_names(config.num_layers, hidden_output, updated_caches=True),
    )


class NodeOperators:
    """The operators of a drafter as plugin nodes."""

    def tree_attention(self, qkv: Tensor, *rows: Tensor, num_heads: int, num_kv_heads: int, head_size: int) -> Tensor:
        attributes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
        shapes = [(qkv.shape[0], num_heads * head_size)]
        (out,) = self._node("TreeAttention", (qkv, *rows), attributes, [qkv.dtype], shapes)
        return out

    def pair_rows(self, tokens: Tensor, row_offsets: Tensor, cache_lengths: Tensor) -> Sequence[Tensor]:
        shapes = [tokens.shape, *[cache_lengths.shape] * 4]
        return self._node("PairRows", (tokens, row_offsets, cache_lengths), {}, [torch.int32] * 5, shapes)

    def draft_rows(
        self, contexts: Tensor, *grown: Tensor, level: int, first: int, width: int, words: int
    ) -> Sequence[Tensor]:
        batch = contexts.shape[0]
        shapes = [(batch * width,), (batch + 1,), (batch * width, words), (batch,)]
        attributes = {"level": level, "first": first, "width": width, "words": words}
        return self._node("DraftRows", (contexts, *grown), attributes, [torch.int32] * 4, shapes)

    def token_info_topk(
        self, logits: Tensor, sequences: Tensor, *table: Tensor, k: int, level: int, levels: int
    ) -> Sequence[Tensor]:
        attributes, shape = {"k": k, "level": level, "levels": levels}, (sequences.shape[0], k)
        dtypes = [logits.dtype, torch.int32]
        return self._node("TokenInfoTopK", (logits, sequences, *table), attributes, dtypes, [shape] * 2)

    @staticmethod
    def _node(op: str, inputs: Sequence[Tensor], attributes: dict, dtypes: Sequence, shapes: Sequence) -> Any:
        return torch.onnx.ops.symbolic_multi_out(
            f"redraft::{op}", inputs, attrs=attributes, dtypes=dtypes, shapes=shapes, version=1
        )


Drafting = BeamSearch | RandomDraws
"""A drafting loop, with its drafter."""


@dataclass(frozen=True)
class DrafterInputs:
    """The inputs of a drafter's network.

    hidden [P, H] in the module's dtype, tokens int32 [P] and, for a drafter with a context, row_offsets int32 [B + 1],
    slots and cache_lengths int32 [B] (see `DraftBatch`), then k_cache.{l} and v_cache.{l} [slots, kv_heads, rows,
    head_size]. Without a context P is B. For random draws, noise [B, R, M], temperature [B], top_k int32 [B] and top_p
    [B] come last (see `DraftSampling`).
    """

    names: list[str]
    examples: list[Tensor]
    axes: list[dict[int, str]]

    @classmethod
    def of(cls, drafting: Drafting, cache_dtype: torch.dtype) -> DrafterInputs:
        drafter: Drafter = drafting.drafter
        pairs, ints = ("P", 5) if drafter.reads_context else ("B", 3), torch.int32
        dtype = next(drafter.parameters()).dtype
        given = {
            "hidden": (torch.zeros(pairs[1], drafter.config.hidden_size, dtype=dtype), pairs[0]),
            "tokens": (torch.ones(pairs[1], dtype=ints), pairs[0]),
        }
        if drafter.reads_context:
            tables = cast(CacheTables, drafter.tables)
            config, layers = tables.config, drafter.context_layers
            given |= {
                "row_offsets": (torch.tensor([0, 1, 4, 5], dtype=ints), "B1"),
                "slots": (torch.zeros(3, dtype=ints), "B"),
                "cache_lengths": (torch.zeros(3, dtype=ints), "B"),
            }
            shape = (7, config.num_kv_heads, len(tables.rope_table), config.head_size)
            given |= {name: (torch.zeros(shape, dtype=cache_dtype), "slots") for name in _cache_names(layers)}
        if isinstance(drafting, RandomDraws):
            given |= {
                "noise": (torch.zeros(3, drafting.noise_rows, drafting.support), "B"),
                "temperature": (torch.ones(3), "B"),
                "top_k": (torch.zeros(3, dtype=ints), "B"),
                "top_p": (torch.ones(3), "B"),
            }
        return cls(list(given), [example for example, _ in given.values()], [{0: axis} for _, axis in given.values()])


class _PluginDrafter(nn.Module):
    """The drafting loop; a level of its beam search, or of its random draws, is one plugin node."""

    def __init__(self, drafting: Drafting):
        super().__init__()
        self.drafting = drafting

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        drafter = self.drafting.drafter
        drafter.operators, eager = NodeOperators(), drafter.operators
        try:
            return self.drafting(inputs, _draw_node if isinstance(self.drafting, RandomDraws) else _beam_node)
        finally:
            drafter.operators = eager


class _Resampling(_PluginDrafter):
    """The drafting loop over chains that are there already; the module holds what it looks up."""

    def __init__(self, drafting: BeamSearch, drafter: Drafter):
        super().__init__(drafting)
        self.drafter = drafter

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return super().forward(inputs)[:3]


def _beam_node(values: Tensor, ids: Tensor, width: int, *draft: Tensor) -> Sequence[Tensor]:
    batch = draft[0].shape[0] if draft else values.shape[0]
    level = (batch, draft[0].shape[1] + 1 if draft else 1, width)
    candidates, nodes, ints = (*level, values.shape[1]), (batch * width,), torch.int32
    return torch.onnx.ops.symbolic_multi_out(
        "redraft::BeamStep",
        (values, ids, *draft),
        attrs={"width": width},
        dtypes=(ints, values.dtype, ints, ints, ints, ints),
        shapes=(candidates, candidates, level, (batch, width), nodes, nodes),
        version=1,
    )


def _draw_node(
    values: Tensor,
    ids: Tensor,
    noise: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    rule: str,
    count: int,
    *draft: Tensor,
) -> Sequence[Tensor]:
    batch, (expanded, drawn) = noise.shape[0], (draft[0].shape[1], draft[2].shape[1]) if draft else (0, 0)
    nodes = drawn + 1 - expanded
    size = nodes * count if rule == "gumbel_top_k" else count
    state = 2 if rule == "stochastic_beam" else 0
    level, floats, ints = (batch, expanded + nodes, values.shape[1]), values.dtype, torch.int32
    return torch.onnx.ops.symbolic_multi_out(
        "redraft::DrawStep",
        (values, ids, noise, temperature, top_k, top_p, *draft),
        attrs={"rule": rule, "count": count},
        dtypes=(ints, floats, ints, *[floats] * state, *[ints] * 3),
        shapes=(level, level, (batch, drawn + size), *[(batch, size)] * state, *[(batch * size,)] * 3),
        version=1,
    )


def export_drafter_plugin(drafting: Drafting, cache_dtype: torch.dtype = torch.float32) -> ir.Model:
    """The drafter's network in plugin form; activations and weights in the module's dtype.

    Inputs: see `DrafterInputs`; caches are of `cache_dtype` and updated in place. Outputs: candidates int32 and
    log_probs [B, L, W, K], parents int32 [B, L, W] and, of a hidden-state drafter, raw_logits [B * L, K];
    of random draws ids int32 and log_probs [B, E, M] and draws int32 [B, D].
    """
    return _export_drafter(_PluginDrafter(drafting), drafting, cache_dtype)


def export_drafter_native(drafting: Drafting) -> ir.Model:
    """The same in native form. Raises ValueError for a drafter with a context."""
    if drafting.drafter.reads_context:
        raise ValueError(f"a drafter {drafting.drafter.name!r} keeps a context cache, which has no native form yet")
    return _export_drafter(drafting, drafting, torch.float32)


def export_resampler_plugin(drafting: BeamSearch) -> ir.Model:
    """The network that re-samples from chains: inputs raw_logits [B * L, K], sequences int32 [B] (0, 1, ...) and tokens
    int32 [B], its outputs are the drafter's but for raw logits. Its drafting loop's drafter is a `Resampler`."""
    drafter, levels = drafting.drafter.drafter, drafting.length
    dtype = next(drafter.parameters()).dtype
    examples = [
        torch.zeros(3 * levels, len(drafter.hot_ids), dtype=dtype),
        torch.arange(3, dtype=torch.int32),
        torch.ones(3, dtype=torch.int32),
    ]
    axes = [{0: "R"}, {0: "B"}, {0: "B"}]
    names, outputs = ["raw_logits", "sequences", "tokens"], ["candidates", "log_probs", "parents"]
    return _export(_Resampling(drafting, drafter), (examples,), (axes,), names, outputs)


def _export_drafter(module: nn.Module, drafting: Drafting, cache_dtype: torch.dtype) -> ir.Model:
    inputs = DrafterInputs.of(drafting, cache_dtype)
    if isinstance(drafting, RandomDraws):
        outputs = ["ids", "log_probs", "draws"]
    else:
        outputs = ["candidates", "log_probs", "parents", *(["raw_logits"] if drafting.drafter.has_raw_logits else [])]
    return _export(module, (inputs.examples,), (inputs.axes,), inputs.names, outputs)


def _empty_caches(target: Target, cache: CacheShape, batch: int, dtype: torch.dtype) -> list[Tensor]:
    config = target.config
    shape = (batch, config.num_kv_heads, cache.rows, config.head_size)
    return [torch.empty(shape, dtype=dtype) for _ in range(config.num_layers)]


def _output_names(layers: int, hidden_output: bool, updated_caches: bool) -> list[str]:
    caches = _cache_names(layers, ".updated") if updated_caches else []
    return ["logits", *(["hidden"] if hidden_output else []), *caches]


def _export(module: nn.Module, args: tuple, shapes: tuple, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            args,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=shapes,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
    assert program is not None
    return program.model
