"""The worker that the supervisor keeps up, and the one that a swap puts in its place."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

from redraft.serving.engine_worker import EngineWorker, worker_process
from redraft.serving.rundir import RunDir
from redraft.serving.settings import ServeSettings


def test_the_new_worker_of_a_swap_does_not_pay_for_ranks_of_the_old_one(tmp_path):
    """Ranks of the old one have fallen, and its launcher has not said how, when the new one takes its place."""
    run_dir = RunDir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    settings = ServeSettings(bundle=tmp_path, worker_command=sleeper)
    client = SimpleNamespace(status=lambda _: SimpleNamespace(ready=True))
    worker = EngineWorker(run_dir, settings, client, SimpleNamespace(up=False))
    old, new = worker.child, worker_process(run_dir, settings, 1)
    try:
        worker.start()
        worker._end_other_ranks([1])
        worker._launcher_ends_by = time.monotonic()
        new.start()
        worker.replace(new, settings)
        assert worker.watch() == ""
        assert new.alive
    finally:
        old.end(grace=0)
        new.end(grace=0)
