"""Unpack, on the GPU machine, what `python -m benchmarks.gpu.pack` packed. Needs Python's standard library only.

    python PACK/load-1/unpack.py [--into FOLDER]

Every load holds this script and `contents.json`. Loads that lie side by side are taken together: parts are joined and
checked by sha256, the tree is extracted, wheels go to FOLDER/artifacts/gpu/site, and the model is made. The last line
says what to put into PYTHONPATH. The exit status is 1 where a load is missing or damaged; `--partial` accepts missing
loads and unpacks what is whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

SITE, WHEELS = "artifacts/gpu/site", "artifacts/gpu/wheels"
TREE = "artifacts/gpu/tree.tar.xz"


class PackError(Exception):
    """A pack that cannot be unpacked; the message says what to do."""


def unpack(pack: Path, into: Path) -> list[str]:
    """Unpack what is whole of the loads in `pack`; returns the loads that are missing for the rest. Raises PackError
    for a damaged part."""
    contents = json.loads(next(pack.glob("load-*/contents.json")).read_text())
    for load in pack.glob("load-*/contents.json"):
        if json.loads(load.read_text()) != contents:
            raise PackError(f"{load.parent} is of another pack than its neighbours: carry the loads of one pack")
    missing: set[str] = set()
    for name, entry in contents["files"].items():
        parts = [pack / part for part in entry["parts"]]
        absent = {part.parent.name for part in parts if not part.is_file()}
        missing |= absent
        if not absent:
            join(parts, into / name, entry)
    if (into / TREE).is_file():
        with tarfile.open(into / TREE) as tree:
            tree.extractall(into, filter="data")
    install(into, [name for name in contents["files"] if name.startswith(WHEELS)])
    if not missing and contents["after"]:
        run([sys.executable, *contents["after"]], into)
    return sorted(missing)


def join(parts: list[Path], path: Path, entry: dict[str, Any]) -> None:
    """Write a file from its parts, unless it is there. Raises PackError where its sha256 is another."""
    if path.is_file() and path.stat().st_size == entry["size"] and sha256(path) == entry["sha256"]:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    if sha256(partial) != entry["sha256"]:
        partial.unlink()
        raise PackError(f"{path.name} is damaged (its sha256 is another): carry {', '.join(map(str, parts))} again")
    os.replace(partial, path)


def sha256(path: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def install(into: Path, wheels: list[str]) -> None:
    """Install those of the wheels that are there, unless all of them are installed."""
    site = into / SITE
    found = [name for name in wheels if (into / name).is_file()]
    done = site / ".installed"
    if found and not (done.is_file() and json.loads(done.read_text()) == found):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        run([*pip, "--target", SITE, *found], into)
        done.write_text(json.dumps(found))


def run(command: list[str], folder: Path) -> None:
    """Run a command with the installed wheels. Raises PackError where it fails."""
    paths = [str((folder / SITE).resolve()), str(folder.resolve()), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if status := subprocess.run(command, cwd=folder, env=environment).returncode:
        raise PackError(f"{' '.join(command[1:])} failed with status {status}")


def main(argv: list[str] | None = None) -> int | str:
    """The exit status; or what is wrong, in a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(), help="folder of the repository; default: this one")
    parser.add_argument("--partial", action="store_true", help="loads may be missing")
    args = parser.parse_args(argv)
    try:
        missing = unpack(Path(__file__).resolve().parents[1], args.into)
    except (PackError, OSError) as error:
        return f"unpack: {error}"
    print(f"export PYTHONPATH={(args.into / SITE).resolve()}:{args.into.resolve()}")
    if missing:
        beside = Path(__file__).resolve().parent
        print(f"unpack: {', '.join(missing)} not here: carry it beside {beside}", file=sys.stderr)
    return int(bool(missing) and not args.partial)


if __name__ == "__main__":
    sys.exit(main())
