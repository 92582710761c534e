"""Two ranks under MPI give what one gives, and none of them waits for ever.

The slow cases would catch a kind of drafter, a verifier, a family's layers or the torch backend whose tokens differ on
two ranks.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redraft.bundle.manifest import Bundle
from redraft.decoding.verification import VERIFIERS
from redraft.engines import load_engine
from redraft.engines.ranks.parallel import pack, unpack
from redraft.errors import program
from redraft.model_defs.drafters.registry import DRAFTERS
from redraft.model_defs.target.model import Target
from tests.engines.ranks.mpi import run_ranks
from tests.engines.ranks.parallel_ranks import answers
from tests.engines.scheduling import scores
from tests.engines.tiny import (
    bundle_of_methods,
    chain,
    grouped_target,
    make_batch,
    random_tree,
    scores_of,
    tiny_bundle,
    tiny_drafter_of,
    tiny_of,
)
from tests.model_defs.weights.folders import write_folder

SCRIPT = Path(__file__).with_name("parallel_ranks.py")
PLANS: dict[str, Any] = {
    "auto-regressive": None,
    "best first": {"construction": "best_first"},
    "beams and n-grams": {"construction": "beam", "ngram": True},
}
RANDOM: dict[str, dict[str, Any]] = {
    "eagle": {"construction": "stochastic_beam", "levels": (3, 2, 2), "support": 13},
    "medusa": {"construction": "independent", "levels": (3, 3), "support": 13},
    "draft_lm": {"construction": "random_chain", "levels": (1, 1, 1), "support": 13},
    "eagle-c": {"construction": "gumbel_top_k", "levels": (3, 2, 2), "support": 13},
}
"""Drafters that draw, as their networks are made, by kind and what else is behind it."""
METHODS: dict[str, dict[str, Any]] = {
    "recurrent": {},
    "hidden_state": {"resample_above": 0},
    "eagle3": {},
    "parallel_eagle3": {},
    "block": {},
    **RANDOM,
}
"""Of a bundle with every kind of drafter."""
EVERY_PLAN: dict[str, Any] = {
    "auto-regressive": None,
    "greedy": {"method": "recurrent", "construction": "chain", "verification": "greedy"},
    "best first": {"method": "recurrent", "construction": "best_first"},
    "beams and n-grams": {"method": "recurrent", "construction": "beam", "ngram": True},
    "n-grams of a text": {"construction": None, "ngram": True},
    "again from chains": {"method": "hidden_state", "construction": "best_first", "resample_above": 0, "skip_above": 1},
    "layers, best first": {"method": "eagle3", "construction": "best_first"},
    "masks, best first": {"method": "parallel_eagle3", "construction": "best_first"},
    "block, best first": {"method": "block", "construction": "best_first"},
    "draft_lm, walked": {"method": "draft_lm", **RANDOM["draft_lm"]},
    "eagle, constant branching": {"method": "eagle-c", **RANDOM["eagle-c"], "verification": "recursive_rejection"},
    "recursive": {"method": "eagle", **RANDOM["eagle"], "verification": "recursive_rejection"},
    "multi-round": {"method": "medusa", **RANDOM["medusa"], "verification": "multi_round"},
    "k-seq": {"method": "medusa", **RANDOM["medusa"], "verification": "k_seq"},
    "rejection": {"method": "draft_lm", **RANDOM["draft_lm"], "verification": "rejection"},
}


@pytest.fixture(scope="module")
def grouped():
    return grouped_target()


@pytest.fixture(scope="module")
def two_ranks(grouped, tmp_path_factory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("two"), grouped, tensor_parallel=2)


def run(bundle: Bundle, plans: dict[str, Any], output: Path) -> dict[str, Any]:
    """What rank 0 reports of two ranks' work."""
    done = run_ranks(bundle.config.tensor_parallel, SCRIPT, bundle.path, json.dumps(plans), output)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


def test_two_ranks_give_the_tokens_of_one(grouped, two_ranks, tmp_path):
    """And the log-probabilities, whose rows all ranks gather; also after rows that all ranks have copied."""
    report = run(two_ranks, PLANS, tmp_path / "report.json")
    assert report["answers"] == answers(load_engine(tiny_bundle(tmp_path, grouped)), PLANS)
    text, values = report["scores"]
    assert values == pytest.approx(scores_of(grouped, text), abs=1e-4)
    assert report["answers"]["best first"]["tokens"] == report["answers"]["auto-regressive"]["tokens"]
    assert report["reused"] > 0.25
    assert report["copies"] > 3


def test_two_ranks_of_blocks_give_their_numbers(tmp_path):
    """Each has rows and features of the source's blocks; drafts change no token. Where sums of another order round to
    another code of eight bits, two ranks part from one."""
    folder = write_folder(tmp_path / "model", num_key_value_heads=2)
    bundle = tiny_bundle(tmp_path, Target.from_folder(folder, in_blocks=True), precision="source", tensor_parallel=2)
    report = run(bundle, PLANS, tmp_path / "report.json")
    for plan in PLANS:
        assert report["answers"][plan]["tokens"] == report["answers"]["auto-regressive"]["tokens"], plan
    text, values = report["scores"]
    assert np.abs(np.subtract(values, scores_of(Target.from_folder(folder), text))).mean() < 0.05


