"""The target as an ONNX network.

The *plugin form* takes ragged rows and holds a `redraft::TreeAttention` node for each layer. The *native form* takes
padded rows [slots, rows] and holds standard operators of opset 24 only. A network of several ranks holds a
`redraft::AllReduce` for each of their sums. Both keep the KV cache outside of the network: `k_cache.{layer}` and
`v_cache.{layer}` are inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.export.networks import attention_attributes, cache_names, export_network
from redraft.model_defs.loops.padded_context_cache import HIDDEN_SCORE, scatter_rows
from redraft.model_defs.target.attention import HeadNorms, RopeTables, rope_tables, split_qkv, within_window
from redraft.model_defs.target.model import Join, States, Target, add
from redraft.model_defs.target.shards import rank_join

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class CacheShape:
    """The size of the KV cache: `slots` sequences of up to `max_len` tokens, and after them `max_tree` rows of a tree
    (its root included). Layers with a window have `window_rows` rows, if that is not 0: see `LimitsInfo`."""

    slots: int
    max_len: int
    max_tree: int
    window_rows: int = 0

    @property
    def rows(self) -> int:
        return self.max_len + self.max_tree

    @property
    def mask_words(self) -> int:
        """int32 words of one row of the tree mask: a bit per row of a tree."""
        return -(-self.max_tree // 32)


class _PluginTarget(nn.Module):
    """The target over ragged rows; attention is one plugin node per layer."""

    def __init__(
        self, target: Target, cache: CacheShape, aliased_outputs: bool, features_output: bool, rank: int, ranks: int
    ):
        super().__init__()
        self.target, self.aliased_outputs, self.features_output = target, aliased_outputs, features_output
        self.join = _join(rank, ranks)
        self.ropes = RopeTables(target.config, cache.rows, cache.max_len)

    def forward(self, input_ids: Tensor, rows: list[Tensor], logit_rows: Tensor, k: list[Tensor], v: list[Tensor]):
        config = self.target.config
        sizes = config.num_heads, config.num_kv_heads, config.head_size
        k_out: list[Tensor] = []
        v_out: list[Tensor] = []

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            out_shape = (qkv.shape[0], config.num_heads * config.head_size)
            caches = (k[layer], v[layer]) if self.aliased_outputs else ()
            out, *updated = torch.onnx.ops.symbolic_multi_out(
                "redraft::TreeAttention",
                (qkv, *rows, self.ropes.of(layer), k[layer], v[layer], *(norms or ())[:2]),
                attrs=attention_attributes(*sizes, config.window_of(layer), norms),
                dtypes=(qkv.dtype, *(c.dtype for c in caches)),
                shapes=(out_shape, *(c.shape for c in caches)),
                version=1,
            )
            k_out.extend(updated[:1])
            v_out.extend(updated[1:])
            return out

        states = self.target(input_ids, attend, self.join, positions=rows[0])
        return [*_outputs(self.target, states, logit_rows, self.features_output), *k_out, *v_out]


class _NativeTarget(nn.Module):
    """The target over padded rows [slots, rows]; attention is RotaryEmbedding, TensorScatter and Attention."""

    def __init__(self, target: Target, cache: CacheShape, features_output: bool, rank: int, ranks: int):
        super().__init__()
        self.target, self.features_output = target, features_output
        self.join = _join(rank, ranks)
        for kind, table in enumerate(rope_tables(target.config, cache.rows, cache.max_len)):
            cos, sin = table.to(target.norm.weight.dtype).chunk(2, dim=-1)
            self.register_buffer(f"rope_cos_{kind}", cos.contiguous())
            self.register_buffer(f"rope_sin_{kind}", sin.contiguous())

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
        masks = [_windowed(mask, attention.window) for attention in config.attentions]
        k_out: list[Tensor] = []
        v_out: list[Tensor] = []

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            query, key, value = (x.transpose(1, 2) for x in split_qkv(qkv.unflatten(0, input_ids.shape), config, norms))
            kind = config.attention_of(layer)
            cos, sin = self.get_buffer(f"rope_cos_{kind}"), self.get_buffer(f"rope_sin_{kind}")
            query, key = (torch.onnx.ops.rotary_embedding(x, cos, sin, positions) for x in (query, key))
            for cache, update, updated in ((k, key, k_out), (v, value, v_out)):
                updated.append(scatter_rows(cache[layer], update, write_indices))
            out = torch.onnx.ops.attention(query, k_out[-1], v_out[-1], masks[kind], scale=config.head_size**-0.5)[0]
            return out.transpose(1, 2).flatten(0, 1).flatten(1)

        states = self.target(input_ids.flatten(), attend, self.join, positions=positions.flatten())
        return [*_outputs(self.target, states, logit_rows, self.features_output), *k_out, *v_out]


def _windowed(mask: Tensor, window: int | None) -> Tensor:
    """The mask with only the last `window` keys of each row's path."""
    if window is None:
        return mask
    hidden = torch.full_like(mask, HIDDEN_SCORE)
    return torch.where(within_window(mask > HIDDEN_SCORE / 2, window), mask, hidden)


