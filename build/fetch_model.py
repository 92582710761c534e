#!/usr/bin/env python
"""Fetch a target: the same as `redraft fetch`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("fetch", *sys.argv[1:])
