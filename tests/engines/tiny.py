"""Tiny random models with odd sizes, bundles of them, batches, and what their modules say they should give."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from redraft.batch import TargetBatch
from redraft.bundle.backends import Form
from redraft.bundle.config import BundleConfig, LimitsInfo
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import MethodConfig
from redraft.compiler.bundle import build, shard_infos, target_info
from redraft.compiler.methods import MethodSettings
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.draft_lm import DraftLM
from redraft.model_defs.drafters.layer_shape import LayerShape
from redraft.model_defs.drafters.recurrent import RecurrentConfig, RecurrentDrafter
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.drafters.token_info import InfoForm
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.families.base import Attention, Experts
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig
from tests.engines.scheduling import METHOD, VOCAB

LIMITS = LimitsInfo(slots=9, max_len=80, max_tree=40, prefill_chunk=16)
DRAFTING = MethodConfig(
    drafter="recurrent",
    construction="beam",
    beam_width=3,
    beam_length=3,
    candidates=5,
    tree_budget=8,
    ngram=False,
    verification="sampled_walk",
)
"""The third level is the first below one that chose its parents; to export one more takes 2 s."""


def tiny_target() -> Target:
    """Random weights, vocabulary 111, grouped queries, biases."""
    config = TargetConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=200,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_size=32,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position=128,
        tie_embeddings=False,
        qkv_bias=True,
        eos_token_ids=(0,),
    )
    return random_model(config)


def tiny_lm() -> Target:
    """Another model with the same vocabulary, nothing else of which is the tiny target's."""
    config = TargetConfig(
        vocab_size=VOCAB,
        hidden_size=56,
        intermediate_size=120,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=500.0, type="linear", factor=2.0),
        max_position=100,
        tie_embeddings=True,
        qkv_bias=False,
        eos_token_ids=(3,),
    )
    return random_model(config)


LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    "gemma3": {
        "rms_norm_eps": 0.1,
        "qkv_bias": False,
        "tie_embeddings": True,
        "others": Attention(RopeConfig(theta=100.0), window=9, layers=(0,)),
        "qk_norm": True,
        "sandwich_norms": True,
        "float32_norms": True,
        "activation": "gelu",
        "embedding_scale": 96**0.5,
    },
    "opt": {
        "rope": RopeConfig(type="none"),
        "layer_norm": True,
        "activation": "relu",
        "gated": False,
        "output_bias": True,
        "learned_positions": True,
    },
    "mistral": {"qkv_bias": False, "window": 9},
    "mixtral": {
        "qkv_bias": False,
        "window": 9,
        "intermediate_size": 40,
        "experts": Experts(count=5, chosen=2, normalized=True),
    },
    "qwen3 moe": {
        "qkv_bias": False,
        "qk_norm": True,
        "intermediate_size": 40,
        "experts": Experts(count=5, chosen=2, normalized=False),
    },
    "glm4": {"qkv_bias": True, "sandwich_norms": True, "rope": RopeConfig(theta=500.0, share=0.5)},
    "smollm3": {"qkv_bias": False, "tie_embeddings": True, "others": Attention(RopeConfig(type="none"), layers=(1,))},
    "phi4": {
        "qkv_bias": False,
        "tie_embeddings": True,
        "rope": RopeConfig(
            type="longrope",
            original_max_position=1024,
            share=0.75,
            attention_factor=1.2,
            short_divisors=tuple(1 + i / 8 for i in range(12)),
            long_divisors=(9.0,) * 12,
        ),
    },
}
"""What the layers of families have that the tiny target's lack."""


def tiny_of(layers: str, **changes: Any) -> Target:
    """The tiny target with a family's layers, of two KV groups."""
    return random_model(
        dataclasses.replace(tiny_target().config, **{"num_heads": 4, "num_kv_heads": 2} | LAYERS[layers] | changes)
    )


