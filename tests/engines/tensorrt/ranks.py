"""What every rank of a test of TensorRT's ranks runs: `mpiexec -n N python tests/engines/tensorrt/ranks.py BUNDLE PLANS
OUTPUT`. The library is the stand-in, MPI and gloo are in NCCL's place.

Rank 0 writes what came of `steps`, which tokens it chooses in the first one, and what came of generating by each plan
as in ranks.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from redraft.bundle.manifest import Bundle
from redraft.decoding.sampling import Sampler
from redraft.engines import load_engine
from redraft.engines.features import on_host
from redraft.plugins.operators.all_reduce import nccl
from redraft.request import SamplingConfig
from tests.engines.ranks.parallel_ranks import answers
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tiny import VOCAB, Rows, chain, make_batch, random_tree
from tests.plugins import gloo


def steps() -> list[list[Rows]]:
    """Prompts, a tree beside a single row, and a tree over the other's accepted rows."""
    rng = np.random.default_rng(0)
    contexts = {slot: rng.integers(0, VOCAB, count).tolist() for slot, count in ((0, 11), (1, 16))}
    tree = random_tree(rng, 1, contexts[1], 7)
    path = tree.ancestors(6)[::-1]
    accepted = contexts[1] + [tree.tokens[row] for row in path]
    return [
        [chain(slot, [], tokens, causal=True) for slot, tokens in contexts.items()],
        [tree, chain(0, contexts[0], [7])],
        [dataclasses.replace(random_tree(rng, 1, accepted, 4), commit=path)],
    ]


def main() -> None:
    bundle, plans, output = sys.argv[1:]
    world = MPI.COMM_WORLD
    gloo.stand_in(world.size)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nccl, "communicator", world.Dup)
        loaded = Bundle.load(Path(bundle))
        stand_in_tensorrt.install(monkeypatch, loaded.config.backend.name)
        engine, words = load_engine(loaded), -(-loaded.config.limits.max_tree // 32)
        found = {}
        for number, step in enumerate(steps()):
            logits, features = engine.execute(make_batch(step, words))
            found |= {f"logits{number}": np.array(logits), f"features{number}": on_host(features)}
        prompts = steps()[0]
        chosen, _ = engine.execute(make_batch(prompts, words), [Sampler(SamplingConfig(), [1])] * len(prompts))
        found["chosen"] = chosen[0 : len(found["logits0"])]
        np.savez(output, answers=json.dumps(answers(engine, json.loads(plans))), **found)


if __name__ == "__main__":
    main()
