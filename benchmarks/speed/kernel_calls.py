"""Every CPU kernel as a Python function over numpy arrays, and calls that are recorded: for tests and measurements."""

from __future__ import annotations

from ctypes import byref
from itertools import zip_longest
from typing import Any

import numpy as np

from redraft.plugins import kernels
from redraft.plugins.headers import PLUGINS, Arguments, kernel_arguments, structures
from redraft.plugins.operators.draw_step import RULES
from redraft.plugins.operators.linear.blocks import segments_of
from redraft.plugins.operators.linear.pack import ACTIVATIONS, PackedWeight

DTYPES = {"fp32": 0, "bf16": 1, "int8": 2, "blocks": 3}
"""The kernels' numbers: `DType` of kernels.h."""


class Recording:
    """Calls made inside `with Recording() as recording`: `replay` repeats them in less than a microsecond of Python
    each. Their arrays are kept, whose addresses the calls have."""

    active: Recording | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.fields: list[dict[str, Any]] = []
        """Of every structure in a call: the arrays that it points to."""

    def __enter__(self) -> Recording:
        Recording.active = self
        return self

    def __exit__(self, *_: object) -> None:
        Recording.active = None

    def replay(self) -> None:
        """Repeat all calls."""
        for function, arguments in self.calls:
            function(*arguments)


def call(kernel: str, **fields: Any) -> None:
    """Run a kernel with these fields of its arguments, as `kernels.call` does, and record the call."""
    function = getattr(kernels.library(), f"redraft_{kernel}")
    arguments = byref(_filled(kernel_arguments(PLUGINS)[kernel], **fields))
    kernels.run(function, arguments)
    if Recording.active:
        Recording.active.calls.append((function, (arguments,)))


def _filled(structure: type[Arguments], **fields: Any) -> Arguments:
    if Recording.active:
        Recording.active.fields.append(fields)
    return kernels.filled(structure, **fields)


def sum_ranks(parts: np.ndarray) -> np.ndarray:
    """float32 [ranks, ...] to their sum in the order of ranks."""
    out = np.empty_like(parts[0])
    call("sum_ranks", parts=parts, ranks=len(parts), elements=out.size, out=out)
    return out


def linear(
    x: np.ndarray,
    weight: PackedWeight,
    out_features: int,
    *,
    bias: np.ndarray | None = None,
    norm: np.ndarray | None = None,
    norm_bias: np.ndarray | None = None,
    norm_eps: float = 1e-5,
    residual: np.ndarray | None = None,
    residual_rows: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    activation: str = "none",
    out: np.ndarray | None = None,
) -> np.ndarray:
    """float32 [T, K] to float32 [T or len(rows), out_features]."""
    norms = {"norm": norm, "norm_bias": norm_bias, "norm_eps": norm_eps}
    projection = _projection(x, weight, out_features, rows, bias=bias, **norms)
    out = np.empty((projection.rows, out_features), np.float32) if out is None else out
    call(
        "linear",
        p=projection,
        activation=ACTIVATIONS.index(activation),
        residual=residual,
        residual_rows=0 if residual is None else len(residual),
        residual_ids=residual_rows,
        out=out,
    )
    return out