def random_model(config: TargetConfig) -> Target:
    torch.manual_seed(0)
    model = Target(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(0, 0.3 if weight.ndim >= 2 else 1)
    return model


def write_model(model: Target, folder: Path, tokens: dict[str, int] | None = None) -> None:
    """A checkpoint in Hugging Face's format, with a tokenizer of `tokens` (default: one for each id)."""
    config = model.config
    weights = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    if not config.tie_embeddings:
        weights["lm_head.weight"] = model.lm_head.weight
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    for i, layer in enumerate(model.layers):
        name = f"model.layers.{i}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = getattr(layer.qkv, kind).split([config.head_size * count for count in heads])
            for p, part in zip("qkv", parts, strict=True):
                weights[f"{name}.self_attn.{p}_proj.{kind}"] = part
        weights[f"{name}.self_attn.o_proj.weight"] = layer.attention_out.weight
        for p, part in zip(("gate", "up"), layer.gate_up.weight.chunk(2), strict=True):
            weights[f"{name}.mlp.{p}_proj.weight"] = part
        weights[f"{name}.mlp.down_proj.weight"] = layer.down.weight
        weights[f"{name}.input_layernorm.weight"] = layer.attention_norm.weight
        weights[f"{name}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    raw = {
        "model_type": "qwen2" if config.qkv_bias else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": {"rope_type": config.rope.type, "factor": config.rope.factor},
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(raw))
    write_tokenizer(folder, tokens or {f"t{i}": i for i in range(config.vocab_size)})


def write_tokenizer(folder: Path, tokens: dict[str, int]) -> None:
    Tokenizer(WordLevel(tokens, unk_token=next(iter(tokens)))).save(str(folder / "tokenizer.json"))


def tiny_drafter(target: Target, **changes: Any) -> RecurrentDrafter:
    """Random, with a hot vocabulary of 50 rows."""
    config = RecurrentConfig(target.config.hidden_size, VOCAB, 64, 2, **{"hot_vocabulary": 50} | changes)
    torch.manual_seed(1)
    drafter = RecurrentDrafter(config, target, torch.arange(0, 100, 2)).eval().requires_grad_(False)
    for weight in drafter.parameters():
        weight.normal_(0, 0.2)
    return drafter


CONTEXT_DRAFTERS: dict[str, dict[str, Any]] = {
    "hidden_state": {"info_vocabulary": 37, "info_rank": 5},
    "hidden_state, plain": {"token_info": False, "chain_map": False, "first_token": False},
    "eagle": {},
    "eagle3": {"target_layers": (0, 1, 2), "num_layers": 2},
    "draft_lm": {"num_layers": 2},
    "draft_lm, model": {},
}


QWEN3 = LayerShape(120, 4, 2, 32, 1e-6, RopeConfig(theta=500.0), max_position=128, qk_norm=True)
BLOCK_DRAFTERS: dict[str, dict[str, Any]] = {
    "block": {"target_layers": (0, 1, 2), "num_layers": 2, "block_size": 6, "mask_token": 7, "info_rank": 5},
    "block, causal": {"layer": QWEN3, "block_size": 6, "mask_token": 7, "causal": True, "from_root": True},
    "parallel_eagle3": {"target_layers": (0, 1, 2), "num_layers": 2, "mask_token": 7},
}
"""Those that draft all levels at once, whose contexts the tests of the others cover."""


def tiny_drafter_of(target: Target, variant: str, hot: int | None = 50) -> Drafter:
    """Random, of a kind of `DRAFTERS` (and a setting, behind a comma), with so many hot tokens, as stored."""
    ids = None if hot is None else torch.arange(0, 2 * hot, 2)
    if variant == "draft_lm, model":
        return DraftLM.of_model(tiny_lm(), target, ids)
    kind = DRAFTERS[variant.split(",")[0]]
    torch.manual_seed(1)
    settings = (CONTEXT_DRAFTERS | BLOCK_DRAFTERS).get(variant, {})
    drafter = kind(kind.configure(target, hot, settings), target, ids).requires_grad_(False)
    for weight in drafter.state_dict().values():
        weight.normal_(0, 0.2 if weight.ndim == 2 else 1).copy_(weight.bfloat16())
    return drafter.eval()


def grouped_target() -> Target:
    """As the tiny target, with three KV groups: 2 + 1 on two ranks."""
    return random_model(dataclasses.replace(tiny_target().config, num_heads=6, num_kv_heads=3, intermediate_size=201))


def tiny_bundle(
    folder: Path,
    target: Target,
    backend: str = "openvino",
    precision: str = "fp32",
    drafts: bool = True,
    trained: Drafter | None = None,
    token_info: InfoForm | None = None,
    limits: LimitsInfo = LIMITS,
    tensor_parallel: int = 1,
    tokenizer: str = "{}",
    form: Form | None = None,
    alias: bool = False,
    **plan: Any,
) -> Bundle:
    """Build and load a bundle under `folder`, with the recurrent drafter or the one given; `plan` changes DRAFTING."""
    model, drafter, hot = (folder / name for name in ("model", "drafter", "hot"))
    model.mkdir(parents=True, exist_ok=True)
    (model / "tokenizer.json").write_text(tokenizer)
    trained = trained or tiny_drafter(target)
    depth = {"beam_length": plan["beam_length"]} if "beam_length" in plan else {}
    settings = MethodSettings(drafter=drafter, token_info=token_info, **depth)
    if trained.feature_size != trained.config.hidden_size:
        write_model(tiny_lm(), drafter)
        shutil.copy2(drafter / "tokenizer.json", model)
        hot.mkdir()
        save_file({"hot_ids": trained.hot_ids}, hot / "drafter.safetensors")
        settings = settings.model_copy(update={"hot_vocabulary": hot})
    elif drafts:
        trained.save(drafter)
    methods = {METHOD: DRAFTING.model_copy(update={"drafter": trained.name, **plan})} if drafts else {}
    config = bundle_config(target, methods, limits, precision, backend, tensor_parallel)
    config = config.model_copy(update={"form": form and Form(form), "alias": alias})
    build(config, target, model, {METHOD: settings} if drafts else {}, folder / "bundle")
    return Bundle.load(folder / "bundle")


def bundle_config(
    target: Target,
    methods: dict[str, MethodConfig],
    limits: LimitsInfo,
    precision: str = "fp32",
    backend: str = "openvino",
    tensor_parallel: int = 1,
) -> BundleConfig:
    return BundleConfig(
        name="test",
        backend=backend,
        precision=precision,
        target=target_info(target),
        limits=limits,
        methods=methods,
        tensor_parallel=tensor_parallel,
        shards=shard_infos(target, tensor_parallel),
    )


def bundle_of_methods(
    folder: Path,
    target: Target,
    methods: dict[str, tuple[Drafter, dict[str, Any]]],
    tensor_parallel: int = 1,
    backend: str = "openvino",
    precision: str = "fp32",
) -> Bundle:
    """Build and load a bundle of several methods: a drafter for each, and what it changes of DRAFTING."""
    model, settings, plans = folder / "model", dict[str, MethodSettings](), dict[str, MethodConfig]()
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text("{}")
    for name, (drafter, plan) in methods.items():
        settings[name] = MethodSettings(drafter=folder / name)
        plans[name] = DRAFTING.model_copy(update={"drafter": drafter.name, **plan})
        drafter.save(folder / name)
    config = bundle_config(target, plans, LIMITS, precision, backend, tensor_parallel)
    build(config, target, model, settings, folder / "bundle")
    return Bundle.load(folder / "bundle")


def caches_of(engine: Any) -> list[np.ndarray]:
    """The target's caches in an engine of `openvino`, or of `torch` on the CPU."""
    caches = (
        engine.caches.values() if isinstance(engine.caches, dict) else [one for kind in engine.caches for one in kind]
    )
    return [np.asarray(cache) for cache in caches]


@dataclass
class Rows:
    """One sequence's part of a step: tokens in the cache, and new rows with the row that each follows (-1: the
    cache's last)."""

    slot: int
    context: list[int]
    tokens: list[int]
    parents: list[int]
    commit: list[int] = field(default_factory=list)
    causal: bool = False

    def path(self, row: int) -> list[int]:
        """All tokens that a row sees, itself last."""
        tokens: list[int] = []
        while row >= 0:
            tokens.append(self.tokens[row])
            row = self.parents[row]
        return self.context + tokens[::-1]

    def ancestors(self, row: int) -> list[int]:
        return [row] + (self.ancestors(self.parents[row]) if self.parents[row] >= 0 else [])


def chain(slot: int, context: list[int], tokens: list[int], causal: bool = False) -> Rows:
    return Rows(slot, context, tokens, list(range(-1, len(tokens) - 1)), causal=causal)


def random_tree(rng: np.random.Generator, slot: int, context: list[int], rows: int) -> Rows:
    parents = [-1] + [int(rng.integers(0, i)) for i in range(1, rows)]
    return Rows(slot, context, rng.integers(0, VOCAB, rows).tolist(), parents)


def make_batch(sequences: list[Rows], words: int = 2) -> TargetBatch:
    """Ragged rows, every row with logits; chains and prefill chunks marked `causal` have no mask."""
    count = [len(s.tokens) for s in sequences]
    mask = np.zeros((sum(count), words), np.uint32)
    positions = []
    for s, start in zip(sequences, np.cumsum([0, *count]), strict=False):
        for row in range(len(s.tokens)):
            positions.append(len(s.path(row)) - 1)
            for j in [] if s.causal else s.ancestors(row):
                mask[start + row, j // 32] |= np.uint32(1 << (j % 32))
    ints = lambda values: np.array(values, np.int32)  # noqa: E731
    return TargetBatch(
        input_ids=ints([t for s in sequences for t in s.tokens]),
        positions=ints(positions),
        row_offsets=ints(np.cumsum([0, *count])),
        slots=ints([s.slot for s in sequences]),
        cache_lengths=ints([len(s.context) for s in sequences]),
        tree_mask=mask.view(np.int32),
        commit_src=ints([p for s in sequences for p in s.commit]),
        commit_offsets=ints(np.cumsum([0, *[len(s.commit) for s in sequences]])),
        logit_rows=np.arange(sum(count), dtype=np.int32),
    )


def expected(target: Target, sequences: list[Rows]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of every row: the module run over the row's whole path."""
    hidden = []
    for s in sequences:
        for row in range(len(s.tokens)):
            path = torch.tensor([s.path(row)])
            hidden.append(target(path, causal_attend(target.config, path.shape[1])).hidden[0, -1])
    stacked = torch.stack(hidden)
    return target.lm_head(stacked).numpy(), stacked.numpy()


def scores_of(target: Target, text: list[int]) -> list[float]:
    """The module's own log-probabilities of all tokens of a text but the first."""
    logits, _ = expected(target, [chain(0, [], text[:-1])])
    return torch.from_numpy(logits).log_softmax(1)[range(len(text) - 1), text[1:]].tolist()