@pytest.mark.slow
def test_two_ranks_in_fp8_are_as_near_to_float32_as_one(tmp_path):
    """Each has scales of its own features, so that other numbers are rounded."""
    bundles = [tiny_bundle(tmp_path / str(n), grouped_target(), "torch", "fp8", tensor_parallel=n) for n in (1, 2)]
    report = run(bundles[1], {"best first": PLANS["best first"]}, tmp_path / "report.json")
    two, one = (
        np.abs(np.subtract(values, scores_of(grouped_target(), text))).mean()
        for text, values in (report["scores"], scores(load_engine(bundles[0])))
    )
    assert 0.1 < two < 1.3 * one, "bf16 is nearer"
    assert report["answers"]["best first"]["drafted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["gemma3", "mixtral", "opt"])
def test_two_ranks_give_the_tokens_of_one_with_any_familys_layers(layers, tmp_path):
    bundles = [tiny_bundle(tmp_path / str(n), tiny_of(layers), drafts=False, tensor_parallel=n) for n in (1, 2)]
    plans = {name: EVERY_PLAN[name] for name in ("auto-regressive", "n-grams of a text")}
    report = run(bundles[1], plans, tmp_path / "report.json")
    assert report["answers"] == answers(load_engine(bundles[0]), plans)
    text, values = report["scores"]
    assert values == pytest.approx(scores_of(tiny_of(layers), text), abs=1e-3)


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_with_the_torch_backend(grouped, tmp_path):
    """Where there are GPUs too: with gloo in NCCL's place, by which logits come to rank 0, and graphs that all ranks
    capture together."""
    bundles = [tiny_bundle(tmp_path / str(n), grouped, "torch", tensor_parallel=n) for n in (1, 2)]
    plans = {name: PLANS[name] for name in ("auto-regressive", "best first")}
    report = run(bundles[1], plans, tmp_path / "report.json")
    expected = answers(load_engine(bundles[0]), plans)
    assert report["answers"] == expected
    text, values = report["scores"]
    assert values == pytest.approx(scores_of(grouped, text), abs=1e-4)
    assert report["answers"]["best first"]["tokens"] == report["answers"]["auto-regressive"]["tokens"]
    program = """
import atexit
import torch
from torch import distributed
from redraft.plugins.operators.all_reduce import nccl
from redraft.engines import torch as backend
from tests.engines.ranks import parallel_ranks as ranks
from tests.engines.cuda.graphs import FakeGraphs
from tests.plugins import gloo
gloo.stand_in(2)
torch.cuda.is_available = lambda: True
backend.available_device = lambda: torch.device("cpu")
backend.available_graphs = lambda _: FakeGraphs()
gathered, gather = [], nccl.gather
nccl.gather = lambda *given: gathered.append(1) or gather(*given)
atexit.register(lambda: print("connected" if distributed.is_initialized() else "ended"))
ranks.main()
assert gathered
"""
    done = run_ranks(2, "-c", program, bundles[1].path, json.dumps(plans), tmp_path / "gpus.json")
    assert done.returncode == 0, done.stdout + done.stderr
    ended = re.findall("connected|ended", done.stdout)  # the ranks' lines may run into each other
    assert ended == ["ended", "ended"], "NCCL's communicator on both ranks"
    assert json.loads((tmp_path / "gpus.json").read_text())["answers"] == expected


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_by_every_method(grouped, tmp_path):
    """Tokens and drafts of every kind of drafter, verifier and n-gram; caches of drafters are rank 0's alone."""
    methods = {name: (tiny_drafter_of(grouped, name.split("-")[0]), plan) for name, plan in METHODS.items()}
    bundles = [bundle_of_methods(tmp_path / str(n), grouped, methods, tensor_parallel=n) for n in (1, 2)]
    report = run(bundles[1], EVERY_PLAN, tmp_path / "report.json")
    expected = answers(load_engine(bundles[0]), EVERY_PLAN)
    assert [name for name in EVERY_PLAN if report["answers"][name] != expected[name]] == []
    assert "input_ids is 999" in report["refused"], "a wrong batch is refused before the other rank sees it"
    plain = expected.pop("auto-regressive")["tokens"]
    for name, answer in expected.items():
        verifier = VERIFIERS[EVERY_PLAN[name].get("verification", "sampled_walk")]
        assert answer["accepted"], name
        assert (answer["tokens"] == plain) == verifier.merges, name
    assert {EVERY_PLAN[name].get("verification", "sampled_walk") for name in expected} == set(VERIFIERS)
    assert {name.split("-")[0] for name in METHODS} == set(DRAFTERS)


@pytest.mark.parametrize("started", [1, 3])
def test_another_number_of_ranks(two_ranks, tmp_path, started):
    done = run_ranks(started, SCRIPT, two_ranks.path, "{}", tmp_path / "report.json")
    assert done.returncode
    were = "3 were" if started == 3 else "1 was"
    assert f"is split over 2 ranks, {were} started; start it with: {program('mpiexec')} -n 2 " in done.stderr
    assert SCRIPT.name in done.stderr


def test_one_rank_needs_no_mpi(fp32_bundle, tmp_path):
    done = run_ranks(0, SCRIPT, fp32_bundle.path, "{}", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["mpi"] is False


def test_a_rank_that_cannot_load_ends_all(two_ranks):
    program = f"""
import redraft.engines as engines
from pathlib import Path
from redraft.bundle.manifest import Bundle
load = engines._load
def failing(bundle, threads, rank, gather):
    if rank:
        raise MemoryError("no memory for the cache")
    return load(bundle, threads, rank, gather)
engines._load = failing
engines.load_engine(Bundle.load(Path({str(two_ranks.path)!r})))
"""
    done = run_ranks(2, "-c", program)
    assert done.returncode
    assert "BundleError: rank 1: no memory for the cache" in done.stderr


def test_a_rank_with_another_bundle_ends_all(two_ranks):
    """As where hosts have different bundles at the same path."""
    program = f"""
import dataclasses
from pathlib import Path
from mpi4py import MPI
from redraft.bundle.manifest import Bundle
from redraft.engines import load_engine
bundle = Bundle.load(Path({str(two_ranks.path)!r}))
if MPI.COMM_WORLD.rank:
    name = next(iter(bundle.manifest.files))
    bundle.manifest.files[name] = bundle.manifest.files[name].model_copy(update={{"sha256": "0" * 64}})
load_engine(bundle)
"""
    done = run_ranks(2, "-c", program)
    assert done.returncode
    assert re.search(r"BundleError: rank 1: \S+ is another bundle than rank 0's: \S+\n", done.stderr), done.stderr


def run_with_fault(bundle: Bundle, rank: int, fault: str) -> str:
    """What two ranks say that generate with a fault in one's engine: `fault` is the source of fault(engine)."""
    program = f"""
import redraft.engines as engines
from pathlib import Path
from redraft.bundle.manifest import Bundle
from redraft.errors import BundleError
from tests.engines.ranks.parallel_ranks import answers
{fault}
load = engines._load
def failing(bundle, threads, rank, gather):
    engine = load(bundle, threads, rank, gather)
    if rank == {rank}:
        fault(engine)
    return engine
engines._load = failing
answers(engines.load_engine(Bundle.load(Path({str(bundle.path)!r}))), {{"auto-regressive": None}})
"""
    done = run_ranks(2, "-c", program)
    assert done.returncode
    return done.stderr


def test_a_rank_that_fails_in_the_self_test_ends_all(two_ranks):
    """The other one waits for it in a sum."""
    fault = """
def fault(engine):
    def self_test():
        raise BundleError("no memory for a context")
    engine.self_test = self_test
"""
    assert "rank 1: no memory for a context" in run_with_fault(two_ranks, 1, fault)


def test_a_rank_without_a_gpu_ends_all(two_ranks):
    """The other one has a GPU, and is told before it connects to anything."""
    program = f"""
import dataclasses
from pathlib import Path
import torch
from mpi4py import MPI
from redraft.bundle.backends import TENSORRT_RTX
from redraft.bundle.manifest import Bundle
from redraft.errors import BundleError
from redraft.engines import load_engine
from redraft.engines.cuda import device as gpu
def device():
    if MPI.COMM_WORLD.rank:
        raise BundleError("no CUDA device")
    return torch.device("cuda", 0)
gpu.device, torch.cuda.get_device_name = device, lambda _: "a GPU"
gpu.capability = lambda _: "9.0"
bundle = Bundle.load(Path({str(two_ranks.path)!r}))
config = bundle.config.model_copy(update={{"backend": TENSORRT_RTX}})
load_engine(dataclasses.replace(bundle, config=config))
"""
    done = run_ranks(2, "-c", program)
    assert done.returncode
    assert "BundleError: rank 1: no CUDA device" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_a_step_ends_all(two_ranks, rank):
    fault = """
def fault(engine):
    calls = []
    def infer(inputs, infer=engine._target.infer):
        calls.append(1)
        return "a wire is loose" if len(calls) == 5 else infer(inputs)
    engine._target.infer = infer
"""
    assert "a wire is loose" in run_with_fault(two_ranks, rank, fault)


def test_batches_arrive_as_they_were_sent():
    rng = np.random.default_rng(4)
    tree = dataclasses.replace(random_tree(rng, 2, [1] * 9, 35), commit=[0, 3, 4])
    for sequences in ([tree, chain(0, [], [5], causal=True), chain(1, [7], [5, 6])], [chain(0, [], [5])]):
        batch = make_batch(sequences)
        batch = dataclasses.replace(batch, logit_rows=batch.logit_rows[1:])
        copies = [(2, 0, 9), (0, 1, 70)][: len(sequences) - 1]
        copied, received = unpack(pack(batch, copies))
        assert copied == copies
        for field in dataclasses.fields(batch):
            sent = getattr(batch, field.name)
            np.testing.assert_array_equal(getattr(received, field.name), sent, field.name, strict=True)
