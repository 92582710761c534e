"""Teacher data as windows, the head's loss, the judgement on held-out text, the learning rate."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from redraft.model_defs.drafters.base import Decay
from redraft.training.distillation import HeadLoss, learning_rate, sample_head
from redraft.training.teacher_data import TeacherData, most_frequent

HIDDEN, UNROLL = 5, 3


@pytest.mark.parametrize(("with_info", "trained_head"), [(False, False), (True, False), (False, True), (True, True)])
def test_head_loss_is_the_cross_entropy_and_its_gradient(with_info: bool, trained_head: bool):
    torch.manual_seed(0)
    x, weight = torch.randn(300, 16, requires_grad=True), (0.3 * torch.randn(50, 16)).requires_grad_(trained_head)
    rows, mass = torch.rand(300, 50).argsort(-1)[:, :3], torch.rand(300, 3)
    z = torch.randn(300, 4, requires_grad=True) if with_info else None
    up = torch.randn(31, 4, requires_grad=True) if with_info else None
    loss = HeadLoss.apply(x, weight, rows, mass, z, up)
    (loss * 2).backward()
    leaves = [leaf for leaf in (x, weight, z, up) if leaf is not None and leaf.requires_grad]
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    logits = x @ weight.T
    if z is not None:
        logits = logits + F.pad(z @ up.T, (0, 50 - 31))
    expected = -(torch.log_softmax(logits, -1).gather(1, rows) * mass).sum()
    (expected * 2).backward()
    torch.testing.assert_close(loss, expected)
    for gradient, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("size", "others", "multiple"), [(111, 20, 1), (111, 20, 16), (111, 1000, 1), (7, 2, 1), (3, 2, 1), (7, 1, 64)]
)
def test_a_sampled_head_holds_all_labels_and_estimates_the_whole(size: int, others: int, multiple: int):
    torch.manual_seed(0)
    labels = torch.rand(5, size).argsort(-1)[:, :3]
    odds = torch.rand(size) + 0.1
    estimates = []
    for _ in range(400):
        sample, correction, places = sample_head(labels, size, others, multiple)
        assert torch.equal(sample, sample.unique())
        assert torch.equal(sample[places], labels)
        least = len(labels.unique()) + others
        assert len(sample) == min(size, least + -least % multiple)
        estimates.append((odds[sample] * correction.exp()).sum())
    estimate, error = torch.stack(estimates).mean(), torch.stack(estimates).std() / 20
    assert abs(estimate - odds.sum()) <= 4 * error + 1e-4


def write_shard(folder: Path, number: int, lengths: list[int], answers: list[int]) -> None:
    """Documents whose token says where it stands: 100 * document + place; `answers` are the places of answers."""
    folder.mkdir(exist_ok=True)
    tokens = [100 * (i + 10 * number) + t for i, n in enumerate(lengths) for t in range(n)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tensors = {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "hidden": torch.tensor(tokens, dtype=torch.bfloat16)[:, None].expand(-1, HIDDEN).contiguous(),
        "offsets": offsets,
        "answer_starts": offsets[:-1] + torch.tensor(answers),
    }
    save_file(tensors, folder / f"shard-{number:05d}.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        write_shard(tmp_path / "data", number, [30, 7, 22, 41], [9, 0, 20, 8])
    return tmp_path / "data"


def drafted_pairs(windows, depth: int) -> list[tuple[int, int]]:
    """(token that the draft starts at, token that it should predict) of all scored drafts."""
    pairs = []
    for w in range(len(windows)):
        scored = windows.scored(windows.positions.shape[1], depth)[w]
        for t in windows.positions[w][scored].tolist():
            pairs.append((int(windows.tokens[w, t]), int(windows.tokens[w, t + 2 + depth])))
    return pairs


@pytest.mark.parametrize("length", [4, 16, 64])
@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("depth", range(UNROLL))
def test_every_answer_token_is_drafted_once(folder: Path, length: int, prompts: bool, depth: int):
    """From two tokens before the answer on, within one document, whatever the windows."""
    windows = TeacherData([folder], 1, prompts).sample(length, UNROLL, 1)
    expected = [
        (100 * (i + 10) + t, 100 * (i + 10) + t + 2 + depth)
        for i, (n, answer) in enumerate(zip([30, 7, 22, 41], [9, 0, 20, 8], strict=True))
        for t in range(max(answer - 2, 0), n - 2 - depth)
    ]
    assert sorted(drafted_pairs(windows, depth)) == expected
    assert torch.equal(windows.hidden[..., 0].float(), windows.tokens.to(torch.bfloat16).float())


def test_prompts_are_in_the_windows_of_drafters_with_context(folder: Path):
    with_prompts, without = (
        set(TeacherData([folder], 1, prompts).sample(16, UNROLL, 1).tokens.flatten().tolist())
        for prompts in (True, False)
    )
    prompt = set(range(1000, 1007))
    assert prompt <= with_prompts
    assert not prompt & without


def test_batches_go_through_all_positions_and_resume(folder: Path):
    data = TeacherData([folder], 1, True)
    epoch = 2 * -(-100 // 16) // 3
    batches = list(islice(data.batches(3, 16, UNROLL, seed=5), 2 * epoch + 3))
    pairs = [pair for windows in batches[:epoch] for pair in drafted_pairs(windows, 0)]
    assert len(pairs) == len(set(pairs)) > 0.7 * 2 * (21 + 5 + 4 + 35)
    for skip in (1, epoch, 2 * epoch + 1):
        again = next(data.batches(3, 16, UNROLL, seed=5, skip=skip))
        for name in ("tokens", "hidden", "documents", "positions", "drafted"):
            assert torch.equal(getattr(again, name), getattr(batches[skip], name)), (skip, name)


def test_drafted_positions_come_in_random_order_before_the_filling(folder: Path):
    windows = next(TeacherData([folder], 1, True).batches(6, 16, UNROLL, seed=0))
    assert (windows.drafted.int().diff(dim=1) <= 0).all()
    assert windows.drafted[:, 0].all()
    assert windows.positions.shape[1] == 16
    assert any((row[mask].diff() < 0).any() for row, mask in zip(windows.positions, windows.drafted, strict=True))


def test_most_frequent_tokens_come_first(folder: Path):
    assert most_frequent(torch.tensor([3, 9, 0, 9, 4]), 4).tolist() == [1, 3, 4, 0]
    counts = TeacherData([folder], 1, True).count_tokens(4000)
    assert counts.sum() == 2 * (21 + 7 + 2 + 33)
    assert counts[1009] == 1
    assert counts[1008] == counts[9] == 0


def test_learning_rate_rises_then_falls_to_zero():
    for decay, half in ((Decay.cosine, 0.5), (Decay.linear, 0.5)):
        assert learning_rate(0.01, 2.0, decay) == pytest.approx(1.0)
        assert learning_rate(0.02, 2.0, decay) == pytest.approx(2.0)
        assert learning_rate(0.51, 2.0, decay) == pytest.approx(2.0 * half)
        assert learning_rate(1.0, 2.0, decay) == 0.0
    assert learning_rate(0.755, 2.0, Decay.linear) == pytest.approx(0.5)