def linear_topk(
    x: np.ndarray,
    weight: PackedWeight,
    out_features: int,
    k: int,
    *,
    ids: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    norm: np.ndarray | None = None,
    norm_bias: np.ndarray | None = None,
    norm_eps: float = 1e-5,
    rows: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """float32 [T, K] to log-probabilities float32 [T, k] and indices int32 [T, k]."""
    norms = {"norm": norm, "norm_bias": norm_bias, "norm_eps": norm_eps}
    projection = _projection(x, weight, out_features, rows, bias=bias, **norms)
    values = np.empty((projection.rows, k), np.float32)
    indices = np.empty((projection.rows, k), np.int32)
    call("linear_topk", p=projection, ids=ids, k=k, values=values, indices=indices)
    return values, indices


def token_info_topk(
    logits: np.ndarray,
    sequences: np.ndarray,
    tokens: np.ndarray,
    ids: np.ndarray,
    *info: np.ndarray,
    k: int,
    level: int,
    levels: int,
) -> tuple[np.ndarray, np.ndarray]:
    """logits float32 [B * levels, K], sequences and tokens int32 [N], ids int32 [K] and, with token info, its rows
    float32 [N, kept], or row_of int32 [V], table int8 or bf16 (its bits as uint16) [entries, kept] and scales float32
    [entries, 1], to log-probabilities float32 and target ids int32 [N, k]; see token_info_topk/README.md."""
    values, indices = np.empty((len(tokens), k), np.float32), np.empty((len(tokens), k), np.int32)
    row_of, rows, scales = info if len(info) == 3 else (None, *(info or [None]), None)
    stored = {"float32": "fp32", "uint16": "bf16", "int8": "int8"}
    entries, kept = (0, 0) if rows is None else rows.shape
    call(
        "token_info_topk",
        logits=logits,
        logit_rows=logits.shape[0],
        columns=logits.shape[1],
        level=level,
        levels=levels,
        sequences=sequences,
        tokens=tokens,
        rows=len(tokens),
        ids=ids,
        row_of=row_of,
        vocabulary=0 if row_of is None else len(row_of),
        table=rows,
        dtype=0 if rows is None else DTYPES[stored[rows.dtype.name]],
        entries=entries,
        kept=kept,
        scales=scales,
        k=k,
        values=values,
        indices=indices,
    )
    return values, indices


def embedding(
    ids: np.ndarray,
    weight: PackedWeight,
    in_features: int,
    out_features: int,
    *,
    clamped: bool = False,
    factor: float = 1.0,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """int32 [T] to float32 [T, in_features]."""
    out = np.empty((len(ids), in_features), np.float32)
    call(
        "embedding",
        ids=ids,
        rows=len(ids),
        weight=weight.data,
        in_features=in_features,
        out_features=out_features,
        **_stored(weight.dtype),
        clamped=clamped,
        factor=factor,
        residual=residual,
        out=out,
    )
    return out


def norm(
    x: np.ndarray, weight: np.ndarray, eps: float, bias: np.ndarray | None = None, residual: np.ndarray | None = None
) -> np.ndarray:
    """float32 [T, K] to float32 [T, K]."""
    out, (rows, features) = np.empty_like(x), x.shape
    call("norm", x=x, rows=rows, features=features, weight=weight, bias=bias, eps=eps, residual=residual, out=out)
    return out


def reorder_features(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """float32 [T, K] to float32 [T, K]: its features in the order int32 [K]."""
    out, (rows, features) = np.empty_like(x), x.shape
    call("reorder_features", x=x, rows=rows, features=features, order=order, out=out)
    return out


def beam_step(values: np.ndarray, ids: np.ndarray, width: int, *draft: np.ndarray) -> tuple[np.ndarray, ...]:
    """values float32 and ids int32 [B * n, K] and, after the first level, the first four of the step before's results,
    to candidates, log_probs, parents, chosen, tokens and origins; see beam_step/README.md."""
    rows, k = values.shape
    batch, levels = draft[0].shape[:2] if draft else (rows, 0)
    level, dtypes = (batch, levels + 1, width), (np.int32, np.float32, *[np.int32] * 4)
    shapes = ((*level, k), (*level, k), level, (batch, width), (batch * width,), (batch * width,))
    results = tuple(np.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    state = ("candidates", "log_probs", "parents", "chosen")
    names = *(f"next_{name}" for name in state), "tokens", "origins"
    call(
        "beam_step",
        values=values,
        ids=ids,
        rows=rows,
        k=k,
        sequences=batch,
        levels=levels,
        width=width,
        **dict(zip(state, draft or [None] * 4, strict=True)),
        **dict(zip(names, results, strict=True)),
    )
    return results


def draw_step(
    values: np.ndarray,
    ids: np.ndarray,
    noise: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    rule: str,
    count: int,
    *draft: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """values float32 and ids int32 [B * n, M], noise float32 [B, R, M], the filters [B] and, after the first level,
    the step before's results but its last three, to ids, log_probs, draws, with `stochastic_beam` totals and gumbels,
    tokens, origins and sequences; see draw_step/README.md."""
    (rows, support), (batch, noise_rows, _) = values.shape, noise.shape
    expanded, drawn = (draft[0].shape[1], draft[2].shape[1]) if draft else (0, 0)
    nodes, beam = drawn + 1 - expanded, rule == "stochastic_beam"
    size = nodes * count if rule == "gumbel_top_k" else count
    results = (
        np.empty((batch, expanded + nodes, support), np.int32),
        np.empty((batch, expanded + nodes, support), np.float32),
        np.empty((batch, drawn + size), np.int32),
        *(np.empty((batch, size), np.float32) for _ in range(2 * beam)),
        *(np.empty(batch * size, np.int32) for _ in range(3)),
    )
    before = ("ids_before", "log_probs_before", "draws_before", "totals", "gumbels")
    following = ("next_ids", "next_log_probs", "next_draws", *("next_totals", "next_gumbels")[: 2 * beam])
    written = dict(zip((*following, "tokens", "origins", "sequence_of"), results, strict=True))
    call(
        "draw_step",
        values=values,
        ids=ids,
        rows=rows,
        support=support,
        sequences=batch,
        noise=noise,
        noise_rows=noise_rows,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        rule=RULES.index(rule),
        count=count,
        expanded=expanded,
        drawn=drawn,
        **dict(zip_longest(before, draft)),
        **{"next_totals": None, "next_gumbels": None} | written,
    )
    return results


def tree_attention(
    qkv: np.ndarray,
    positions: np.ndarray,
    row_offsets: np.ndarray,
    slots: np.ndarray,
    cache_lengths: np.ndarray,
    tree_mask: np.ndarray,
    commit_src: np.ndarray,
    commit_offsets: np.ndarray,
    rope_table: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    starts: np.ndarray | None = None,
    *,
    num_heads: int,
    window: int = 0,
    norms: tuple[np.ndarray, np.ndarray] | None = None,
    norm_eps: float = 1e-5,
) -> np.ndarray:
    """`norms` are those of query and key heads.

    Caches are float32, or uint16 holding bf16, [slots, kv_heads, rows, head_size], updated in place."""
    cache_slots, kv_heads, cache_rows, head_size = k_cache.shape
    out = np.empty((len(qkv), num_heads * head_size), np.float32)
    call(
        "tree_attention",
        qkv=qkv,
        rows=len(qkv),
        positions=positions,
        row_offsets=row_offsets,
        sequences=len(slots),
        slots=slots,
        cache_lengths=cache_lengths,
        tree_mask=tree_mask,
        mask_words=tree_mask.shape[1],
        commit_src=commit_src,
        commits=len(commit_src),
        commit_offsets=commit_offsets if len(commit_offsets) else None,
        starts=starts,
        rope_table=rope_table,
        max_positions=len(rope_table),
        k_cache=k_cache,
        v_cache=v_cache,
        cache_dtype=int(k_cache.dtype == np.uint16),
        cache_slots=cache_slots,
        cache_rows=cache_rows,
        heads=num_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        window=window,
        q_norm=norms and norms[0],
        k_norm=norms and norms[1],
        norm_eps=norm_eps,
        out=out,
    )
    return out


def _projection(
    x: np.ndarray, weight: PackedWeight, out_features: int, rows: np.ndarray | None, **optional: Any
) -> Arguments:
    return _filled(
        structures(PLUGINS)["Projection"],
        x=x,
        x_rows=len(x),
        row_ids=rows,
        rows=len(x) if rows is None else len(rows),
        weight=weight.data,
        in_features=x.shape[1],
        out_features=out_features,
        **_stored(weight.dtype),
        **optional,
    )


def _stored(dtype: str) -> dict[str, Any]:
    """The fields that say how a weight is stored."""
    if ":" not in dtype:
        return {"dtype": DTYPES[dtype], "segments": None, "segment_count": 0}
    segments = segments_of(dtype)
    return {"dtype": DTYPES["blocks"], "segments": segments, "segment_count": len(segments)}
