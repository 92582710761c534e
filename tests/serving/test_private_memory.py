"""What a process with private shared memory can do to the modes of files."""

from __future__ import annotations

import subprocess
import sys

from redraft.serving.private_memory import private


def test_fchmod_does_nothing_also_in_what_it_starts(tmp_path):
    program = "import os, sys; file = open(sys.argv[1], 'w'); os.fchmod(file.fileno(), 0o644)"
    for number, wrapped in enumerate((["sh", "-c", '"$@"; true', "sh"], [])):
        file = tmp_path / str(number)
        subprocess.run(private([*wrapped, sys.executable, "-c", program, str(file)]), umask=0o077, check=True)
        assert file.stat().st_mode & 0o777 == 0o600
