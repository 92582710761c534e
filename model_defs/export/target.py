"""The target as an ONNX network.

The *plugin form* takes ragged rows and holds a `redraft::TreeAttention` node for each layer. The *native form* takes
padded rows [slots, rows] and holds standard operators of opset 24 only. A network of several ranks holds a
`redraft::AllReduce` for each of their sums. Both keep the KV cache outside of the network: `k_cache.{layer}` and
`v_cache.{layer}` are inputs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.export.networks import attention_attributes, cache_names, export_network
from redraft.model_defs.loops.padded_context_cache import HIDDEN_SCORE, scatter_rows
from redraft.model_defs.target.attention import HeadNorms, RopeTables, rope_tables, split_qkv, within_window
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Join, States, Target, add
from redraft.model_defs.target.shards import rank_join

if TYPE_CHECKING:
    import onnx_ir as ir

LAYERS = "redraft.layers"
"""The domain of nodes that stand for a layer"""


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
    """The target over ragged rows; attention is one plugin node per layer.

    Each layer is a node that stands for it. After what the target gives comes what a layer of each kind gives, whose
    input and weights are inputs too: the exporter's time grows with the nodes that it sees, and layers of a kind differ
    in nothing but their weights.
    """

    def __init__(
        self, target: Target, cache: CacheShape, aliased_outputs: bool, features_output: bool, rank: int, ranks: int
    ):
        super().__init__()
        self.target, self.layers = copy.copy(target), (*target.layers,)
        # Weights of layers would be constants.
        self.target._modules = {name: module for name, module in target._modules.items() if name != "layers"}
        self.aliased_outputs, self.features_output = aliased_outputs, features_output
        self.join = _join(rank, ranks)
        self.ropes = RopeTables(target.config, cache.rows, cache.max_len)

    def forward(
        self,
        input_ids: Tensor,
        rows: list[Tensor],
        logit_rows: Tensor,
        k: list[Tensor],
        v: list[Tensor],
        x: list[Tensor],
        weights: list[list[Tensor]],
    ):
        k_out: list[Tensor] = []
        v_out: list[Tensor] = []

        def run(layer: int, x: Tensor) -> Tensor:
            caches = (k[layer], v[layer]) if self.aliased_outputs else ()
            out, *updated = torch.onnx.ops.symbolic_multi_out(
                f"{LAYERS}::{_kind(self.target.config, layer)}",
                (x, k[layer], v[layer]),
                attrs={"index": layer},
                dtypes=(x.dtype, *(c.dtype for c in caches)),
                shapes=(x.shape, *(c.shape for c in caches)),
                version=1,
            )
            k_out.extend(updated[:1])
            v_out.extend(updated[1:])
            return out

        states = self.target.states(self.target.embed(input_ids, rows[0]), run)
        outputs = [*_outputs(self.target, states, logit_rows, self.features_output), *k_out, *v_out]
        kinds = _kinds(self.target.config).values()
        for layer, x_in, own in zip(kinds, x, weights, strict=True):
            outputs += self._layer(layer, x_in, rows, k[layer], v[layer], own)
        return outputs

    def _layer(
        self, index: int, x: Tensor, rows: list[Tensor], k: Tensor, v: Tensor, weights: list[Tensor]
    ) -> list[Tensor]:
        """A layer's output, and its updated caches with aliased outputs."""
        config, layer = self.target.config, self.layers[index]
        sizes = config.num_heads, config.num_kv_heads, config.head_size
        updated: list[Tensor] = []

        def attend(_: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            out_shape = (qkv.shape[0], config.num_heads * config.head_size)
            caches = (k, v) if self.aliased_outputs else ()
            out, *changed = torch.onnx.ops.symbolic_multi_out(
                "redraft::TreeAttention",
                (qkv, *rows, self.ropes.of(index), k, v, *(norms or ())[:2]),
                attrs=attention_attributes(*sizes, config.window_of(index), norms),
                dtypes=(qkv.dtype, *(c.dtype for c in caches)),
                shapes=(out_shape, *(c.shape for c in caches)),
                version=1,
            )
            updated.extend(changed)
            return out

        named = dict(zip(dict(layer.named_parameters()), weights, strict=True))
        return [torch.func.functional_call(layer, named, (x, index, attend), {"join": self.join}), *updated]


def _kind(config: TargetConfig, layer: int) -> str:
    """What tells a layer from others, weights aside."""
    return f"layer_{config.attention_of(layer)}"


def _kinds(config: TargetConfig) -> dict[str, int]:
    """A layer of each kind."""
    return {_kind(config, layer): layer for layer in range(config.num_layers)}


def _insert_layers(network: ir.Model, target: Target) -> None:
    """Put a copy of its kind's layer, with its own weights, in the place of each node that stands for a layer, and
    remove those layers themselves."""
    import onnx_ir as ir

    graph, kinds = network.graph, _kinds(target.config)
    given = {value.name: value for value in graph.inputs}
    of_kinds = {kind: [value for value in graph.outputs if _belongs(value, kind)] for kind in kinds}
    nodes_of = {kind: _nodes_before(graph, outputs) for kind, outputs in of_kinds.items()}
    for call in [node for node in graph if node.domain == LAYERS]:
        kind, index = call.op_type, call.attributes.get_int("index")
        own = [given[f"{kind}.x"], given[f"k_cache.{kinds[kind]}"], given[f"v_cache.{kinds[kind]}"]]
        values: dict[ir.Value | None, ir.Value | None] = dict(zip(own, call.inputs, strict=True))
        for name, weight in target.layers[index].named_parameters():
            constant = ir.val(f"target.layers.{index}.{name}", const_value=ir.tensor(weight.detach()))
            graph.register_initializer(constant)
            values[given[f"{kind}.{name}"]] = constant
        for node in nodes_of[kind]:
            copied = ir.Node(
                node.domain,
                node.op_type,
                [values.get(value, value) for value in node.inputs],
                node.attributes.values(),
                num_outputs=len(node.outputs),
                version=node.version,
                name=f"{call.name}.{node.name}",
            )
            for old, new in zip(node.outputs, copied.outputs, strict=True):
                new.name, new.shape, new.type = f"{call.name}.{old.name}", old.shape, old.type
                values[old] = new
            graph.insert_before(call, copied)
        for old, of_kind in zip(call.outputs, of_kinds[kind], strict=True):
            result, called = values[of_kind], old.name
            assert result is not None
            old.replace_all_uses_with(result, replace_graph_outputs=True)
            old.name, result.name = f"{called}.called", called
        graph.remove(call, safe=True)
    graph.outputs[:] = [value for value in graph.outputs if not any(_belongs(value, kind) for kind in kinds)]
    for node in reversed([node for nodes in nodes_of.values() for node in nodes]):
        graph.remove(node, safe=True)
    graph.inputs[:] = [value for value in graph.inputs if not any(_belongs(value, kind) for kind in kinds)]
    del network.opset_imports[LAYERS]


def _belongs(value: ir.Value, kind: str) -> bool:
    """Whether an input or output is a kind's layer's own."""
    return str(value.name).startswith(f"{kind}.")


def _nodes_before(graph: ir.Graph, values: list[ir.Value]) -> list[ir.Node]:
    """The nodes that values are computed by, in their order."""
    found: set[ir.Node] = set()
    left = [value.producer() for value in values]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [value.producer() for value in node.inputs if value is not None]
    return [node for node in graph if node in found]


class _NativeTarget(nn.Module):
    """The target over padded rows [slots, rows]; attention is RotaryEmbedding, TensorScatter and Attention."""

    def __init__(self, target: Target, cache: CacheShape, features_output: bool, rank: int, ranks: int):
        super().__init__()
        self.target, self.features_output = target, features_output
        self.join = _join(rank, ranks)
        for kind, table in enumerate(rope_tables(target.config, cache.rows, cache.max_len)):
            cos, sin = table.to(target.embedding.weight.dtype).chunk(2, dim=-1)
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
            query, key = (torch.onnx.ops.rotary_embedding(x.to(qkv.dtype), cos, sin, positions) for x in (query, key))
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
    kinds = _kinds(config)
    weights = [dict(target.layers[layer].named_parameters()) for layer in kinds.values()]
    x = [torch.zeros(sizes["T"], config.hidden_size, dtype=target.embedding.weight.dtype) for _ in kinds]
    layer_inputs = [f"{kind}.{name}" for kind, own in zip(kinds, weights, strict=True) for name in own]
    layer_outputs = ["x.out", *(["k.out", "v.out"] if aliased_outputs else [])]
    network = export_network(
        _PluginTarget(target, cache, aliased_outputs, features_output, rank, ranks),
        (examples[0], examples[1:8], examples[8], *caches, x, [list(own.values()) for own in weights]),
        (
            *(shapes[0], shapes[1:8], shapes[8], open_slots, open_slots),
            *([{0: "T"} for _ in kinds], [[{} for _ in own] for own in weights]),
        ),
        [*axes, *cache_names(config.num_layers), *(f"{kind}.x" for kind in kinds), *layer_inputs],
        [
            *_output_names(config.num_layers, features_output, aliased_outputs),
            *(f"{kind}.{name}" for kind in kinds for name in layer_outputs),
        ],
    )
    _insert_layers(network, target)
    return network


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
    config, dtype = target.config, target.embedding.weight.dtype
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
