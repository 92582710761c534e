#!/usr/bin/env python
"""Build an engine bundle, unless the one that is there was built from the same."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redraft.cli.ensure import main

if __name__ == "__main__":
    main(sys.argv[1:])
