#!/usr/bin/env python
"""Build an engine bundle: the same as `redraft build`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("build", *sys.argv[1:])
