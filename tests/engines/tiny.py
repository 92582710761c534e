"""A tiny random target with odd sizes, bundles of it, batches, and what its module says they should give."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from build_engines import build, target_info
from model_defs.attention import causal_attend
from model_defs.config import RopeConfig, TargetConfig
from model_defs.drafter import Drafter
from model_defs.drafters import DRAFTERS
from model_defs.recurrent import RecurrentConfig, RecurrentDrafter
from model_defs.target import Target
from redraft.bundle import Bundle, BundleConfig, LimitsInfo, MethodInfo
from redraft.engines.interface import TargetBatch

VOCAB = 111
LIMITS = LimitsInfo(slots=9, max_len=80, max_tree=40, prefill_chunk=16)
METHOD = "tiny"
"""What the tiny bundle's only method is called."""
DRAFTING = MethodInfo(
    drafter="recurrent",
    construction="beam",
    beam_width=3,
    beam_length=4,
    candidates=5,
    tree_budget=8,
    ngram=False,
    verification="sampled_walk",
)


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
    torch.manual_seed(0)
    target = Target(config).eval().requires_grad_(False)
    for weight in target.parameters():
        weight.normal_(0, 0.3 if weight.ndim == 2 else 1)
    return target


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
    "draft_lm": {"num_layers": 2},
}


def tiny_drafter_of(target: Target, variant: str, hot: int | None = 50) -> Drafter:
    """Random, of a kind of `DRAFTERS` (and a setting, behind a comma), with so many hot tokens, as stored."""
    kind = DRAFTERS[variant.split(",")[0]]
    torch.manual_seed(1)
    ids = None if hot is None else torch.arange(0, 2 * hot, 2)
    drafter = kind(kind.configure(target, hot, CONTEXT_DRAFTERS.get(variant, {})), target, ids)
    for weight in drafter.parameters():
        weight.requires_grad_(False).normal_(0, 0.2 if weight.ndim == 2 else 1).copy_(weight.bfloat16())
    return drafter.eval()


def tiny_bundle(
    folder: Path,
    target: Target,
    backend: str = "openvino",
    precision: str = "fp32",
    drafts: bool = True,
    trained: Drafter | None = None,
    **plan: Any,
) -> Bundle:
    """Build and load a bundle under `folder`, with the recurrent drafter or the one given; `plan` changes DRAFTING."""
    model, drafter = folder / "model", folder / "drafter"
    model.mkdir(parents=True, exist_ok=True)
    (model / "tokenizer.json").write_text("{}")
    trained = trained or tiny_drafter(target)
    if drafts:
        trained.save(drafter)
    config = BundleConfig(
        name="tiny",
        backend=backend,
        precision=precision,
        target=target_info(target),
        limits=LIMITS,
        methods={METHOD: DRAFTING.model_copy(update={"drafter": trained.name, **plan})} if drafts else {},
    )
    build(config, target, model, {METHOD: drafter} if drafts else {}, folder / "bundle", hidden=drafts)
    return Bundle.load(folder / "bundle")


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
            hidden.append(target(path, causal_attend(target.config, path.shape[1]))[0, -1])
    stacked = torch.stack(hidden)
    return target.lm_head(stacked).numpy(), stacked.numpy()
