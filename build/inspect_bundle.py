#!/usr/bin/env python
"""Print what a bundle is: the same as `redraft inspect`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("inspect", *sys.argv[1:])
