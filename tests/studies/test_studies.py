"""Every study starts, its replays are right, and the parts of its Makefile name what there is.

It would catch a study that no longer starts, or names what is gone: nothing runs one to its end.
`tests/docs/test_site.py` holds the tables and plots.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess

import numpy as np
import pytest
import torch

from benchmarks.command import execute
from redraft.bundle.method import MethodConfig
from redraft.compiler.methods import read_methods
from redraft.llm import LLM
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.rope import RopeConfig
from redraft.request import AUTO_REGRESSIVE, request
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from studies.cache import prefix_reuse
from studies.replay import answers, packing
from tests.conftest import ROOT
from tests.toy_engine import ToyEngine, only, toy_codec

STUDIES = [
    *("studies.training", "studies.cache.prefix_reuse", "studies.replay.answers", "studies.replay.packing"),
    *("studies.rsd.experiments", "studies.rsd.figure1", "studies.speed.beam_packing_throughput"),
    *("studies.speed.drafting_latency", "studies.speed.tensor_parallel"),
    *(f"studies.learning.{name}" for name in ("cost", "measured", "poisoned", "served")),
]
VOCAB, HIDDEN = 111, 24
PROMPTS = ["hello world", "abcabcabc", "to be or not to be"]


def toy_llm() -> LLM:
    """An LLM over the toy engine."""
    engine = ToyEngine(slots=3, max_len=400, max_tree=32, width=4, length=3)
    plan = MethodConfig(construction="best_first", tree_budget=12)
    limits = Limits(slots=3, max_len=400, max_tree=32, prefill_chunk=64)
    return LLM(Runtime(engine, toy_codec(), limits, engine.vocab_size, frozenset({0}), only(plan), prefix_reuse=False))


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
    modules = set(re.findall(r"-m (\S+)", done.stdout)) - {"redraft"}
    assert {"studies.rsd.experiments", "studies.replay.packing", "benchmarks.speed.single_stream"} < modules
    assert [name for name in modules if not ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()] == []
    files = set(re.findall(r"(?:studies|benchmarks|build)/\S+\.(?:py|toml|jsonl)", done.stdout))
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_starts(study, capsys):
    module = importlib.import_module(study)
    assert execute(getattr(module, "app", None) or module.main, ["--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


@pytest.mark.parametrize("file", sorted((ROOT / "studies" / "methods").iterdir()), ids=lambda file: file.stem)
def test_the_methods_are_read(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert read_methods(file)


def test_answers_are_recorded_with_the_hidden_states_of_their_text():
    llm = toy_llm()
    requests = [request(text, 40, temperature=0.0) for text in PROMPTS]
    recorded = answers.record(llm, requests, concurrency=2)
    plain = llm.run([one.model_copy(update={"method": AUTO_REGRESSIVE}) for one in requests])
    assert [answer.text for answer in recorded] == [answer.token_ids for answer in plain]
    for answer in recorded:
        tokens = answer.tokens.tolist()
        states = [llm.runtime.engine.path_state(tokens[: index + 1]) for index in range(len(tokens))]
        torch.testing.assert_close(answer.hidden, torch.tensor([[s >> 16, s & 0xFFFF] for s in states]).float())


def test_a_drafter_is_replayed_over_recorded_answers(target, greedy, tmp_path, monkeypatch):
    answers.write(tmp_path / "answers", greedy)
    monkeypatch.setattr(Target, "from_folder", lambda folder: target)
    drafter_of(target, "recurrent", exit_dim=30).save(tmp_path / "drafter")
    files = ["--model", "m", "--answers", tmp_path / "answers", "--output", tmp_path / "r.json"]
    options = ["--drafter", tmp_path / "drafter", "--beam-widths", "1", "7", "--beam-length", "3"]
    assert execute(packing.main, [*files, *options]) == 0
    alone, row = json.loads((tmp_path / "r.json").read_text())["widths"]
    assert alone["packed"] == alone["unpacked"] == 3
    assert row["p1"] <= row["packed"] <= row["p99"] < row["unpacked"] == 21


def test_one_slow_moment_does_not_move_a_median():
    rng = np.random.default_rng(2)
    bottoms = rng.uniform(5.0, 50.0, 101)
    tops = bottoms * rng.normal(1.02, 0.01, 101)
    found = prefix_reuse.median_ratio(tops, bottoms)
    low, high = found["interval"]
    assert low < found["ratio"] < high
    assert low > 1.015
    assert high < 1.025
    tops[7] *= 50.0
    slow = prefix_reuse.median_ratio(tops, bottoms)
    assert slow["ratio"] == pytest.approx(found["ratio"], abs=0.002)
    assert slow["interval"] == pytest.approx((low, high), abs=0.002)
