"""All drafters on a tiny random target: training's unrolled forward is what drafting computes, and nothing leaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.context_drafter import ContextDrafter
from redraft.model_defs.drafters.draft_lm import DraftLM
from redraft.model_defs.drafters.eagle import EagleDrafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.registry import DRAFTERS, load_drafter
from redraft.model_defs.drafters.windows import NO_DOCUMENT, Windows
from redraft.model_defs.target.attention import DenseCache, HeadNorms
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig
from redraft.training.distillation import SIBLINGS, Labels, Trainer
from tests.engines.tiny import tiny_of

VOCAB, HIDDEN, LENGTH, UNROLL = 111, 24, 9, 4
VARIANTS: dict[str, dict] = {
    "recurrent": {"exit_dim": 30, "num_blocks": 1},
    "recurrent, own head": {"exit_dim": HIDDEN, "head": "own", "initial_state": "zero"},
    "hidden_state": {"info_vocabulary": 37, "info_rank": 5},
    "hidden_state, plain chain": {"token_info": False, "chain_map": False},
    "hidden_state, no first token": {"first_token": False, "info_vocabulary": 1000},
    "eagle": {},
    "eagle3": {"target_layers": (0, 1, 3), "num_layers": 2, "fuse_norm": "each", "head": "target"},
    "eagle3, states after the norm": {"target_layers": (2,), "norm_output": True, "norm_before_residual": True},
    "medusa": {"heads": UNROLL, "num_blocks": 2},
    "draft_lm": {"num_layers": 2},
}


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    target = Target(TargetConfig(VOCAB, HIDDEN, 40, 3, 6, 2, 4, 1e-5, RopeConfig(), 64, True, False, (), qk_norm=True))
    for parameter in target.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return target.eval().requires_grad_(False)


def drafter_of(target: Target, variant: str, hot: int = 53) -> Drafter:
    kind = DRAFTERS[variant.split(",")[0]]
    torch.manual_seed(1)
    ids = torch.randperm(VOCAB)[:hot]
    drafter = kind(kind.configure(target, hot, VARIANTS[variant]), target, ids)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    return drafter.eval()


@pytest.fixture(params=VARIANTS)
def drafter(request, target: Target) -> Drafter:
    return drafter_of(target, request.param)


def windows_of(documents: list[list[int]], layers: int = 0) -> Windows:
    """Windows of LENGTH positions with random text, all drafted from; `documents` gives their lengths, per window. With
    features of so many layers."""
    span = LENGTH + UNROLL + 1
    rows = [[i for i, n in enumerate(lengths) for _ in range(n)][:span] for lengths in documents]
    rows = [row + [NO_DOCUMENT] * (span - len(row)) for row in rows]
    generator = torch.Generator().manual_seed(2)
    shape = (len(rows), span)
    positions = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in rows])
    return Windows(
        torch.randint(VOCAB, shape, generator=generator),
        torch.randn(*shape, HIDDEN, generator=generator),
        torch.tensor(rows),
        positions,
        torch.ones_like(positions, dtype=torch.bool),
        torch.randn(*shape, layers * HIDDEN, generator=generator) if layers else None,
    )


def windows_for(drafter: Drafter, documents: list[list[int]]) -> Windows:
    return windows_of(documents, len(drafter.feature_layers))


def along(drafter: Drafter, windows: Windows, kept: list[int]) -> list[Tensor]:
    """Per depth the features [W, kept, H]."""
    features = drafter.unroll(windows, kept)
    return [x.unflatten(0, (len(windows), -1)) for x in features]


def drafted_with_cache(drafter: Drafter, windows: Windows, window: int, at: int) -> list[Tensor]:
    """Features of each depth, drafting from one position with a cache, a step at a time; the tokens are the text's."""
    tokens, hidden = windows.tokens[window], windows.hidden[window]
    documents = windows.documents[window]
    first = int((documents == documents[at]).nonzero()[0])
    if isinstance(drafter, ContextDrafter):
        cache = DenseCache(drafter.layer_config, 1, 40, hidden)
        read = drafter.features_of(windows)[window]
        for t in range(first, at + 1):
            out = drafter.ingest(read[None, t : t + 1], tokens[None, t + 1 : t + 2], cache.attend)
            cache.starts += 1
        if isinstance(drafter, HiddenStateDrafter):
            return list(chain_with_cache(drafter, out, cache)[:, 0, 0])
        states = [out]
        for depth in range(1, UNROLL):
            states.append(drafter.grow(states[-1], tokens[None, at + 1 + depth, None], cache.attend))
            cache.starts += 1
        return [drafter.read(x)[0, 0] for x in states]
    assert isinstance(drafter, DraftLM)
    cache = DenseCache(drafter.lm_config, 1, 40, hidden)
    features = []
    for t in range(first, at + UNROLL + 1):
        features.append(drafter(tokens[None, t : t + 1], cache.attend)[0, 0])
        cache.starts += 1
    return features[-UNROLL:]


