"""The recurrent drafter in TensorRT-LLM's ReDrafter checkpoint format, and what that format has no place for.

TensorRT-LLM (0.14 to 1.2.1) drafts with Apple's released recurrent drafter: s_t = silu(W e_t + U s_{t-1} + b) from
s_0 = 0; x = [h, s], projected with a bias unless exit_dim is twice the hidden size; blocks x + silu(L x + c); a head
over the whole vocabulary, without a bias.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from redraft.compiler.trtllm.checkpoint import TrtllmError
from redraft.model_defs.drafters.recurrent import RecurrentConfig, RecurrentDrafter, from_apple

PREFIX = "drafter."
NEVER = -16384.0
"""Logit of a token outside the hot vocabulary: its probability is 0 in every precision."""

ALIGNMENT = 8
"""exit_dim, where it has to grow, becomes a multiple of this on every rank: 16 bytes in 16-bit weights."""


def drafter_weights(drafter: RecurrentDrafter, tp_size: int) -> dict[str, Tensor]:
    """A drafter's weights, whole, under TensorRT-LLM's names; float32.

    A head on the target's rows is multiplied out to one of its own. A hot vocabulary needs a bias: one more feature
    that is always 1 (from the input layer's bias; the blocks keep it), times NEVER for the other tokens.
    Raises TrtllmError where the drafter computes what the format cannot say.
    """
    config, state = drafter.config, drafter.state_dict()
    if config.initial_state != "zero":
        raise TrtllmError(
            f"the drafter's initial_state is {config.initial_state!r} (s_1 = e_1, as in the paper): TensorRT-LLM "
            "computes s_1 = silu(W e_1 + b), which no weights make equal. `redraft train --set initial_state=zero` "
            "trains one that it can draft with; --zero-state exports this one, whose drafts are a little worse then"
        )
    hidden, size, vocab, hot = config.hidden_size, config.exit_dim, config.vocab_size, drafter.hot_ids
    projection, bias = swap_halves(state["input.weight"], hidden), state["input.bias"]
    head = state["own_head.weight"] if config.head == "own" else drafter.head_rows.float() @ state["output.weight"]
    restricted = len(hot) < vocab
    is_identity = size == 2 * hidden and torch.equal(projection, torch.eye(size)) and not bias.any()
    if restricted or size % tp_size or (size == 2 * hidden and not is_identity):
        step = ALIGNMENT * tp_size
        width = math.ceil((size + restricted) / step) * step
        width += step if width == 2 * hidden else 0
    else:
        width = size
    weights = {
        "rnn_u.weight": state["rnn_u.weight"],
        "rnn_u.bias": state["rnn_u.bias"] if config.rnn_bias else torch.zeros(hidden),
        "rnn_w.weight": state["rnn_w.weight"],
    }
    if width != 2 * hidden:
        weights["input_proj.weight"] = padded(projection, width, 2 * hidden)
        weights["input_proj.bias"] = padded(bias, width)
        weights["input_proj.bias"][size : size + restricted] = 1
    for index in range(config.num_blocks):
        weights[f"layers.{index}.linear.weight"] = padded(state[f"blocks.{index}.linear.weight"], width, width)
        weights[f"layers.{index}.linear.bias"] = padded(state[f"blocks.{index}.linear.bias"], width)
    weights["lm_head.weight"] = torch.zeros(vocab, width)
    if restricted:
        weights["lm_head.weight"][:, size] = NEVER
    weights["lm_head.weight"][hot] = padded(head, len(hot), width)
    return {PREFIX + name: weight for name, weight in weights.items()}


def drafter_entries(drafter: RecurrentDrafter, weights: dict[str, Tensor]) -> dict[str, Any]:
    """What config.json says of a drafter."""
    return {
        "redrafter_num_layers": drafter.config.num_blocks,
        "redrafter_hidden_size": drafter.config.hidden_size,
        "redrafter_exit_dim": weights[f"{PREFIX}lm_head.weight"].shape[1],
        "redrafter_is_rnn": True,
    }


def factors(drafter: RecurrentDrafter) -> dict[str, Tensor]:
    """What a drafter's weights are multiplied from or chosen by, which its head's weight does not tell by itself; in
    the types of our format. Empty for a head of its own over all tokens."""
    result = {}
    if drafter.config.head == "target":
        result["output.weight"] = drafter.state_dict()["output.weight"].to(torch.bfloat16)
    if drafter.config.hot_vocabulary:
        result["hot_ids"] = drafter.hot_ids.to(torch.int32)
    return result


def apple_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Apple's config.json of the drafter in a checkpoint whose config.json is `raw`."""
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["redrafter_hidden_size"],
        "exit_dim": raw["redrafter_exit_dim"],
        "num_draft_layers": raw["redrafter_num_layers"],
        "rnn": raw["redrafter_is_rnn"],
    }


def apple_weights(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """A drafter's weights under Apple's names, from a checkpoint's, whole, without what exit_dim grew by."""
    size, layers, out = config["exit_dim"], config["num_draft_layers"], {}
    for name, weight in weights.items():
        if not name.startswith(PREFIX):
            continue
        name = name.removeprefix(PREFIX)
        if name.startswith(("input_proj", "layers")):
            weight = weight[:size]
        if name.startswith("layers") or name == "lm_head.weight":
            weight = weight[..., :size]
        name = re.sub(r"^lm_head\.", f"lm_head.{layers}.", name)
        out[re.sub(r"^layers\.", "lm_head.", name)] = weight.contiguous()
    return out


def own_weights(weights: dict[str, Tensor], config: dict[str, Any], kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our format's weights, from a checkpoint's, whole, the drafter's config.json and its `factors`."""
    recurrent = RecurrentConfig(**{field.name: config[field.name] for field in fields(RecurrentConfig)})
    apple = {
        "vocab_size": recurrent.vocab_size,
        "hidden_size": recurrent.hidden_size,
        "exit_dim": recurrent.exit_dim,
        "num_draft_layers": recurrent.num_blocks,
        "rnn": True,
    }
    _, ours = from_apple(apple, apple_weights(weights, apple))
    head = ours.pop("own_head.weight")
    if recurrent.head == "own":
        ours["own_head.weight"] = head[kept["hot_ids"]] if recurrent.hot_vocabulary else head
    if not recurrent.rnn_bias:
        del ours["rnn_u.bias"]
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in ours.items()} | kept


def swap_halves(weight: Tensor, columns: int) -> Tensor:
    """An input layer's weight [E, 2 * columns] for [h, s] instead of [s, h], or the other way round."""
    return torch.cat([weight[:, columns:], weight[:, :columns]], dim=1)


def padded(weight: Tensor, *shape: int) -> Tensor:
    """A new tensor of zeros with `weight` in its first corner."""
    out = torch.zeros(shape)
    out[tuple(slice(size) for size in weight.shape)] = weight
    return out
