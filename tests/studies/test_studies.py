"""Every study runs on something tiny, and the parts of its Makefile name what there is.

It would catch a study that a change of the product has broken. `tests/docs/test_site.py` holds the tables and plots.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.command import execute
from redraft.bundle.method import MethodConfig
from redraft.compiler.methods import read_methods
from redraft.llm import LLM, Answer
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.target.attention import DenseCache, HeadNorms, causal_attend
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig
from redraft.prompts import Prompt
from redraft.request import AUTO_REGRESSIVE, SequenceStats, request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from studies import training
from studies.cache import prefix_reuse
from studies.replay import acceptance, answers
from studies.replay.replay import Replayer
from studies.rsd import experiments, figure1
from studies.rsd.shapes import EXPERIMENTS, shapes_of
from studies.speed import beam_packing_throughput, drafting_latency
from tests.conftest import ROOT
from tests.toy_engine import ToyEngine, toy_codec

VOCAB, HIDDEN = 111, 24
PROMPTS = ["hello world", "abcabcabc", "to be or not to be"]


def toy_llm(prefix_reuse: bool = False, width: int = 4, **methods: str) -> LLM:
    """An LLM over the toy engine whose methods have these constructions."""

    class Engine(ToyEngine):
        drafters = property(lambda self: dict.fromkeys(methods, self))

    engine = Engine(slots=3, max_len=400, max_tree=32, width=width, length=3)
    plans = {name: MethodConfig(construction=kind, tree_budget=3 * width) for name, kind in methods.items()}
    limits = Limits(slots=3, max_len=400, max_tree=32, prefill_chunk=64)
    return LLM(
        Runtime(engine, toy_codec(), limits, engine.vocab_size, frozenset({0}), plans, prefix_reuse=prefix_reuse)
    )


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    target = Target(TargetConfig(VOCAB, HIDDEN, 40, 2, 6, 2, 4, 1e-5, RopeConfig(), 64, True, False, (2,)))
    for parameter in target.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return target.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def greedy(target: Target) -> list[answers.Answer]:
    """Greedy answers of 23 and 9 tokens."""
    torch.manual_seed(3)
    result = []
    for prompt, length in ((5, 23), (11, 9)):
        tokens = torch.randint(VOCAB, (prompt,))
        for _ in range(length):
            hidden = target(tokens[None], causal_attend(target.config, len(tokens), torch.device("cpu"))).hidden[0]
            tokens = torch.cat([tokens, target.lm_head(hidden[-1:]).argmax(-1)])
        hidden = target(tokens[None], causal_attend(target.config, len(tokens), torch.device("cpu"))).hidden[0]
        result.append(answers.Answer(tokens, hidden, prompt))
    return result


def drafter_of(target: Target, name: str, seed: int = 1, **settings: int) -> Drafter:
    kind = DRAFTERS[name]
    torch.manual_seed(seed)
    drafter = kind(kind.configure(target, 53, settings), target, torch.randperm(VOCAB)[:53])
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    return drafter.eval().requires_grad_(False)


def test_the_makefile_names_what_there_is():
    command = ["make", "--dry-run", "-f", "studies/Makefile", "all", "ENGINES=nowhere", "TEACHER=docs", "SPEC_BENCH=s"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(re.findall(r"-m (\S+)", done.stdout)) - {"redraft.cli"}
    assert {"studies.rsd.experiments", "studies.replay.acceptance", "benchmarks.speed.single_stream"} < modules
    assert [name for name in modules if not ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()] == []
    files = set(re.findall(r"(?:studies|benchmarks|build)/\S+\.(?:py|toml|jsonl)", done.stdout))
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("file", sorted((ROOT / "studies" / "methods").iterdir()), ids=lambda file: file.stem)
def test_the_methods_are_read(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert read_methods(file)


def test_answers_are_recorded_with_the_hidden_states_of_their_text():
    llm = toy_llm(tree="best_first")
    requests = [request(text, 40, temperature=0.0) for text in PROMPTS]
    recorded = answers.record(llm, requests, concurrency=2)
    plain = llm.run([one.model_copy(update={"method": AUTO_REGRESSIVE}) for one in requests])
    assert [answer.text for answer in recorded] == [answer.token_ids for answer in plain]
    for answer in recorded:
        tokens = answer.tokens.tolist()
        states = [llm.runtime.engine.path_state(tokens[: index + 1]) for index in range(len(tokens))]
        torch.testing.assert_close(answer.hidden, torch.tensor([[s >> 16, s & 0xFFFF] for s in states]).float())


@torch.no_grad()
def test_a_replayed_chain_has_seen_the_text_up_to_its_root_only(target, greedy):
    """Off by one in the hidden states or the roots, or a chain that sees the answer's future, gives other drafts, and
    tables that flatter."""
    drafter = drafter_of(target, "hidden_state", info_vocabulary=37, info_rank=5)
    assert isinstance(drafter, HiddenStateDrafter)
    replayer = Replayer(drafter, 3)
    for answer in greedy:
        drafts = replayer.draft(answer, width=1, length=3)
        for place, root in enumerate(answer.text[:-1]):
            token, expected = root, []
            for logits in chain_at(drafter, answer, place, 3):
                row = logits.clone()
                entry = int(drafter.info.row_of[token])
                info = drafter.info.rows[entry].float() * drafter.info.scales[entry]
                row[: len(info)] += info
                token = int(drafter.hot_ids[row.argmax()])
                expected.append(token)
            assert drafts.candidates[place, :, 0, 0].tolist() == expected


def chain_at(drafter: HiddenStateDrafter, answer: answers.Answer, place: int, levels: int) -> Tensor:
    """Raw logits [L, K] of a chain drafted with a cache from the pairs up to one place."""
    cache = DenseCache(drafter.layer_config, 1, 64, answer.hidden)
    count = answer.start + place
    first = drafter.ingest(answer.hidden[None, :count], answer.tokens[None, 1 : count + 1], cache.attend)[0, -1]
    cache.starts += count

    def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        out = cache.attend(layer, qkv, norms)
        cache.starts += 1
        return out

    return drafter.raw_logits(drafter.chain(first[None, None], levels, attend)[:, 0, 0])


def test_drafters_are_replayed_over_recorded_answers(target, greedy, tmp_path, monkeypatch):
    answers.write(tmp_path / "answers", greedy)
    monkeypatch.setattr(Target, "from_folder", lambda folder: target)
    for seed, (name, settings) in enumerate({"recurrent": {"exit_dim": 30}, "hidden_state": {"info_rank": 5}}.items()):
        for copy in "ab":
            drafter_of(target, name, seed, **settings).save(tmp_path / f"{name}-{copy}")
    recurrent, chains = ([tmp_path / f"{name}-{copy}" for copy in "ab"] for name in ("recurrent", "hidden_state"))

    def replayed(command, drafters, options):
        files = ["--model", "m", "--answers", tmp_path / "answers", "--output", tmp_path / "r.json"]
        assert execute(acceptance.app, [command, *files, "--drafters", *drafters, *options.split()]) == 0
        return json.loads((tmp_path / "r.json").read_text())

    (_, row) = replayed("packing", recurrent[:1], "--widths 2 7 --length 3")["widths"]
    assert row["p1"] <= row["packed"] <= row["p99"] < row["unpacked"] == 21
    for rows in replayed("shapes", recurrent, "--widths 1 4 --lengths 1 3")["drafters"].values():
        assert [row["rows_per_step"] for row in rows if row["length"] == 1] == [2, 5]
    for row in replayed("ablation", chains, "--nodes 9")["drafters"].values():
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["accepted"]) / row["steps"])


def test_packed_and_unpacked_beams_accept_the_same(tmp_path, monkeypatch, tokenizer_folder):
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"turns": [text]}) for text in PROMPTS))
    monkeypatch.setattr(beam_packing_throughput, "load_llm", lambda _: toy_llm(width=5, packed_5="beam"))
    options = "--num-prompts 2 --max-tokens 20 --batches 1 3 --rounds 1"
    files = ["--bundle", tokenizer_folder, "--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "r.json"]
    assert execute(beam_packing_throughput.main, [*files, *options.split()]) == 0
    cells = json.loads((tmp_path / "r.json").read_text())["cells"]
    packed, unpacked = ([row for row in cells if row["method"] == f"{way}_5"] for way in ("packed", "unpacked"))
    for narrow, wide in zip(packed, unpacked, strict=True):
        assert narrow["acceptance_length"] == wide["acceptance_length"]
        assert narrow["drafted_per_step"] < wide["drafted_per_step"]


def test_drafting_is_timed(target, tmp_path, monkeypatch):
    monkeypatch.setattr(drafting_latency, "CACHE_BYTES", 800)
    monkeypatch.setattr(drafting_latency, "HEADS", {"hot": 53, "full": None, "bare": 9})
    monkeypatch.setattr(Target, "from_folder", lambda folder: target)
    heads = ["--hidden", "32", "--columns", "111", "--widths", "3", "--k", "2", "--repeats", "1"]
    for arguments in (["heads", *heads, "--output", tmp_path / "r.json"],
                      ["untrained", "--model", "m", "--output", tmp_path / "untrained"]):  # fmt: skip
        assert execute(drafting_latency.app, arguments) == 0
    assert [row["way"] for row in json.loads((tmp_path / "r.json").read_text())["drafts"]] == [*drafting_latency.WAYS]
    assert len(read_methods(tmp_path / "untrained" / "methods.toml")) == 6


class Echo:
    """An LLM that answers with what was asked."""

    def __init__(self) -> None:
        self.methods: list[str | None] = []

    def run(self, requests, concurrency=1):
        self.methods += [wanted.method for wanted in requests]
        stats = SequenceStats(steps=4, accepted=5, accepted_by_depth=[4, 1], offered_by_depth=[4, 2], decode_ms=80.0)
        return [Answer(list(range(wanted.max_tokens)), wanted.text, "length", stats=stats) for wanted in requests]


def test_rsds_experiments(tmp_path, monkeypatch, tokenizer_folder):
    rows = [{"category": "translation", "turns": [f"{n}"]} for n in range(6)]
    rows += [{"category": "summarization", "turns": [f"{n}"]} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    llm = Echo()
    monkeypatch.setattr(experiments, "parameters", lambda model, drafter: (1000, 100))
    monkeypatch.setattr(experiments, "load_llm", lambda *_, **__: llm)
    monkeypatch.setattr(experiments, "build_bundle", lambda *_: tokenizer_folder)
    options = "--experiments exp1 --temperature 0.3 --num-prompts 3 --max-tokens 7"
    files = ["--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "out"]
    assert execute(experiments.main, [*files, *options.split()]) == 0
    shapes = shapes_of([EXPERIMENTS["exp1"]])
    assert llm.methods == [AUTO_REGRESSIVE] * 12 + [shape.method for shape in shapes for _ in range(3)]
    assert execute(experiments.main, [*files, *options.split(), "--timing"]) == 0
    (part,) = json.loads((tmp_path / "out" / "experiments.json").read_text())["experiments"]
    assert all(shape["speedup"]["value"] > 0 for shape in part["shapes"])
    # RSD's figure 1, by hand: .6 at once, and of the other .4 a tenth.
    assert figure1.METHODS["Multi-round"](0.9, 0.5) == pytest.approx(0.64)


def test_training_runs_are_compared(tmp_path, monkeypatch):
    runs = []
    for name, offset in (("sparse", 0.1), ("dense", 0.04)):
        runs.append(tmp_path / name)
        runs[-1].mkdir()
        records = [
            {"step": n, "positions": 100 * n, "hours": 0.1 * n, "loss": 9.0 - n, "rate": 1500,
             "conditional_acceptance": [offset + n / 10, 0.3, 0.2], "chain_acceptance_length": 1 + 0.15 * n}
            for n in (1, 2)
        ]  # fmt: skip
        (runs[-1] / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    output = tmp_path / "r.json"
    assert execute(training.app, ["table", *runs, "--output", output]) == 0
    assert json.loads(output.read_text())["runs"]["dense"]["200"] == pytest.approx(0.74 / 3)
    assert execute(training.app, ["curve", *runs, "--output", tmp_path / "curve.png"]) == 0
    monkeypatch.setattr(training, "token_counts", lambda *_: np.ones((2, 5000), int))
    monkeypatch.setattr(training.TargetConfig, "load", lambda _: SimpleNamespace(vocab_size=5000))
    assert execute(training.app, ["frequency", "--model", "m", "--data", "d", "--output", output]) == 0
    assert json.loads(output.read_text())["covered"]["1024"] == 0.2048


class Chats:
    """A chat template and a tokenizer without a folder."""

    encode, decode, adds_special_tokens = toy_codec().encode, toy_codec().decode, True

    def __init__(self, bundle: Path) -> None:
        pass

    def write(self, messages):
        return "".join(f"{message['role'][0]}:{message['content']}#" for message in messages)


def test_prefix_reuse_is_measured(tmp_path, monkeypatch):
    words = [Prompt("1", "all", ("The quick brown fox jumps over the lazy dog; 0123456789 !?",))]
    monkeypatch.setattr(prefix_reuse, "PART", 15)
    monkeypatch.setattr(prefix_reuse, "ChatTokenizer", Chats)
    monkeypatch.setattr(
        prefix_reuse, "load_llm", lambda *_, prefix_reuse=False: toy_llm(prefix_reuse, tree="best_first")
    )
    monkeypatch.setattr(prefix_reuse, "load_prompts", lambda path: words)
    sizes = "--chats 2 --history 70 --turn 9 --system 60 --turns 3 --num-prompts 4 --prompt 33 --max-tokens 5"
    assert execute(prefix_reuse.main, ["--bundle", "b", *sizes.split(), "--output", tmp_path / "r.json"]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert [turn["cached"] > 15 for turn in report["next turn"]["requests"]] == [True, True]
