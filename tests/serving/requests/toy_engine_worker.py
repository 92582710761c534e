"""The real worker on the toy engine, with the command line that the supervisor uses.

A bundle with a file `broken` does not load.
"""

import argparse
import os
from pathlib import Path

from redraft.worker.server import serve
from tests.worker.toy_worker import toy_runtime

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle")
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--drain-s", type=float)
    options = parser.parse_args()
    if Path(options.bundle, "broken").exists():
        raise SystemExit("the bundle is broken: build it again")
    serve(toy_runtime(delay=0.01), options.socket, os.getppid(), drain_s=options.drain_s)