def chain_with_cache(drafter: HiddenStateDrafter, first: Tensor, cache: DenseCache) -> Tensor:
    def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        out = cache.attend(layer, qkv, norms)
        cache.starts += 1
        return out

    return drafter.chain(first, UNROLL, attend)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if DRAFTERS[name.split(",")[0]].reads_context])
@torch.no_grad()
def test_training_computes_what_drafting_with_a_cache_does(target, variant):
    """Also where a window holds two documents, and where deep steps are trained on a part of the positions."""
    drafter = drafter_of(target, variant)
    windows = windows_for(drafter, [[20], [5, 20], [3, 20]])
    kept = [LENGTH, 6, 6, 4]
    trained = along(drafter, windows, kept)
    for window in range(3):
        for place in range(LENGTH):
            at = int(windows.positions[window, place])
            if windows.documents[window, at] != windows.documents[window, at + UNROLL + 1]:
                continue
            expected = drafted_with_cache(drafter, windows, window, at)
            for depth in range(UNROLL):
                if place < kept[depth]:
                    torch.testing.assert_close(trained[depth][window, place], expected[depth], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_chain_does_not_read_draft_tokens(target):
    """Lyanna's condition for re-using hidden states: only the root's token enters them."""
    drafter = drafter_of(target, "hidden_state")
    windows = windows_of([[20]])
    at = int(windows.positions[0, 0])
    before = along(drafter, windows, [1] * UNROLL)
    windows.tokens[0, at + 2 :] = (windows.tokens[0, at + 2 :] + 1) % VOCAB
    after = along(drafter, windows, [1] * UNROLL)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(drafter.token_info(windows.tokens), drafter.token_info(windows.tokens + 0) + 1)


@torch.no_grad()
def test_a_draft_reads_nothing_behind_its_last_token(drafter):
    """Depth d from position t reads tokens up to t + 1 + d and hidden states up to t, of its own document alone."""
    windows = windows_for(drafter, [[4, 20]])
    features = along(drafter, windows, [LENGTH] * UNROLL)
    for place in range(LENGTH):
        t = int(windows.positions[0, place])
        document = windows.documents[0, t]
        for depth in range(UNROLL):
            if windows.documents[0, t + depth + 1] != document:
                continue
            other = windows_for(drafter, [[4, 20]])
            other.tokens[0, t + depth + 2 :] = 7
            read = other.hidden if other.layers is None else other.layers
            read[0, t + 1 :] = 9.0
            foreign = other.documents[0] != document
            other.tokens[0, foreign], read[0, foreign] = 5, -9.0
            same = along(drafter, other, [LENGTH] * UNROLL)[depth][0, place]
            torch.testing.assert_close(same, features[depth][0, place], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_loss_weighs_every_scored_draft(target):
    """Against plain softmax over the head's rows: hard labels, two documents, a window that ends with its shard."""
    drafter = drafter_of(target, "hidden_state")
    drafter.token_info.norm.weight.mul_(10)
    windows = windows_of([[6, 20], [11]])
    windows.hidden.mul_(torch.linspace(0.1, 3, windows.hidden.shape[1])[:, None])
    trainer = Trainer(target, drafter, Labels.hard, UNROLL, hidden_weight=0.5)
    object.__setattr__(drafter, "recipe", drafter.recipe.__class__(1e-3, depth_shares=(1.0,)))
    row_of = {int(token): row for row, token in enumerate(drafter.hot_ids)}
    expected = 0.0
    for depth, x in enumerate(along(drafter, windows, [LENGTH] * UNROLL)):
        losses = []
        for w in range(2):
            for place, t in enumerate(windows.positions[w].tolist()):
                there, label = t + depth + 1, int(windows.tokens[w, t + depth + 2])
                if not windows.documents[w, t] == windows.documents[w, there + 1] != NO_DOCUMENT:
                    continue
                logits = drafter.raw_logits(x[w, place])
                logits[:37] += drafter.token_info(windows.tokens[w, there])
                entropy = -F.log_softmax(logits, -1)[row_of[label]] if label in row_of else 0.0
                losses.append(entropy + 0.5 * (x[w, place] - windows.hidden[w, there]).square().mean())
        expected += 0.85**depth * float(sum(losses)) / len(losses)
    assert float(trainer.loss(windows)) == pytest.approx(expected, rel=0.01)


def test_training_computes_in_what_the_cpu_multiplies(target, drafter, monkeypatch):
    """bfloat16 where there are instructions for it, else float32, from the same bfloat16 teacher data."""
    windows = windows_for(drafter, [[6, 20], [11]])
    layers = None if windows.layers is None else windows.layers.bfloat16()
    windows = replace(windows, hidden=windows.hidden.bfloat16(), layers=layers)
    losses, gradients = [], []
    for instructions, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=instructions: {"avx512_bf16": found})
        trainer = Trainer(target, drafter, Labels.soft, UNROLL, hidden_weight=0.1)
        drafter.zero_grad()
        loss = trainer.loss(windows)
        loss.backward()
        assert trainer.rows.dtype == dtype
        assert 0 <= trainer.evaluate([windows])["conditional_acceptance"][0] <= 1
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    assert F.cosine_similarity(*gradients, dim=0) > 0.99


@torch.no_grad()
def test_token_info_is_normalized_and_collapses(target):
    drafter = drafter_of(target, "hidden_state")
    info = drafter.token_info
    tokens = torch.arange(VOCAB)
    rows = info(tokens)
    hot = torch.isin(tokens, drafter.hot_ids[:37])
    assert (rows[~hot] == 0).all()
    product = target.embedding.weight @ info.down.weight.T @ info.up.weight.T
    expected = product / product.square().mean(-1, keepdim=True).sqrt() * info.norm.weight
    torch.testing.assert_close(rows[hot], expected[hot], atol=1e-4, rtol=1e-4)
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 0.005), (torch.int8, 0.01)):
        table = info.collapse(dtype)
        assert (table(tokens) - rows).abs().max() <= error * rows.abs().max()
        entries = 38 * 37 * torch.empty(0, dtype=dtype).element_size()
        assert table.nbytes == entries + 38 * 4 + VOCAB * 4


