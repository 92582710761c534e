#!/usr/bin/env python
"""Plan and judge the training of a drafter: the same as `redraft drafter`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("drafter", *sys.argv[1:])
