"""The examples of docs/developers/add-*.md: drafter, construction, verifier, request field and option, at work."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.batch import DraftBatch
from redraft.bundle.method import MethodConfig
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.verification import VERIFIERS
from redraft.engines import load_engine
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.drafters.windows import Windows
from redraft.training.distillation import Labels, Trainer
from tests.engines.scheduling import generate
from tests.engines.tiny import METHOD, VOCAB, tiny_bundle, tiny_target
from tests.joint_law import THRESHOLD, Case, check
from tests.joint_law import generate as answers_of

ROOT = Path(__file__).resolve().parents[2]
CHECK = """
from redraft.decoding.verification import PairingError, check_pairing
check_pairing("confident", "sampled_walk")
check_pairing("stochastic_beam", "first_draw")
try:
    check_pairing("confident", "first_draw")
except PairingError as error:
    print(error)
"""
FIELD = """
from redraft.llm import LLM
from redraft.openai.schemas import CompletionBody, V1_NAMES
from redraft.openai.tokens import TokenizeBody
from redraft.serving.triton.fields import ENSEMBLE, TENSORRT_LLM
from studies.figures import request_fields
from tests.test_llm import toy_runtime

assert CompletionBody.model_validate({"prompt": "a", "stop_at_period": True}).stop_at_period
TokenizeBody.model_validate({"prompt": "a", "stop_at_period": False})
for name, contract in (("ensemble", ENSEMBLE), ("tensorrt_llm", TENSORRT_LLM)):
    assert contract.fields["stop_at_period"] == "stop_at_period"
    line = '{ name: "stop_at_period" data_type: TYPE_BOOL dims: [ 1 ] optional: true }'
    assert line in request_fields.inputs(name, contract)
assert "    stop_at_period: bool\\n" in request_fields.options_module()
assert "`stop_at_period`" in request_fields.tables()["request_fields"]
with LLM(toy_runtime()) as llm:
    options = {"max_tokens": 200, "temperature": 1.5, "end_id": -1}
    seed = next(seed for seed in range(99) if "." in llm.generate("a", seed=seed, **options).text)
    whole, start = (llm.generate("a", seed=seed, stop_at_period=stops, **options).text for stops in (False, True))
assert start == whole.partition(".")[0] + "."
"""


@pytest.fixture(scope="module")
def files() -> dict[Path, str]:
    """The pages' code by the file that each part names."""
    pages = [ROOT / "docs" / "developers" / f"add-a-{what}.md" for what in ("drafter", "construction", "verifier")]
    code = [re.findall(r"```python\n# (\S+)\n(.*?)```", page.read_text(), re.DOTALL) for page in pages]
    return {Path(name): text for found in code for name, text in found}


@pytest.fixture
def example(files, tmp_path, monkeypatch):
    """All of them imported and registered; what they register is forgotten afterwards."""
    known = [(registry, dict(registry)) for registry in (CONSTRUCTIONS, DRAFTERS, VERIFIERS)]
    for path, code in files.items():
        (tmp_path / path.name).write_text(code)
        spec = spec_from_file_location(path.stem, tmp_path / path.name)
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
    kind = sys.modules["bigram"].BigramDrafter
    DRAFTERS[kind.name] = kind
    yield
    for registry, before in known:
        registry.clear()
        registry.update(before)


def test_each_is_one_file_of_thirty_lines(files):
    assert [str(path.parent) for path in files] == ["model_defs/drafters", "redraft/decoding", "redraft/decoding"]
    assert all(len([line for line in code.splitlines() if line]) <= 30 for code in files.values())


def test_a_file_in_decoding_is_all_that_it_takes(files, tmp_path):
    shutil.copytree(ROOT / "redraft", tmp_path / "redraft")
    for path, code in files.items():
        if path.parts[0] == "redraft":
            (tmp_path / path).write_text(code)
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "'first_draw' does not go with 'confident': these tokens were not drawn\n"


