"""The target against transformers: fp32 logits within 1e-4, equal last hidden states, cached or not."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from redraft.model_defs.export.programs import TorchTarget
from redraft.model_defs.export.target import CacheShape, empty_caches
from redraft.model_defs.target.attention import DenseCache, causal_attend
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import GGUF
from tests.engines.tiny import Rows, chain, expected, make_batch, random_tree, tiny_of
from tests.model_defs.target.references import FAMILIES, ORIGINAL, SHAPE, VOCAB, write_reference


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    """A random transformers model, and our target loaded from its saved folder."""
    folder = tmp_path_factory.mktemp("tiny")
    reference = write_reference(request.param, folder)
    return reference, Target.from_folder(folder), folder


@torch.no_grad()
def assert_parity(reference, target, input_ids):
    want = reference(input_ids, output_hidden_states=True)
    hidden = target(input_ids, causal_attend(target.config, input_ids.shape[1])).hidden
    for found, reference in ((target.lm_head(hidden), want.logits), (hidden, want.hidden_states[-1])):
        torch.testing.assert_close(found, reference, atol=1e-4 * float(reference.abs().max()), rtol=0)


@pytest.mark.parametrize("length", [9, ORIGINAL, 150])
def test_tiny_parity(tiny, length):
    reference, target, _ = tiny
    assert_parity(reference, target, torch.randint(0, VOCAB, (3, length)))


@torch.no_grad()
def test_cache_in_ragged_chunks_equals_whole_sequences(tiny):
    _, target, _ = tiny
    input_ids = torch.randint(0, VOCAB, (2, 40))
    whole = target(input_ids, causal_attend(target.config, 40)).hidden
    cache = DenseCache(target.config, 2, 40, whole)
    first = target(input_ids[:, :20], cache.attend).hidden
    torch.testing.assert_close(first, whole[:, :20], atol=1e-4, rtol=1e-5)
    cache.starts += torch.tensor([20, 7])
    staggered = torch.stack([input_ids[0, 20:30], input_ids[1, 7:17]])
    out = target(staggered, cache.attend, positions=cache.positions(10)).hidden
    torch.testing.assert_close(out, torch.stack([whole[0, 20:30], whole[1, 7:17]]), atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_trees_and_commits_agree_with_the_module(tiny):
    """Of contexts that end before, at and beyond a window's edge, which falls into the context, the tree or both; then
    trees after a committed path. Layers with a window have rings, which end in the last one's trees."""
    target, rng = tiny[1], np.random.default_rng(4)
    cache = CacheShape(3, ORIGINAL, 12, window_rows=40)
    caches = [[torch.zeros_like(one) for one in empty_caches(target, cache, 3, torch.float32)] for _ in "kv"]
    program = TorchTarget(target, cache, features_output=False)

    def run(rows: list[Rows]) -> torch.Tensor:
        batch = make_batch(rows)
        names = ("positions", "row_offsets", "slots", "cache_lengths", "tree_mask", "commit_src", "commit_offsets")
        places = [torch.from_numpy(getattr(batch, name)) for name in names]
        (logits,) = program(torch.from_numpy(batch.input_ids), places, torch.from_numpy(batch.logit_rows), *caches)
        return logits

    contexts = [rng.integers(0, VOCAB, length).tolist() for length in (5, 12, 31)]
    run([chain(slot, [], context, causal=True) for slot, context in enumerate(contexts)])
    trees = [random_tree(rng, slot, context, 12) for slot, context in enumerate(contexts)]
    following = []
    for tree in trees:
        path = tree.ancestors(11)[::-1]
        accepted = tree.context + [tree.tokens[row] for row in path]
        following.append(dataclasses.replace(random_tree(rng, tree.slot, accepted, 7), commit=path))
    for step in (trees, following):
        want = torch.from_numpy(expected(target, step)[0])
        torch.testing.assert_close(run(step), want, atol=1e-4 * float(want.abs().max()), rtol=0)


def assert_dtypes(target: Target, expected: set[torch.dtype]) -> None:
    assert {weight.dtype for weight in target.parameters()} == expected
    assert (target.lm_head.weight is target.embedding.weight) == target.config.tie_embeddings


def test_learned_positions_end_with_the_context():
    """Nodes of a draft may stand beyond it; they are never kept."""
    target = tiny_of("opt", max_position=9)
    ids = torch.tensor([3, 4, 5])
    found = target.embed(ids, torch.tensor([7, 8, 12], dtype=torch.int32))
    assert torch.equal(found, target.embedding(ids) + target.positions.weight[[7, 8, 8]])


