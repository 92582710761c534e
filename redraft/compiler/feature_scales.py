"""Scales of features for weights in 4 bits, with which rounding changes a target's answers less.

A product y = W x stays the same where feature k of x is divided by a scale s_k, and column k of W multiplied by it:

    y_n = sum_k (W_nk s_k) (x_k / s_k)

The division is done where x is made: in the weights of the norm before, or in the rows of the product before. W_nk s_k
is what is rounded, in groups of 32 features that share 16 steps: the larger s_k, the smaller the error of W_nk. So
features of large magnitude get large scales (AWQ: Lin et al., 2023, arXiv 2306.00978, section 3.2). As there, s_k is a
power of the feature's mean magnitude over some texts: of a few powers the one with which rounding moves y least.

Unlike there, a scale is a power of two. Multiplying and dividing by it rounds nothing, so that the target's results in
float32 stay as they were, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from redraft.chat import encode_user_turn
from redraft.home import PROMPTS
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Attend, DecoderLayer, Target
from redraft.plugins.operators.linear.blocks import BlockWeight
from redraft.prompts import read_prompts, spread
from redraft.text import TextCodec

READ_PROMPTS = 8
"""Prompts that magnitudes are taken over: about 600 tokens"""
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Powers of the mean magnitude to choose from; 0 leaves a product as it is"""
LEAST_EXPONENT, LARGEST_EXPONENT = -2, 6
"""Scales are from 2^-2 to 2^6. A feature that is rare in the texts looks small and may be large in others, so none is
rounded more than four times coarser than the median one. Rows that make a feature are divided by its scale. Scales and
minima of their groups are float16, which has fewer digits below 2^-14."""
JUDGED_ROWS = 128
"""Rows of a product, spread evenly, by which a power is chosen"""


def calibration_texts(model: Path, config: TargetConfig) -> list[list[int]]:
    """Token ids of prompts that come with the package, as a model folder's template frames them, cut to the target's
    context. Tokens without a row in the embedding are left out. Raises ValueError or OSError for a tokenizer that
    cannot be read."""
    codec = TextCodec.load(model / "tokenizer.json")
    prompts = spread(read_prompts(PROMPTS).prompts, READ_PROMPTS)
    texts = (encode_user_turn(model, codec, prompt.turns[0]) for prompt in prompts)
    known = ([token for token in ids if token < config.vocab_size][: config.max_position] for ids in texts)
    return [ids for ids in known if ids]


@torch.no_grad()
def scale_features(target: Target, texts: Sequence[Sequence[int]], on_layer: Callable[[], None] = lambda: None) -> None:
    """Scale the features of a float32 target's products, layer by layer, by what they are in texts (token ids).
    `on_layer` is called after each layer."""
    config = target.config
    attends = [causal_attend(config, len(ids)) for ids in texts]
    states = [target.embed(torch.tensor([ids])) for ids in texts]
    for index, layer in enumerate(cast(Iterable[DecoderLayer], target.layers)):
        states, inputs = run_layer(layer, index, states, attends)
        for name, rows in inputs.items():
            product: nn.Linear = getattr(layer, name)
            scales = best_scales(product.weight, rows, value_heads(config) if name == "attention_out" else None)
            fold(layer, name, scales)
        on_layer()


def scalable(config: TargetConfig) -> tuple[str, ...]:
    """The products of a layer whose features can be scaled where they are made. Not those of experts: a router reads
    the same features. Not those that a GELU or SiLU gives without a gate: it is not proportional to what it takes."""
    if config.experts:
        return ("qkv", "attention_out")
    if config.gated:
        return ("qkv", "attention_out", "gate_up", "down")
    return ("qkv", "attention_out", "up", *(("down",) if config.activation == "relu" else ()))


def value_heads(config: TargetConfig) -> tuple[int, int, int]:
    """The shape of attention's output features: value heads, the query heads that read each, and a head's features."""
    return config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_size


def run_layer(
    layer: DecoderLayer, index: int, states: Sequence[Tensor], attends: Sequence[Attend]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What a layer makes of each text's states [1, N, H], and by name what its `scalable` products take, [rows of all
    texts, K]."""
    taken: dict[str, list[Tensor]] = {name: [] for name in scalable(layer.config)}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            taken[name].append(inputs[0][0])

        return hook

    hooks = [getattr(layer, name).register_forward_pre_hook(record(name)) for name in taken]
    try:
        states = [layer(x, index, attend) for x, attend in zip(states, attends, strict=True)]
    finally:
        for hook in hooks:
            hook.remove()
    return states, {name: torch.cat(rows) for name, rows in taken.items()}


def best_scales(weight: Tensor, inputs: Tensor, heads: tuple[int, int, int] | None = None) -> Tensor:
    """Scales [A, 1, C] of the features of a product's weight [N, K] that takes `inputs` [rows, K], each a power of two.

    K is A * B * C features, of which B at a time share a scale: with `heads` those of a value head that several query
    heads read, else A and B are 1.
    """
    shape = heads or (1, 1, weight.shape[1])
    judged = weight[:: max(len(weight) // JUDGED_ROWS, 1)]
    logs = inputs.abs().mean(0).view(shape).mean(1, keepdim=True).log2()
    seen = logs.isfinite()
    # The error does not count features that are silent in the texts: they keep scale 1.
    above = torch.where(seen, logs - logs[seen].median(), 0.0)
    scales = [(power * above).round().clamp(LEAST_EXPONENT, LARGEST_EXPONENT).exp2() for power in POWERS]
    return min(scales, key=lambda scale: rounding_error(judged, inputs, scale.expand(shape).flatten()))


def rounding_error(weight: Tensor, inputs: Tensor, scale: Tensor) -> float:
    """The squared change of a product's results, of weight [N, K] and inputs [rows, K], where the weight is rounded to
    `int4` with its features scaled, float32 [K]."""
    scaled = weight * scale
    rounded = torch.from_numpy(BlockWeight.quantized(scaled.numpy(), "int4").dequantized())
    return float((inputs @ ((rounded - scaled) / scale).T).square().sum())


def fold(layer: DecoderLayer, name: str, scales: Tensor) -> None:
    """Multiply the columns of a layer's product by the scales of `best_scales`, and divide the rows that make its
    features: the producer's last ones, values after queries and keys, `up` after `gate`.

    Weights are replaced and not written to, since they may be a mapped file.
    """
    product, producer = getattr(layer, name), producer_of(layer, name)
    columns = scales.expand(value_heads(layer.config)) if name == "attention_out" else scales
    set_weight(product, "weight", product.weight * columns.flatten())
    divisors = scales.flatten()
    for key, parameter in list(producer.named_parameters(recurse=False)):
        before = len(parameter) - len(divisors)
        divided = parameter[before:] / divisors.view(-1, *[1] * (parameter.ndim - 1))
        set_weight(producer, key, torch.cat([parameter[:before], divided]))


def producer_of(layer: DecoderLayer, name: str) -> nn.Module:
    """What makes the features of a layer's product."""
    if name == "attention_out":
        return layer.qkv
    if name == "down":
        return layer.gate_up if layer.config.gated else layer.up
    return layer.attention_norm if name == "qkv" else layer.mlp_norm


def set_weight(module: nn.Module, name: str, weight: Tensor) -> None:
    setattr(module, name, nn.Parameter(weight, requires_grad=False))
