#!/usr/bin/env python
"""Write teacher data: the same as `redraft distill`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("distill", *sys.argv[1:])
