#!/usr/bin/env python
"""Tune a bundle: the same as `redraft tune`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("tune", *sys.argv[1:])
