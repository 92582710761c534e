"""Drafters in the `speculators` package and in ours: do both compute the same of one checkpoint?

The package has an environment of its own:

    python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 speculators==0.9.0 -e .
    VENV/bin/python -m benchmarks.verify.speculators_forward

EAGLE-3 drafters of a small random Llama are exported to the package's form, loaded by it and by our reader, and
unrolled along a text. Random P-EAGLE, DFlash and DSpark drafters are made and saved by the package, and read by ours.
It prints the largest difference of the logits at each depth, over the largest logit, and fails above 1e-4.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from redraft.compiler.checkpoints.eagle3 import Form, export_eagle3
from redraft.model_defs.drafters.block import BlockDrafter
from redraft.model_defs.drafters.eagle3 import Eagle3Config, Eagle3Drafter, ParallelEagle3Drafter
from redraft.model_defs.drafters.layer_shape import LayerShape
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.drafters.token_info import TokenInfoFactors
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.operators import TORCH
from redraft.model_defs.target.model import Target

SIZE, VOCAB, ROWS, LAYERS = 24, 111, 53, (2, 3, 5)
POSITIONS, DEPTHS, MOST = 14, 3, 1e-4
EAGLE3: dict[str, dict] = {
    "EAGLE-3": {},
    "EAGLE-3, two layers, 3.1": {"num_layers": 2, "fuse_norm": "each", "norm_output": True},
    "EAGLE-3, norm before fc, residual after the norm": {"fuse_norm": "all", "norm_before_residual": True},
}
TEXT, ROOT, BLOCK, MASK = 20, 9, 5, 7
"""Tokens of a text, the place of the root in it, rows of a block, and the token that masks have"""


@dataclass
class Parallel:
    """A drafter that the package makes, which drafts all levels at once."""

    kind: str
    levels: int
    settings: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    """More of the configuration of its layers"""


WINDOW = {"sliding_window": ROOT, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
PARALLEL = {
    "P-EAGLE": Parallel("peagle", 4),
    "P-EAGLE, windows": Parallel("peagle", 4, layers=WINDOW | {"sliding_window": 6}),
    "DFlash": Parallel("dflash", BLOCK - 1),
    "DFlash, windows": Parallel("dflash", BLOCK - 1, layers=WINDOW),
    "DFlash, windows, blocks not causal": Parallel("dflash", BLOCK - 1, {"sliding_window_non_causal": True}, WINDOW),
    "DSpark": Parallel("dspark", BLOCK),
    "DSpark, the root's own row": Parallel("dspark", BLOCK - 1, {"sample_from_anchor": False}),
}


def write_target(folder: Path) -> Target:
    """A random Llama of 7 layers, of bfloat16 numbers, as `redraft fetch` stores them, and exports its embeddings."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=40,
        num_hidden_layers=7,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return Target.from_folder(folder)


def random_drafter(target: Target, changes: dict) -> Eagle3Drafter:
    config = Eagle3Config(SIZE, VOCAB, ROWS, LAYERS, layer=LayerShape.of(target.config), **changes)
    drafter = Eagle3Drafter(config, target, torch.randperm(VOCAB)[:ROWS]).eval()
    randomize(drafter)
    return drafter


def randomize(module: torch.nn.Module) -> None:
    for weight in module.parameters():
        weight.requires_grad_(False).normal_(0, 0.3 if weight.ndim == 2 else 1)


def unrolled(folder: Path, windows: Windows) -> Iterator[Tensor]:
    """The package's logits [positions, rows] of an EAGLE-3 drafter at each depth."""
    from speculators.models.eagle3.core import Eagle3DraftModel  # type: ignore[import-not-found]

    config = Eagle3DraftModel.config_class.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()
    result: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: result.append(output[0, :POSITIONS]))
    length = POSITIONS + DEPTHS - 1
    model(
        hidden_states=windows.layers[:, :length].clone(),  # type: ignore[index]
        input_ids=windows.tokens[:, 1 : length + 1],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        ttt_steps=DEPTHS,
    )
    yield from result


