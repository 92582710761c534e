#!/usr/bin/env python
"""Train a drafter: the same as `redraft train`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("train", *sys.argv[1:])
