#!/usr/bin/env python
"""Count tokens of teacher data: the same as `redraft count`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("count", *sys.argv[1:])