def test_saved_drafters_load_again(drafter, target, tmp_path: Path):
    drafter.save(tmp_path, {"target_fingerprint": "0123"})
    loaded = load_drafter(tmp_path, target)
    assert type(loaded) is type(drafter)
    assert loaded.config == drafter.config
    assert torch.equal(loaded.hot_ids, drafter.hot_ids)
    found, expected = loaded.state_dict(), drafter.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].to(torch.bfloat16).float()) for name in expected)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["drafter"], raw["target_fingerprint"]) == (drafter.name, "0123")


def test_unfit_drafters_are_refused(target, tmp_path: Path):
    drafter_of(target, "eagle").save(tmp_path)
    with pytest.raises(ValueError, match="describes a drafter 'eagle', expected 'medusa'"):
        DRAFTERS["medusa"].load(tmp_path, target)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"drafter": "oracle"}))
    with pytest.raises(
        ValueError, match="'oracle'; known are recurrent, hidden_state, eagle, eagle3, parallel_eagle3, block"
    ):
        load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    with pytest.raises(ValueError, match="hidden size 96 and vocabulary 111; this one has 24 and 111"):
        load_drafter(tmp_path, target)


def test_draft_lm_ships_in_16_megabytes_for_smollm2():
    config = TargetConfig(49152, 576, 1536, 30, 9, 3, 64, 1e-5, RopeConfig(), 8192, True, False, (2,))
    with torch.device("meta"):
        target = Target(config)
        drafter = DraftLM(DraftLM.configure(target), target)
    assert 2 * sum(weight.numel() for weight in drafter.state_dict().values()) <= 16 * 2**20


@torch.no_grad()
def test_initialization_keeps_the_targets_last_layer(target):
    """Where the fused input equals what enters the target's last layer, the drafter is the target."""
    drafter, last = EagleDrafter(EagleDrafter.configure(target, settings={"head": "own"}), target), target.layers[-1]
    drafter.initialize(target, windows_of([[20]] * 8))
    assert all(torch.equal(weight, last.state_dict()[name]) for name, weight in drafter.layer.state_dict().items())
    assert torch.equal(drafter.norm.weight, target.norm.weight)
    assert torch.equal(drafter.head_weight, target.lm_head.weight)


