"""The real worker on the toy engine, with the command line that the supervisor uses.

A bundle with a file `broken` does not load.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from redraft.serving.settings import process_settings
from redraft.worker.server import serve
from tests.worker.toy_worker import LIMITS, toy_runtime

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle")
    parser.add_argument("--socket", type=Path)
    options, settings = parser.parse_args(), process_settings()
    if Path(options.bundle, "broken").exists():
        raise SystemExit("the bundle is broken: build it again")
    runtime = toy_runtime(0.01, replace(LIMITS, max_queue=settings.max_queue))
    serve(runtime, options.socket, os.getppid(), settings)
