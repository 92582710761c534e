"""From prompts to a drafter on a tiny random target: files, resuming, and a drafter that learns."""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from model_defs.attention import causal_attend
from model_defs.config import RopeConfig, TargetConfig
from model_defs.eagle import EagleDrafter
from model_defs.hidden_state import HiddenStateDrafter
from model_defs.target import Target
from tests.engines.tiny import LIMITS, tiny_bundle, tiny_target

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build"))

import distill  # noqa: E402
import train_drafter  # noqa: E402
from forward import EngineForward, TorchForward  # noqa: E402

VOCAB, END = 111, 2
LETTERS = SimpleNamespace(
    apply_chat_template=lambda messages, **_: f"<{messages[0]['content']}>",
    encode=lambda text, **_: [ord(character) for character in text],
)
"""A tokenizer: every character is one."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = TargetConfig(VOCAB, 32, 48, 2, 4, 2, 8, 1e-5, RopeConfig(), 256, False, False, (END,))
    target = Target(config).eval().requires_grad_(False)
    target.embedding.weight.mul_(3)
    return target


def generate(
    target: Target, count: int, prompts: list[list[int]], slots: int = 3, prefix: tuple[int, ...] = (7, 8, 9)
) -> list[distill.Document]:
    docs = (
        distill.Document(distill.deque(prompt), 0.0, answer_start=len(prefix) + len(prompt))
        for prompt in itertools.cycle(prompts)
    )
    stream = distill.Generator(TorchForward(target, slots, 64), {END}, list(prefix), seed=0).run(docs, 20, [END, 5])
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_an_engine_gives_what_the_module_gives(tmp_path, backend):
    """Wherever it keeps hidden states: in arrays, or in tensors."""
    module = tiny_target()
    bundle = tiny_bundle(tmp_path, module, backend, limits=LIMITS.model_copy(update={"slots": 3}))
    engine, through_module = EngineForward(bundle.path, 1), TorchForward(module, 3, LIMITS.max_len)
    for tokens, lengths, wanted in (([[7, 8, 9]] * 3, [0, 0, 0], []), ([[4], [5], [6]], [3, 2, 3], [0, 2])):
        (hidden, logits), (states, expected) = (
            forward(tokens, lengths, wanted) for forward in (engine, through_module)
        )
        torch.testing.assert_close(hidden, states, atol=0.02, rtol=0.02)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_more_tokens_than_the_disk_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64_000_000_000))
    distill.require_space(tmp_path, 60_000_000, 5_000_000, 1156)
    with pytest.raises(
        typer.BadParameter,
        match=r"--tokens 90000000 take 104\.0 GB, .* has 64\.0 GB free: at most --tokens 60363321 fit",
    ):
        distill.require_space(tmp_path, 90_000_000, 5_000_000, 1156)


@torch.no_grad()
@pytest.mark.parametrize("prefix", [(7, 8, 9), ()])
def test_batched_generation_equals_the_target_alone(target, prefix):
    """Slots that start and end at different times leave no trace in each other's cache."""
    for doc in generate(target, 12, [[11, 12, 13, 14], [21], [31, 32]], prefix=prefix):
        ids = torch.tensor([doc.tokens])
        hidden = target(ids, causal_attend(target.config, len(doc.tokens)))[0]
        greedy = target.lm_head(hidden).argmax(-1)
        assert doc.tokens[doc.answer_start :] == greedy[doc.answer_start - 1 : -1].tolist()
        stored = torch.stack(doc.hidden)[:-1].float()
        torch.testing.assert_close(stored, hidden[:-1], atol=0.05, rtol=0.02)
        assert len(doc.hidden) == len(doc.tokens)