@pytest.mark.parametrize("layers", ["gemma3", "mixtral", "opt", "phi4"])
def test_drafters_learn_with_any_familys_target(layers):
    """Steps on the same windows, from the target's layers: what these have of Llama's is copied; experts or an MLP
    without a gate leave the drafter's own."""
    target = tiny_of(layers, hidden_size=HIDDEN)
    for name, settings in (("eagle", {}), ("eagle3", {"target_layers": (0, 1)})):
        drafter = DRAFTERS[name](DRAFTERS[name].configure(target, None, settings), target)
        windows, losses = windows_for(drafter, [[20]] * 4), list[float]()
        drafter.initialize(target, windows)
        if name == "eagle3":
            for copied in ("attention_out", "mlp_norm"):
                assert torch.equal(getattr(drafter.layer, copied).weight, getattr(target.layers[-1], copied).weight)
        trainer = Trainer(target, drafter, Labels.soft, UNROLL, hidden_weight=0.0)
        optimizer = torch.optim.Adam(drafter.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            loss = trainer.loss(windows)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.02, name


@torch.no_grad()
def test_narrower_blocks_start_from_the_largest_parts_of_the_map(target):
    """Blocks as wide as the hidden states hold all of it; the fewer parts fit, the further off new features are."""
    windows, size = windows_of([[20]] * 60), target.config.hidden_size

    def features(exit_dim: int) -> torch.Tensor:
        kind = DRAFTERS["recurrent"]
        drafter = kind(kind.configure(target, settings={"exit_dim": str(exit_dim)}), target)
        drafter.initialize(target, windows)
        return next(iter(drafter.unroll(windows, [15])))

    whole = features(size)
    torch.testing.assert_close(features(2 * size), whole, atol=1e-4, rtol=1e-3)
    off = [(features(some) - whole).square().mean().item() for some in (size - 1, size // 2, 1)]
    assert 0 < off[0] < off[1] < off[2] < whole.square().mean()


@pytest.mark.parametrize("variant", ["hidden_state", "recurrent"])
@torch.no_grad()
def test_acceptance_is_judged_where_the_text_is_greedy(target, variant):
    """Against a plain loop over positions; most of the text is the target's greedy choice, some of it is not."""
    drafter = drafter_of(target, variant, hot=100)
    if drafter.token_info is not None:
        drafter.token_info.norm.weight.mul_(10)
    windows = windows_of([[20], [8, 20], [12], [20]] * 20)
    windows.drafted[3::4] = False
    truth = target.lm_head(windows.hidden).argmax(-1)
    greedy = torch.rand(truth.shape, generator=torch.Generator().manual_seed(3)) < 0.9
    windows.tokens[:, 1:] = torch.where(greedy, truth, windows.tokens)[:, :-1]
    trainer = Trainer(target, drafter, Labels.soft, UNROLL, hidden_weight=0.0)
    # A drafter that is right most of the time (its features are the target's own), but never where it is not judged.
    right = torch.rand(truth.shape, generator=torch.Generator().manual_seed(4)) < 0.8
    right[:, 1:] &= windows.tokens[:, 1:] == truth[:, :-1]
    right[:, :-1] &= windows.documents[:, :-1] == windows.documents[:, 1:]
    right &= (windows.documents != NO_DOCUMENT) & windows.drafted.any(-1, keepdim=True)
    features = torch.where(right[..., None], windows.hidden, -windows.hidden)
    drafter.unroll = lambda part, kept: (  # type: ignore[method-assign]
        _matching(part, windows, features)[part.flat(n, depth + 1).flatten()] for depth, n in enumerate(kept)
    )
    reached, accepted, among, promised = [0] * UNROLL, [0] * UNROLL, 0, 0.0
    row_of = {int(token): row for row, token in enumerate(drafter.hot_ids)}
    for w in range(len(windows)):
        for t in windows.positions[w].tolist():
            for depth in range(UNROLL if windows.drafted[w].any() else 0):
                there = t + depth + 1
                if not windows.documents[w, t] == windows.documents[w, there + 1] != NO_DOCUMENT:
                    break
                if depth and windows.tokens[w, there] != truth[w, there - 1]:
                    break
                logits = F.linear(features[w, there].bfloat16(), drafter.head_rows.bfloat16())
                if drafter.token_info is not None:
                    logits[:37] += drafter.token_info(windows.tokens[w, there]).bfloat16()
                reached[depth] += 1
                chances, rows = logits.float().softmax(-1).topk(SIBLINGS)
                promised += float(chances.sum())
                among += row_of.get(int(truth[w, there])) in rows.tolist()
                if int(logits.argmax()) != row_of.get(int(truth[w, there])):
                    break
                accepted[depth] += 1
    expected = [a / max(r, 1) for a, r in zip(accepted, reached, strict=True)]
    assert reached[2] > 20
    judged = trainer.evaluate([windows])
    assert judged["conditional_acceptance"] == pytest.approx(expected, abs=0.03)
    assert judged["acceptance_ratio"] == pytest.approx(among / promised, rel=0.03)


def _matching(part: Windows, whole: Windows, features: Tensor) -> Tensor:
    """The features [W * S, H] of those windows that `part` holds."""
    first = next(i for i in range(len(whole)) if torch.equal(whole.tokens[i], part.tokens[0]))
    return features[first : first + len(part)].flatten(0, 1)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_ids_that_are_no_tokens_are_refused(target, tmp_path, wrong):
    drafter = drafter_of(target, "recurrent")
    drafter.hot_ids[3] = wrong
    drafter.save(tmp_path)
    with pytest.raises(ValueError, match=f"hot_ids holds {wrong}, expected ids from 0 to {VOCAB - 1}"):
        load_drafter(tmp_path, target)
