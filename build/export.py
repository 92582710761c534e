#!/usr/bin/env python
"""Convert drafters for other servers: the same as `redraft export`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli import main

if __name__ == "__main__":
    main("export", *sys.argv[1:])
