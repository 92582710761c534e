#!/usr/bin/env python
"""Calibrate a target for fp8: the same as `redraft calibrate`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("calibrate", *sys.argv[1:])
