"""The structures of kernels.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any


def _fields(**types: Any) -> Any:
    return list(types.items())


class Projection(ctypes.Structure):
    _fields_ = _fields(
        x=c_void_p,
        x_rows=c_int64,
        row_ids=c_void_p,
        rows=c_int64,
        weight=c_void_p,
        scale=c_void_p,
        bias=c_void_p,
        norm=c_void_p,
        norm_eps=c_float,
        in_features=c_int64,
        out_features=c_int64,
        dtype=c_int,
    )


class LinearArgs(ctypes.Structure):
    _fields_ = _fields(
        p=Projection, activation=c_int, residual=c_void_p, residual_rows=c_int64, residual_ids=c_void_p, out=c_void_p
    )


class LinearTopKArgs(ctypes.Structure):
    _fields_ = _fields(p=Projection, ids=c_void_p, k=c_int64, values=c_void_p, indices=c_void_p)


class TokenInfoTopKArgs(ctypes.Structure):
    _fields_ = _fields(
        logits=c_void_p,
        logit_rows=c_int64,
        columns=c_int64,
        level=c_int64,
        levels=c_int64,
        sequences=c_void_p,
        tokens=c_void_p,
        rows=c_int64,
        ids=c_void_p,
        row_of=c_void_p,
        vocabulary=c_int64,
        table=c_void_p,
        dtype=c_int,
        entries=c_int64,
        kept=c_int64,
        scales=c_void_p,
        k=c_int64,
        values=c_void_p,
        indices=c_void_p,
    )


class EmbeddingArgs(ctypes.Structure):
    _fields_ = _fields(
        ids=c_void_p,
        rows=c_int64,
        weight=c_void_p,
        scale=c_void_p,
        in_features=c_int64,
        out_features=c_int64,
        dtype=c_int,
        out=c_void_p,
    )


class RMSNormArgs(ctypes.Structure):
    _fields_ = _fields(x=c_void_p, rows=c_int64, features=c_int64, weight=c_void_p, eps=c_float, out=c_void_p)


class BeamStepArgs(ctypes.Structure):
    _fields_ = _fields(
        values=c_void_p,
        ids=c_void_p,
        rows=c_int64,
        k=c_int64,
        sequences=c_int64,
        levels=c_int64,
        width=c_int64,
        candidates=c_void_p,
        log_probs=c_void_p,
        parents=c_void_p,
        chosen=c_void_p,
        next_candidates=c_void_p,
        next_log_probs=c_void_p,
        next_parents=c_void_p,
        next_chosen=c_void_p,
        tokens=c_void_p,
        origins=c_void_p,
    )


class DrawStepArgs(ctypes.Structure):
    _fields_ = _fields(
        values=c_void_p,
        ids=c_void_p,
        rows=c_int64,
        support=c_int64,
        sequences=c_int64,
        noise=c_void_p,
        noise_rows=c_int64,
        temperature=c_void_p,
        top_k=c_void_p,
        top_p=c_void_p,
        rule=c_int,
        count=c_int64,
        expanded=c_int64,
        drawn=c_int64,
        ids_before=c_void_p,
        log_probs_before=c_void_p,
        draws_before=c_void_p,
        totals=c_void_p,
        gumbels=c_void_p,
        next_ids=c_void_p,
        next_log_probs=c_void_p,
        next_draws=c_void_p,
        next_totals=c_void_p,
        next_gumbels=c_void_p,
        tokens=c_void_p,
        origins=c_void_p,
        sequence_of=c_void_p,
    )


class TreeAttentionArgs(ctypes.Structure):
    _fields_ = _fields(
        qkv=c_void_p,
        rows=c_int64,
        positions=c_void_p,
        row_offsets=c_void_p,
        sequences=c_int64,
        slots=c_void_p,
        cache_lengths=c_void_p,
        tree_mask=c_void_p,
        mask_words=c_int64,
        commit_src=c_void_p,
        commits=c_int64,
        commit_offsets=c_void_p,
        starts=c_void_p,
        rope_table=c_void_p,
        max_positions=c_int64,
        k_cache=c_void_p,
        v_cache=c_void_p,
        cache_dtype=c_int,
        cache_slots=c_int64,
        cache_rows=c_int64,
        heads=c_int64,
        kv_heads=c_int64,
        head_size=c_int64,
        out=c_void_p,
    )


class SumRanksArgs(ctypes.Structure):
    _fields_ = _fields(parts=c_void_p, ranks=c_int64, elements=c_int64, out=c_void_p)
