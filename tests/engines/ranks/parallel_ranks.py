"""What every rank of a test runs: `mpiexec -n N python tests/engines/ranks/parallel_ranks.py BUNDLE PLANS OUTPUT`.

Rank 0 generates by each plan (JSON: name to fields of a MethodConfig, or null) and writes what came of it. A plan's
field `method` says whose drafter drafts, of a bundle with several.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from redraft.batch import TargetBatch
from redraft.bundle.backends import OPENVINO
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import MethodConfig
from redraft.engines import load_engine
from redraft.engines.api import Engine
from redraft.scheduling.scheduler import Limits
from tests.engines.scheduling import METHOD, generate, scores
from tests.scheduling.reuse import converse

BUDGET = 7


def plan_of(fields: dict[str, Any] | None) -> tuple[str, MethodConfig | None]:
    """Whose drafter drafts, and the plan."""
    if fields is None:
        return METHOD, None
    own = {"tree_budget": BUDGET, **fields}
    return own.pop("method", METHOD), MethodConfig(**own)


def answers(engine: Engine, plans: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By plan: tokens by request, and how many nodes were drafted and accepted."""
    found = {}
    for name, fields in plans.items():
        method, plan = plan_of(fields)
        tokens, scheduler = generate(engine, plan, method=method)
        totals = {"drafted": scheduler.totals.drafted, "accepted": scheduler.totals.accepted}
        found[name] = {"tokens": {str(key): ids for key, ids in tokens.items()}, **totals}
    return found


def refused(engine: Engine) -> str:
    """What the engine says to a batch with a token that is not in the vocabulary."""
    ints = lambda *values: np.array(values, np.int32)  # noqa: E731
    mask = np.zeros((1, 2), np.int32)
    batch = TargetBatch(ints(999), ints(0), ints(0, 1), ints(0), ints(0), mask, ints(), ints(0, 0), ints(0))
    try:
        engine.execute(batch)
    except ValueError as error:
        return str(error)
    return "nothing"


def main() -> None:
    bundle, plans, output = sys.argv[1:]
    loaded = Bundle.load(Path(bundle))
    engine = load_engine(loaded)
    report = {"refused": refused(engine), "answers": answers(engine, json.loads(plans))}
    report["scores"] = scores(engine)
    tolerance = 0.0 if loaded.config.backend == OPENVINO else 1e-4
    methods = {METHOD: MethodConfig(construction="best_first", tree_budget=BUDGET)} if METHOD in engine.drafters else {}
    limits = Limits(slots=3, max_len=80, max_tree=40, prefill_chunk=16, max_queue=99)
    report["reused"], report["copies"] = converse(engine, limits, methods, 1, 24, tolerance)
    report["mpi"] = "mpi4py" in sys.modules
    Path(output).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