def theirs(parallel: Parallel, model: Path, folder: Path, tokens: Tensor, layers: Tensor) -> Tensor:
    """Make a drafter for the target of the folder `model` and save it to `folder`. Returns its logits [levels, rows]
    below the root of the text int64 [1, TEXT], from what enters the target's layers [1, TEXT, n * SIZE]."""
    from speculators.config import SpeculatorsConfig, VerifierConfig  # type: ignore[import-not-found]
    from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]
    from speculators.models.dflash.core import DFlashDraftModel  # type: ignore[import-not-found]
    from speculators.models.dspark.core import DSparkDraftModel  # type: ignore[import-not-found]
    from speculators.models.peagle.core import PEagleDraftModel  # type: ignore[import-not-found]
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # type: ignore[import-not-found]

    kind = {"peagle": PEagleDraftModel, "dflash": DFlashDraftModel, "dspark": DSparkDraftModel}[parallel.kind]
    own: dict[str, Any] = {"markov_rank": 6} if parallel.kind == "dspark" else {}
    if parallel.kind == "peagle":
        own["eagle_aux_hidden_state_layer_ids"] = list(LAYERS)
    else:
        own |= {"aux_hidden_state_layer_ids": list(LAYERS), "block_size": BLOCK}
    shape: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
    }
    config = kind.config_class(
        transformer_layer_config=Qwen3Config(**shape, **sizes, tie_word_embeddings=False, **parallel.layers),
        draft_vocab_size=ROWS,
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm=parallel.kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=parallel.levels)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(model)),
        ),
        **own,
        **parallel.settings,
    )
    config.transformer_layer_config._attn_implementation = "eager"
    drafter = kind(config=config).eval()
    randomize(drafter)
    ids = torch.randperm(VOCAB)[:ROWS].sort().values
    drafter.load_vocab_mappings(torch.isin(torch.arange(VOCAB), ids), ids - torch.arange(ROWS))
    if parallel.kind != "peagle":
        drafter.load_verifier_weights()  # whose embeddings are not saved
    drafter.save_pretrained(folder)
    result = dict[str, Tensor]()
    for name in ("lm_head", "markov_head.markov_w2") if parallel.kind == "dspark" else ("lm_head",):
        module = drafter.get_submodule(name)
        module.register_forward_hook(lambda *call, name=name: result.update({name: call[2].flatten(0, -2)}))
    chosen = torch.zeros(1, TEXT)
    chosen[0, ROOT] = 1
    forward: dict[str, Any] = {
        "hidden_states": layers,
        "document_ids": torch.zeros(1, TEXT, dtype=torch.long),
        "loss_mask": chosen,
        "verifier_last_hidden_states": torch.zeros(1, TEXT, SIZE),
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    if parallel.kind == "dspark":
        forward["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    if parallel.kind != "peagle":
        drafter(input_ids=tokens, max_anchors=1, **forward)
        return sum(result.values())[BLOCK - parallel.levels :]  # type: ignore[index, return-value]
    chain = torch.arange(1, parallel.levels)
    anchors = torch.cat([torch.arange(TEXT), torch.full_like(chain, ROOT - 1)])
    rows = anchors, torch.cat([torch.zeros(TEXT, dtype=torch.long), chain])
    with patch("speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: rows):
        drafter(input_ids=tokens.roll(-1, 1), num_depths=parallel.levels, **forward)  # a pair has the token after it
    return result["lm_head"][[ROOT - 1, *range(TEXT, TEXT + parallel.levels - 1)]]


def ours(drafter: BlockDrafter | ParallelEagle3Drafter, levels: int, tokens: Tensor, layers: Tensor) -> Tensor:
    """The same of our drafter, with what the previous tokens of the text say where it reads them."""
    heads, rows = drafter.layer_config, TEXT + max(levels, drafter.block_rows)
    drafter.prepare(rows, levels)
    caches = [torch.zeros(1, heads.num_kv_heads, rows, heads.head_size) for _ in range(2 * drafter.context_layers)]
    entering = dict(zip(LAYERS, layers[0, :ROOT].split(SIZE, dim=-1), strict=True))
    features = drafter.feature_reader()(entering, layers)
    ints = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, ROOT], [0], [0])]
    logits = drafter.paths(TORCH, features, tokens[0, 1 : ROOT + 1].int(), *ints, *caches).raw_logits
    if not isinstance(drafter.token_info, TokenInfoFactors):
        return logits
    z, up = drafter.token_info.factors(tokens[0, ROOT : ROOT + levels])
    return logits + z @ up.T


def compare(name: str, found: Tensor, expected: Tensor) -> float:
    """The largest difference of a depth's logits over the largest logit, printed."""
    difference = float((found - expected).abs().max() / expected.abs().max())
    print(f"{name}: {difference:.1e}")
    return difference


def compare_eagle3(target: Target, model: Path, folder: Path) -> Iterator[float]:
    length = POSITIONS + DEPTHS + 1
    windows = Windows(
        torch.randint(VOCAB, (1, length)),
        torch.zeros(1, length, SIZE),
        torch.zeros(1, length, dtype=torch.long),
        torch.arange(POSITIONS)[None],
        torch.ones(1, POSITIONS, dtype=torch.bool),
        torch.randn(1, length, len(LAYERS) * SIZE),
    )
    for name, changes in EAGLE3.items():
        export_eagle3(random_drafter(target, changes), model, folder / name, Form.speculators, str(model), DEPTHS)
        drafter = load_drafter(folder / name, target)
        states = drafter.unroll(windows, [POSITIONS] * DEPTHS)
        for depth, (x, logits) in enumerate(zip(states, unrolled(folder / name, windows), strict=True)):
            yield compare(f"{name}, depth {depth}", x @ drafter.head_weight.T, logits)


def compare_parallel(target: Target, model: Path, folder: Path) -> Iterator[float]:
    tokens, layers = torch.randint(VOCAB, (1, TEXT)), torch.randn(1, TEXT, len(LAYERS) * SIZE)
    for name, parallel in PARALLEL.items():
        expected = theirs(parallel, model, folder / name, tokens, layers)
        drafter = load_drafter(folder / name, target)
        assert isinstance(drafter, BlockDrafter | ParallelEagle3Drafter)
        found = ours(drafter, parallel.levels, tokens, layers)
        for depth, logits in enumerate(expected):
            yield compare(f"{name}, depth {depth}", found[depth], logits)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_target(folder / "model")
        errors = [
            *compare_eagle3(target, folder / "model", folder),
            *compare_parallel(target, folder / "model", folder),
        ]
    sys.exit(not max(errors) <= MOST)


if __name__ == "__main__":
    main()
