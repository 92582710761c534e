"""The real worker on the toy engine, with the command line that the supervisor uses."""

import argparse
import os
from pathlib import Path

from redraft.worker.server import serve
from tests.worker.toy_worker import toy_runtime

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle")
    parser.add_argument("--socket", type=Path)
    serve(toy_runtime(delay=0.01), parser.parse_args().socket, os.getppid())