@torch.no_grad()
def test_a_prompt_of_the_targets_own_ends_where_it_repeats_itself(target):
    """And is answered: what the user says is no answer, however short answers are."""
    docs = iter(lambda: distill.Document(distill.deque([11]), 0.0, writes_prompt=True), None)
    generator = distill.Generator(TorchForward(target, 3, 160), {END}, [7, 8, 9], seed=0)
    for doc in itertools.islice(generator.run(docs, 4, [END, 5]), 9):
        turn = doc.answer_start - 2
        assert doc.tokens[turn : doc.answer_start] == [END, 5]
        assert 4 < turn - 4 < distill.MAX_USER_TOKENS
        assert len(doc.tokens) - doc.answer_start <= 4


@torch.no_grad()  # which ends with the test, unlike the command's own
def test_an_engine_too_short_for_prompts_and_answers_is_refused(target, tmp_path, monkeypatch):
    write_model(target, tmp_path)
    monkeypatch.setattr(distill, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: LETTERS))
    monkeypatch.setattr(distill, "EngineForward", lambda *_: SimpleNamespace(length=118))
    row = {"source": "own", "prompt": "word"}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row | {"prompt": str(i)}) + "\n" for i in range(9)))
    where = {"model": tmp_path, "prompts": tmp_path / "prompts.jsonl", "output": tmp_path / "data"}
    with pytest.raises(typer.BadParameter, match=r"takes 118 tokens, and a prompt of up to 116 .* more than 118"):
        distill.main(**where, bundle=tmp_path, shares="own=1", tokens=100, max_new_tokens=20)


def test_a_chat_template_of_the_users_text_alone_is_refused():
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda messages, **_: messages[0]["content"] + "!",
        encode=lambda text, **_: [ord(character) for character in text],
    )
    with pytest.raises(
        typer.BadParameter, match="has '' before the user's text and '!' behind it, 0 and 1 tokens: exp"
    ):
        distill.Template.of(tokenizer)


def test_drawn_tokens_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    drawn = distill.draw(logits, torch.full((20_000,), 0.7), torch.Generator().manual_seed(0))
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    assert (torch.bincount(drawn, minlength=4) / 20_000 - expected).abs().max() < 0.015