def test_a_request_field_is_an_entry_and_what_it_does(tmp_path):
    shutil.copytree(ROOT / "redraft", tmp_path / "redraft", symlinks=True)
    for folder in ("model_defs", "plugins"):  # whose kernels are built
        (tmp_path / folder).symlink_to(ROOT / folder)
    page = (ROOT / "docs" / "developers" / "add-a-request-field.md").read_text()
    blocks = re.findall(r"```python\n# (\S+): .*\n((?:.*\n)+?)```", page)
    anchors = {
        "redraft/request.py": '    @field_validator("stop_words"',
        "redraft/request_state.py": "        self._output = ",
    }
    assert [name for name, _ in blocks] == list(anchors)
    for name, code in blocks:
        before, anchor, after = (tmp_path / name).read_text().partition(anchors[name])
        (tmp_path / name).write_text(before + code + anchor + after)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", FIELD], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_drafter_is_trained_compiled_and_drafts_as_the_construction_says(example, tmp_path):
    target = tiny_target()
    kind = DRAFTERS["bigram"]
    drafter = kind(kind.configure(target, VOCAB), target)
    trainer = Trainer(target, drafter, Labels.hard, 2, hidden_weight=0.0)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    # Every token t is followed by t + 1.
    tokens = torch.arange(40)[None].repeat(2, 1)
    windows = Windows(
        tokens,
        torch.zeros(2, 40, 96),
        torch.zeros(2, 40, dtype=torch.long),
        torch.arange(36).expand(2, 36),
        torch.ones(2, 36, dtype=torch.bool),
    )
    for _ in range(60):
        optimizer.zero_grad()
        trainer.loss(windows).backward()
        optimizer.step()
    bundle = tiny_bundle(tmp_path, target, trained=drafter.eval(), construction="confident")
    assert bundle.config.methods[METHOD].construction == "confident"
    engine = load_engine(bundle)
    roots = np.array([5, 17], np.int32)
    drafted = engine.drafters[METHOD].draft(DraftBatch.of_roots(np.zeros((2, 96), np.float32), roots))
    tree = CONSTRUCTIONS["confident"].build(drafted, roots, 8)
    for root, nodes in zip(roots.tolist(), tree.nodes, strict=True):
        assert [(root + 1, 0), (root + 2, 1)] == [(token, parent) for token, parent, _ in nodes[1:3]]
        assert all(score > np.log(0.05) for _, _, score in nodes)
        assert len(nodes) < len(CONSTRUCTIONS["best_first"].build(drafted, roots, 8).nodes[0])
    expected, _ = generate(engine, None)
    tokens, scheduler = generate(engine, MethodConfig(construction="confident", tree_budget=8))
    assert tokens == expected
    assert scheduler.totals.drafted > 0


@pytest.mark.parametrize("construction", ["stochastic_beam", "independent"])
def test_the_verifier_is_lossless_through_the_scheduler(example, construction):
    case = Case(construction, (3, 3), "first_draw", cut=3)
    kinds = ["plain", "filtered"]
    answers, scheduler, _ = answers_of(case, 300, kinds)
    for kind in kinds:
        assert check(case, kind, answers) < THRESHOLD, kind
    assert scheduler.totals.accepted > 0.2 * scheduler.totals.sequence_steps


OPTION = """
import os
from types import SimpleNamespace
from typer.testing import CliRunner
from redraft.cli import application
from redraft.serving import launcher
from redraft.serving.settings import environment_of, process_settings
from redraft.worker import server

def start(settings, *_):
    os.environ |= environment_of(settings)
    server.Worker = lambda *_: SimpleNamespace(run=lambda alive: print("worker at", os.nice(0)))
    server.serve(SimpleNamespace(engine=SimpleNamespace(close=lambda: None)), "socket", None, process_settings())
    raise launcher.ServingError("enough")

launcher.serve = start
for arguments in (["--worker-niceness", "20"], []):
    print(CliRunner().invoke(application("serve"), ["serve", "--bundle", "b", *arguments]).output)
"""


def test_an_option_is_one_field_and_its_use(tmp_path):
    page = (ROOT / "docs" / "developers" / "add-an-option.md").read_text()
    (file, field), (user, use) = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    shutil.copytree(ROOT / "redraft", tmp_path / "redraft")
    for name, line, before in ((file, field, "    worker_command: "), (user, use, "    gc.collect()\n    gc.freeze()")):
        text = (tmp_path / name).read_text()
        assert text.count(before) == 1
        (tmp_path / name).write_text(text.replace(before, line + before))
    environment = os.environ | {"REDRAFT_WORKER_NICENESS": "3", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", OPTION]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "Invalid value for '--worker-niceness'" in done.stdout, done.stderr
    assert f"worker at {os.nice(0) + 3}" in done.stdout