def _join(rank: int, ranks: int) -> Join:
    return rank_join(rank, partial(_all_reduce, ranks)) if ranks > 1 else add


def _all_reduce(ranks: int, x: Tensor) -> Tensor:
    return torch.onnx.ops.symbolic(
        "redraft::AllReduce", (x,), attrs={"ranks": ranks}, dtype=x.dtype, shape=x.shape, version=1
    )


def _outputs(target: Target, states: States, logit_rows: Tensor, features_output: bool) -> list[Tensor]:
    logits = target.lm_head(F.embedding(logit_rows, states.hidden))  # index_select exports as three nodes, this as one
    return [logits, states.features] if features_output else [logits]


def export_target_plugin(
    target: Target,
    cache: CacheShape,
    *,
    cache_dtype: torch.dtype = torch.float32,
    aliased_outputs: bool = False,
    features_output: bool = True,
    rank: int = 0,
    ranks: int = 1,
) -> ir.Model:
    """The target's network in plugin form; activations and weights in the module's dtype. With several `ranks`, the
    target is that of one of them: see `model_defs.target.shards`.

    Inputs (all int32): input_ids [T], positions [T], row_offsets [B+1], slots [B], cache_lengths [B],
    tree_mask [T, words], commit_src [C], commit_offsets [B+1], logit_rows [R]; then k_cache.{l} and
    v_cache.{l} [slots, kv_heads, rows, head_size] of `cache_dtype`, updated in place. Outputs: logits
    [R, V] and, with `features_output`, features [T, F]. With `aliased_outputs` (TensorRT) the updated caches are
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
    caches = [empty_caches(target, cache, 7, cache_dtype) for _ in "kv"]
    shapes = [dict(enumerate(names)) for names in axes.values()]
    # OpenVINO allocates every input whose size it knows: left open, the cache exists once.
    open_slots: list[dict[int, str]] = [{0: "slots"}] * config.num_layers
    return export_network(
        _PluginTarget(target, cache, aliased_outputs, features_output, rank, ranks),
        (examples[0], examples[1:8], examples[8], *caches),
        (shapes[0], shapes[1:8], shapes[8], open_slots, open_slots),
        [*axes, *cache_names(config.num_layers)],
        _output_names(config.num_layers, features_output, aliased_outputs),
    )


def export_target_native(
    target: Target, cache: CacheShape, *, features_output: bool = True, rank: int = 0, ranks: int = 1
) -> ir.Model:
    """The target's network in native form; activations, weights, mask and cache in the module's dtype. With several
    `ranks`, the target is that of one of them: see `model_defs.target.shards`.

    Inputs: input_ids int32 [B, N], positions int64 [B, N], write_indices int64 [B] (the cache row that takes
    a sequence's first row), mask [B, 1, N, rows] (added to the scores: 0 or a large negative number),
    logit_rows int32 [R] (indices into the B * N rows), k_cache.{l} and v_cache.{l} [B, kv_heads, rows,
    head_size]. Outputs: logits [R, V], features [B * N, F] with `features_output`, k_cache.{l}.updated and
    v_cache.{l}.updated. The caller moves the rows of an accepted path between executes.
    """
    config, dtype = target.config, target.norm.weight.dtype
    batch, rows = 3, 5
    caches = [empty_caches(target, cache, batch, dtype) for _ in "kv"]
    examples = (
        torch.zeros(batch, rows, dtype=torch.int32),
        torch.zeros(batch, rows, dtype=torch.int64),
        torch.zeros(batch, dtype=torch.int64),
        torch.zeros(batch, 1, rows, cache.rows, dtype=dtype),
        torch.zeros(7, dtype=torch.int32),
    )
    per_layer: list[dict[int, str]] = [{0: "B"}] * config.num_layers
    return export_network(
        _NativeTarget(target, cache, features_output, rank, ranks),
        (*examples, *caches),
        ({0: "B", 1: "N"}, {0: "B", 1: "N"}, {0: "B"}, {0: "B", 2: "N"}, {0: "R"}, per_layer, per_layer),
        ["input_ids", "positions", "write_indices", "mask", "logit_rows", *cache_names(config.num_layers)],
        _output_names(config.num_layers, features_output, updated_caches=True),
    )


def empty_caches(target: Target, cache: CacheShape, batch: int, dtype: torch.dtype) -> list[Tensor]:
    """A cache [batch, kv_heads, rows, head_size] of each layer, for exporting."""
    config, windowed = target.config, target.config.windowed_layers if cache.window_rows else ()
    rows = [cache.window_rows if layer in windowed else cache.rows for layer in range(config.num_layers)]
    return [torch.empty(batch, config.num_kv_heads, count, config.head_size, dtype=dtype) for count in rows]


def _output_names(layers: int, features_output: bool, updated_caches: bool) -> list[str]:
    caches = cache_names(layers, ".updated") if updated_caches else []
    return ["logits", *(["features"] if features_output else []), *caches]