def write_model(target: Target, folder: Path) -> None:
    c = target.config
    weights = {"model.embed_tokens.weight": target.embedding.weight, "model.norm.weight": target.norm.weight}
    weights["lm_head.weight"] = target.lm_head.weight
    for i, layer in enumerate(target.layers):
        q, k, v = layer.qkv.weight.split([32, 16, 16])
        gate, up = layer.gate_up.weight.chunk(2)
        names = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_out.weight, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight, "input_layernorm": layer.attention_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
        }  # fmt: skip
        weights |= {f"model.layers.{i}.{name}.weight": w for name, w in names.items()}
    save_file({name: w.detach().contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": c.max_position, "tie_word_embeddings": False,
        "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def taught(target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and, in `data`, three shards of its answers."""
    folder = tmp_path_factory.mktemp("taught")
    write_model(target, folder)
    (folder / "data").mkdir()
    for shard in range(3):
        docs = generate(target, 24, [[token] for token in range(10 + shard, 100, 3)])
        distill.write_shard(folder / f"data/shard-{shard:05d}.safetensors", docs, {})
    return folder


SHAPES: dict[str, dict] = {
    "recurrent": {"settings": ["exit_dim=32", "num_blocks=1"], "window": 8},
    "hidden_state": {"settings": ["info_vocabulary=40", "info_rank=8"], "window": 24},
    "eagle": {"window": 24},
    "medusa": {"settings": ["heads=3"], "window": 8},
    "draft_lm": {"window": 24},
}


def train(taught: Path, output: Path, drafter: str, positions: int, **more) -> list[dict]:
    where = {"model": taught, "data": [taught / "data"], "output": output, "drafter": drafter}
    run = {
        "hot_vocabulary": 64,
        "unroll": 3,
        "batch": 4,
        "positions": positions,
        "held_out": 1,
        "every": 25,
        "threads": 1,
    }
    train_drafter.main(**where | run | SHAPES[drafter] | more)
    return [json.loads(line) for line in (output / "log.jsonl").open()]


def test_a_gpu_carries_the_32k_most_frequent_of_more_than_40k_tokens():
    sizes = (49_152, 40_001, 40_000, 111)
    assert [train_drafter.usual_rows(size, "cuda") for size in sizes] == [32768, 32768, 40_000, 111]
    assert [train_drafter.usual_rows(size, "cpu") for size in sizes] == [12288, 12288, 12288, 111]
    settings = partial(train_drafter.settings_of, HiddenStateDrafter, vocab_size=49_152)
    assert settings(["info_rank=8"], device="cuda") == {"info_vocabulary": "32768", "info_rank": "8"}
    assert settings(["info_vocabulary=9"], device="cuda") == {"info_vocabulary": "9"}
    assert settings([], device="cpu") == train_drafter.settings_of(EagleDrafter, [], 49_152, "cuda") == {}


@pytest.mark.parametrize("drafter", SHAPES)
def test_training_learns(taught: Path, tmp_path: Path, drafter: str, monkeypatch):
    """Random models answer in short cycles, which a drafter learns fast, from random weights too."""
    monkeypatch.setattr(train_drafter.DRAFTERS[drafter], "initialize", lambda *_: None)
    log = train(taught, tmp_path, drafter, 6400, peak_rate=3e-3)
    assert log[-1]["positions"] >= 6400 > log[-1]["positions"] - 4 * 24
    assert log[-1]["loss"] < log[0]["loss"] - 0.01
    assert log[-1]["chain_acceptance_length"] > 1.5
    with safe_open(tmp_path / "drafter.safetensors", framework="pt") as file:
        assert file.get_tensor("hot_ids").shape == (64,)
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.int32, torch.bfloat16}  # noqa: SIM118


@pytest.mark.parametrize("drafter", ["recurrent", "hidden_state"])
def test_a_run_that_was_stopped_goes_on_identically(taught: Path, tmp_path: Path, drafter: str, monkeypatch):
    """Stopped at a checkpoint and started again: the same batches, rates and weights as a run in one piece."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    log = train(taught, whole, drafter, 2400)
    save = train_drafter.save_checkpoint

    def save_and_stop(*arguments) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(train_drafter, "save_checkpoint", save_and_stop)
        with pytest.raises(SystemExit):
            train(taught, parts, drafter, 2400)
    timing = {"hours", "rate", "minutes_left"}
    for again, expected in zip(train(taught, parts, drafter, 2400), log[1:], strict=True):
        assert {key: again[key] for key in again.keys() - timing} == {
            key: expected[key] for key in again.keys() - timing
        }
    assert (parts / "drafter.safetensors").read_bytes() == (whole / "drafter.safetensors").read_bytes()


def test_a_run_goes_on_from_another_drafter(taught: Path, tmp_path: Path):
    """Its shape is kept, its weights are the start; another kind is refused."""
    log = train(taught, tmp_path / "first", "eagle", 2400)
    more = train(taught, tmp_path / "second", "eagle", 200, start_from=tmp_path / "first", peak_rate=1e-9)
    assert more[0]["chain_acceptance_length"] == pytest.approx(log[-1]["chain_acceptance_length"], abs=0.02)
    with pytest.raises(typer.BadParameter, match="holds a drafter 'eagle', the command trains one 'medusa'"):
        train(taught, tmp_path / "third", "medusa", 200, start_from=tmp_path / "first")


def test_unfit_commands_are_refused(taught: Path, tmp_path: Path):
    train(taught, tmp_path, "hidden_state", 100)
    with pytest.raises(typer.BadParameter, match=r"run with labels soft, batch 4, the command asks for labels hard, b"):
        train(taught, tmp_path, "hidden_state", 200, labels="hard", batch=8)
    with pytest.raises(typer.BadParameter, match=r"info_rank=8.*asks for.*info_rank=4"):
        train(taught, tmp_path, "hidden_state", 200, settings=["info_vocabulary=40", "info_rank=4"])
    with pytest.raises(typer.BadParameter, match="'info_rank' is not of the form name=value"):
        train(taught, tmp_path / "new", "hidden_state", 200, settings=["info_rank"])
    with pytest.raises(typer.BadParameter, match=r"no shard-\*.safetensors in"):
        train(taught, tmp_path / "new", "eagle", 200, data=[tmp_path])
    with pytest.raises(typer.BadParameter, match="holds only the 3 held-out shards"):
        train(taught, tmp_path / "new", "eagle", 200, held_out=3)
    with pytest.raises(typer.BadParameter, match="windows of 24 positions, fewer than a batch of 500"):
        train(taught, tmp_path / "new", "eagle", 200, batch=500)
    with pytest.raises(typer.BadParameter, match="4 drafting steps need as many heads, this drafter has 3"):
        train(taught, tmp_path / "new", "medusa", 200, unroll=4)
    with pytest.raises(typer.BadParameter, match="json does not exist"):
        train(taught, tmp_path / "new", "eagle", 200, start_from=tmp_path / "nowhere")
    with pytest.raises(typer.BadParameter, match="json does not exist"):
        train(tmp_path / "nowhere", tmp_path / "new", "eagle", 200, data=[taught / "data"])
    assert not (tmp_path / "new").exists()


@torch.no_grad()  # which ends with the test, unlike the command's own
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "nowhere"}, "config.json does not exist"),
        ({"bundle": "nowhere"}, "nowhere does not exist; build one with"),
        ({"prompts": "nowhere.jsonl"}, "No such file.*nowhere.jsonl"),
        ({"prompts": "nameless.jsonl"}, "nameless.jsonl, line 2: .*\\n.*prompt\\n.*[Rr]equired"),
        ({"prompts": "prose.jsonl"}, "prose.jsonl, line 1: .*\\n.*Invalid JSON"),
        ({"source": distill.Source.prefill}, "needs a `response`, the prompt .* has none"),
    ],
)
def test_input_that_is_not_there_is_refused(target, tmp_path, monkeypatch, given, message):
    """In one line, before a folder is made for the output or a shard is written."""
    write_model(target, tmp_path)
    monkeypatch.setattr(distill, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: LETTERS))
    rows = [json.dumps({"source": "own", "prompt": str(i)}) + "\n" for i in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    (tmp_path / "nameless.jsonl").write_text(rows[0] + '{"source": "own"}\n')
    (tmp_path / "prose.jsonl").write_text("Once upon a time")
    paths = {key: value if key == "source" else tmp_path / value for key, value in given.items()}
    where = {"model": tmp_path, "prompts": tmp_path / "prompts.jsonl", "output": tmp_path / "data"}
    with pytest.raises(typer.BadParameter, match=message):
        distill.main(**(where | paths), shares="own=1", tokens=100)
    assert not list((tmp_path / "data").glob("*")) if "source" in given else not (tmp_path / "data").exists()


def test_a_chain_of_one_step_is_trained(taught: Path, tmp_path: Path):
    assert train(taught, tmp_path, "hidden_state", 100, unroll=1)[-1]["loss"] > 0


def test_the_command_line(taught: Path, tmp_path: Path):
    app = typer.Typer()
    app.command()(train_drafter.main)
    base = ["--model", taught, "--data", taught / "data", "--output", tmp_path, "--positions", 50, "--threads", 1]
    shape = ["--set", "heads=3", "--set", "num_blocks=2", "--unroll", 3, "--hot-vocabulary", 0, "--batch", 2]
    arguments = [str(part) for part in (*base, *shape, "--held-out", 1)]
    done = CliRunner().invoke(app, [*arguments, "--drafter", "medusa"])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["drafter"], config["heads"], config["num_blocks"]) == ("medusa", 3, 2)
    assert config["hot_vocabulary"] == VOCAB
    done = CliRunner().invoke(app, [*arguments, "--drafter", "oracle"])
    assert done.exit_code == 2
    assert "known are" in done.output