@pytest.mark.parametrize("tiny", ["smollm2", "phi4", "qwen3 moe", "opt"], indirect=True)
def test_weights_are_loaded_in_the_dtype_asked_for_or_as_stored(tiny, tmp_path):
    _, target, folder = tiny
    assert_dtypes(target, {torch.float32})
    half = Target.from_folder(folder, torch.bfloat16)
    assert_dtypes(half, {torch.bfloat16})
    for name, weight in target.state_dict().items():
        assert torch.equal(half.state_dict()[name], weight.bfloat16()), name
    stored = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    names = sorted(stored)
    save_file({name: stored[name] for name in names[::2]}, tmp_path / "model-1.safetensors")
    save_file({name: stored[name] for name in names[1::2]}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    as_stored = Target.from_folder(tmp_path, None)
    assert_dtypes(as_stored, {torch.bfloat16})
    assert target_fingerprint(as_stored) == target_fingerprint(target) == target_fingerprint(half)
    for name, weight in half.state_dict().items():
        assert torch.equal(as_stored.state_dict()[name], weight), name


@pytest.mark.parametrize("tiny", ["gemma3"], indirect=True)
def test_norms_of_1_and_more_are_not_rounded_as_stored(tiny, tmp_path):
    """Of w in bfloat16, 1 + w takes more digits."""
    _, _, folder = tiny
    stored = load_file(folder / "model.safetensors")
    save_file({name: (weight + 0.0101).bfloat16() for name, weight in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    as_stored, whole = Target.from_folder(tmp_path, None).float(), Target.from_folder(tmp_path)
    for name, weight in whole.state_dict().items():
        assert torch.equal(as_stored.state_dict()[name], weight), name


@pytest.mark.parametrize("tiny", ["gemma3"], indirect=True)
def test_norms_of_1_and_more_stay_in_float32_in_a_target_of_16_bits(tiny, tmp_path):
    """As transformers computes them. In bfloat16 1 + w is off by up to 2^-8."""
    reference, _, folder = tiny
    stored = {name: (w + 0.0101).bfloat16() for name, w in load_file(folder / "model.safetensors").items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    kept, rounded = Target.from_folder(tmp_path, None).in_dtype(torch.bfloat16), Target.from_folder(tmp_path).bfloat16()
    theirs = reference.model.layers[0].input_layernorm.bfloat16()
    theirs.weight.data = stored["model.layers.0.input_layernorm.weight"]
    x = torch.randn(500, SHAPE["hidden_size"]).bfloat16()
    shares = []
    for target in (kept, rounded):
        found, want = target.layers[0].attention_norm(x), theirs(x)
        assert found.dtype == torch.bfloat16
        shares.append(float((found == want).float().mean()))
    assert shares[0] > 0.999
    assert shares[1] < 0.9
    ids, whole = torch.randint(0, VOCAB, (2, 30)), Target.from_folder(tmp_path)
    want = whole(ids, causal_attend(whole.config, 30)).hidden
    errors = [
        float((target(ids, causal_attend(target.config, 30)).hidden.float() - want).square().mean().sqrt())
        for target in (kept, rounded)
    ]
    assert errors[0] < errors[1]
    assert {name: w.dtype for name, w in kept.state_dict().items() if w.dtype != torch.bfloat16} == {
        name: torch.float32 for name in kept.state_dict() if name.endswith("norm.weight")
    }


@pytest.mark.parametrize("tiny", ["granite"], indirect=True)
def test_matrices_with_multipliers_are_rounded_once(tiny, tmp_path):
    _, _, folder = tiny
    stored = load_file(folder / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    as_stored, whole = Target.from_folder(tmp_path, None), Target.from_folder(tmp_path)
    assert_dtypes(as_stored, {torch.bfloat16})
    for name, weight in whole.state_dict().items():
        assert torch.equal(as_stored.state_dict()[name], weight.bfloat16()), name


class Allocated(TorchDispatchMode):
    """Follows the bytes of all tensors that operations made and that are still there."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        seen = {arg.untyped_storage().data_ptr() for arg in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(arg)}
        if torch.is_tensor(out) and out.device.type == "cpu" and out.untyped_storage().data_ptr() not in seen:
            storage = out.untyped_storage()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.free, storage.nbytes())
        return out

    def free(self, count: int) -> None:
        self.now -= count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loading_takes_the_targets_memory_and_no_more(tmp_path, dtype):
    """The largest weight's beside it, as stored: one weight at a time is concatenated and converted."""
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 12})
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    with Allocated() as allocated:
        target = Target.from_folder(tmp_path, dtype)
    whole = sum(weight.nbytes for weight in target.parameters())
    largest = max(weight.numel() for weight in target.parameters())
    assert whole <= allocated.most <= whole + 2 * largest


@pytest.mark.parametrize("tiny", ["llama 3", "qwen3"], indirect=True)
def test_names_missing_and_misshaped_weights(tiny, tmp_path):
    folder = tiny[2]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file"):
        Target.from_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    bad = weights | {"model.norm.weight": torch.ones(5)}
    save_file(bad, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm.weight has shape \(5,\), expected \(48,\)"):
        Target.from_folder(tmp_path)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.down_proj.weight' is missing"):
        Target.from_folder(tmp_path)


def test_smollm2_parity(smollm2):
    reference = AutoModelForCausalLM.from_pretrained(smollm2, gguf_file=GGUF, dtype=torch.float32).eval()
    assert_parity(reference, Target.from_folder(smollm2), torch.randint(0, 49152, (2, 100)))
