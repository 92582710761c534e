"""A target split over ranks gives what the whole one gives."""

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.shards import Shard, plan_shards, ranges, rank_join, shard_target, shards_of
from redraft.plugins.operators.all_reduce.reference import all_reduce
from tests.engines.tiny import LAYERS, random_model, tiny_lm, tiny_of, tiny_target
from tests.model_defs.weights.folders import EXPERT_TYPES, EXPERTS, MIXED, write_folder
from tests.model_defs.weights.test_blocks import whole
from tests.model_defs.weights.test_checkpoint import FORMATS
from tests.model_defs.weights.test_checkpoint import write_folder as write_checkpoint

SMOLLM2 = dataclasses.replace(
    tiny_target().config,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
)


SPLIT = LAYERS.keys() - {"qwen3", "mistral", "smollm3"}
"""Families whose layers are divided in another way than Llama's."""


def sharded_weights(target: Target) -> int:
    """Weights of the matrices that ranks share out, biases left out."""
    split = ("qkv", "attention_out", "gate_up", "up", "down", "lm_head")
    names = ((name.removesuffix(".weight").split(".")[-1], weight) for name, weight in target.state_dict().items())
    return sum(weight.numel() for name, weight in names if name in split)


def uneven_target() -> Target:
    """Three KV groups of two heads, with biases, and an odd number of MLP columns."""
    changes = {"num_heads": 6, "num_kv_heads": 3, "intermediate_size": 201}
    return random_model(dataclasses.replace(tiny_target().config, **changes))


def run_ranks(target: Target, ranks: int, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states of every rank, and the logits of all, computed by a thread for each."""
    plan = plan_shards(target.config, ranks)
    parts = [torch.empty(0)] * ranks
    barrier = threading.Barrier(ranks, timeout=20)
    hidden, logits = [torch.empty(0)] * ranks, [torch.empty(0)] * ranks

    def run(rank: int, shard: Shard) -> None:
        def reduce(part: torch.Tensor) -> torch.Tensor:
            parts[rank] = part
            barrier.wait()
            total = all_reduce(torch.stack(parts))
            barrier.wait()
            return total

        own = shard_target(target, shard)
        with torch.inference_mode():
            attend = causal_attend(own.config, ids.shape[-1])
            hidden[rank] = own(ids, attend, rank_join(rank, reduce)).hidden
            logits[rank] = own.lm_head(hidden[rank])

    threads = [threading.Thread(target=run, args=job) for job in enumerate(plan)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return hidden, torch.cat(logits, dim=-1)


@pytest.mark.parametrize(
    ("target", "ranks"),
    [(uneven_target(), 2), (uneven_target(), 3), (tiny_lm(), 2), *((tiny_of(layers), 2) for layers in SPLIT)],
)
def test_the_shards_together_are_the_target(target, ranks):
    ids = torch.randint(0, target.config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(2))
    hidden, logits = run_ranks(target, ranks, ids)
    with torch.inference_mode():
        expected = target(ids, causal_attend(target.config, 17)).hidden
        torch.testing.assert_close(hidden[0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, target.lm_head(expected), rtol=1e-4, atol=1e-3)
    for other in hidden[1:]:
        assert torch.equal(other, hidden[0])


def test_a_residual_that_every_rank_adds_is_seen(monkeypatch):
    join = rank_join
    monkeypatch.setitem(globals(), "rank_join", lambda rank, reduce: join(0, reduce))
    with pytest.raises(AssertionError, match="not close"):
        test_the_shards_together_are_the_target(uneven_target(), 2)


def test_smollm2_on_two_ranks():
    plan = plan_shards(SMOLLM2, 2)
    assert [len(shard.kv_heads) for shard in plan] == [2, 1]
    with torch.device("meta"):
        whole = Target(SMOLLM2)
    parts = [sharded_weights(shard_target(whole, shard)) for shard in plan]
    assert sum(parts) == sharded_weights(whole)
    assert max(parts) <= 0.51 * sum(parts), "the MLP's columns balance the uneven KV groups"
    assert all(shard.mlp_columns.start % 32 == 0 for shard in plan)


def test_more_ranks_than_kv_groups():
    with pytest.raises(ValueError, match=r"4 tensor-parallel ranks: expected 1 to 3"):
        plan_shards(SMOLLM2, 4)


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [
        ([1.0, 1.0], 111, [range(64), range(64, 111)]),
        ([1.0, 1.0, 1.0], 5, [range(2), range(2, 3), range(3, 5)]),
        ([100.0, 1.0], 3, [range(2), range(2, 3)]),
    ],
)
def test_ranges(shares, total, expected):
    assert list(ranges(shares, total, 32)) == expected


def in_blocks(folder: Path) -> tuple[Target, Target]:
    """A folder's target in floats, and in blocks."""
    return Target.from_folder(folder), Target.from_folder(folder, in_blocks=True, float_ends=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [{}, EXPERTS])
def test_the_shards_of_blocks_are_those_of_their_numbers(tmp_path, tied, layers):
    """Rows of several forms, and features of one span or of several; what stands for them has no storage."""
    types = EXPERT_TYPES if layers else MIXED
    exact, stored = in_blocks(write_folder(tmp_path, types, num_key_value_heads=2, tie_word_embeddings=tied, **layers))
    for shard in shards_of(stored, 2):
        part, floats = shard_target(stored, shard), shard_target(exact, shard)
        assert part.blocks is not None
        assert {name for name, weight in part.named_parameters() if name in part.blocks} == part.blocks.unread
        assert ("lm_head.weight" in part.blocks.unread) == ("lm_head.weight" in stored.blocks)
        for name, weight in floats.named_parameters():
            own = part.get_parameter(name)
            assert own.shape == weight.shape, name
            if name in part.blocks:
                assert own.untyped_storage().nbytes() == 4
                np.testing.assert_array_equal(whole(part.blocks, name), weight.numpy(), err_msg=name)
            else:
                assert torch.equal(own, weight), name
    assert stored.blocks.unread, "those of the whole target"


@pytest.mark.parametrize("name", ["gptq", "packed", "int8"])
def test_the_shards_of_other_formats(tmp_path, name):
    """With groups of 64 and of 32 features, and one for each row, which is cut within it."""
    settings, write, _ = FORMATS[name]
    write_checkpoint(tmp_path, settings, write, num_heads=6, num_kv_heads=3)
    exact, stored = in_blocks(tmp_path)
    for shard in shards_of(stored, 2):
        part, floats = shard_target(stored, shard), shard_target(exact, shard)
        for weight in ("layers.0.qkv.weight", "layers.1.attention_out.weight", "layers.1.down.weight"):
            np.testing.assert_array_equal(whole(part.blocks, weight), floats.get_parameter(weight).numpy())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("act-order", r"the features of model\.layers\.0\..* lie in an order of their own \(act-order\)"),
        ("awq", r"o_proj\.weight is stored in groups of 96 features, and a part of it would have those from 0 to 127"),
    ],
)
def test_features_that_cannot_be_split_are_named(tmp_path, name, reason):
    settings, write, _ = FORMATS[name]
    write_checkpoint(tmp_path, settings, write, 192, num_heads=6, num_kv_heads=3)
    stored = in_blocks(tmp_path)[1]
    with pytest.raises(ValueError, match=reason + ": choose other ranks than 2, or another precision than source"):
        shards_of(stored, 2)
    assert len(shards_of(stored, 1)) == 1
