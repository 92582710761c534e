"""What a bundle was built from, compared with what is there now: options, the content of files, and code.

Nothing here imports torch, so that each `redraft serve` and `redraft build` can ask.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from redraft.bundle.backends import BACKENDS
from redraft.bundle.config import BundleConfig
from redraft.bundle.manifest import BuiltFrom, InputFile, Manifest, file_sha256, lacking
from redraft.bundle.writer import TOKENIZER_FILES
from redraft.errors import BundleError
from redraft.home import PROMPTS
from redraft.plugins.library import HOST_ONLY

PACKAGE = Path(__file__).resolve().parents[1]
PATHS = ("--model", "--drafter", "--methods", "--hot-vocabulary", "--calibration", "--bigrams")
"""The options of `redraft build` that name what it reads."""
IN_METHODS = ("drafter", "hot_vocabulary")
"""The settings of a method in a TOML file that name what is read."""
PICKLED = ("pytorch_model*.bin", "medusa_lm_head.pt")
"""Weights in torch's format, which drafters of the hub may have."""
IN_FOLDERS = ("config.json", "generation_config.json", "*.safetensors", "*.gguf", *PICKLED, *TOKENIZER_FILES, "*.npy")
"""What is read of a model's or a drafter's folder, in which training leaves more."""
NOT_IN_FOLDERS = "checkpoint.safetensors"
SOURCES = (
    "cli/build.py",
    *(f"compiler/{name}.py" for name in ("bundle", "calibration", "draft_model", "feature_scales", "methods")),
    "compiler/passes/*.py",
    "compiler/writers/*.py",
    "model_defs/**/*.py",
    *(f"plugins/**/*.{suffix}" for suffix in ("py", "h", "cpp", "cu", "cuh")),
    *(f"bundle/{name}.py" for name in ("backends", "config", "generation", "manifest", "method", "writer")),
    *(f"decoding/{name}.py" for name in ("construction", "random_trees", "verification")),
    "engines/memory.py",
    *(f"engines/tensorrt/{name}.py" for name in ("engine", "library", "profiles")),
)
NOT_SOURCES = tuple(f"plugins/{folder}/" for folder in HOST_ONLY)
"""The code that decides what a bundle holds, and folders of it that do not."""
OF_TEXTS = ("chat.py", "prompts.py", "templates/*.py", "text.py")
"""The code that decides too where a build reads texts to scale features by."""
CODE = "the code that builds it has changed"


def built_from(options: Mapping[str, str], known: Mapping[str, InputFile] | None = None) -> BuiltFrom:
    """What `redraft build` with these options, by name, builds a bundle from, now.

    A file with the size and time of modification of its entry in `known` is not read again.
    """
    known = known or {}
    files: dict[str, InputFile] = {}
    for name in PATHS:
        if name in options:
            for key, file in files_of_option(name, Path(options[name])):
                if file.is_file():
                    files[key] = input_file(file, known.get(key))
    kept = {name: value for name, value in options.items() if name not in (*PATHS, "--output", "--replace")}
    return BuiltFrom(options=kept, files=files, sources=sources_digest(is_scaled(options)))


def is_scaled(options: Mapping[str, str]) -> bool:
    """Whether a build with complete options scales features by the prompts that come with the package."""
    backend = BACKENDS.get(options.get("--backend", ""))
    return backend is not None and options.get("--precision") in backend.scaled


def options_of(arguments: Sequence[str]) -> dict[str, str] | None:
    """The options of `redraft build`'s command line by name; those without a value have "". None where a word belongs
    to no option, and where one that `differences` does not compare lacks its value, or has one too many."""
    options: dict[str, str] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, assigned, value = argument.partition("=")
            options[name] = value
            name = "" if assigned else name
        elif name:
            options[name], name = argument, ""
        else:
            return None
    paths = [options[name] for name in (*PATHS, "--output") if name in options]
    return options if all(paths) and not options.get("--replace") else None


def files_of_option(option: str, path: Path) -> Iterator[tuple[str, Path]]:
    """The files that are read for an option, by names that hold wherever they are."""
    if path.is_dir():
        result = sorted({file for pattern in IN_FOLDERS for file in path.glob(pattern)})
        yield from ((f"{option} {file.name}", file) for file in result if file.name != NOT_IN_FOLDERS)
        return
    yield option, path
    if option == "--methods":
        for method, table in methods_of(path).items():
            for setting in IN_METHODS:
                if isinstance(table, dict) and setting in table:
                    yield from files_of_option(f"{option} [{method}] {setting}", Path(str(table[setting])))


def methods_of(path: Path) -> dict[str, object]:
    """The tables of a methods file; none of one that cannot be read, which `redraft build` will say."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def input_file(file: Path, known: InputFile | None = None) -> InputFile:
    """A file's entry: the known one where size and time of modification are the same."""
    stat = file.stat()
    if known and (known.size, known.modified_ns) == (stat.st_size, stat.st_mtime_ns):
        return known
    return InputFile(sha256=file_sha256(file), size=stat.st_size, modified_ns=stat.st_mtime_ns)


def source_files(scaled: bool) -> list[str]:
    """The files of that code, from the package's folder; with `scaled` those of texts too."""
    patterns = (*SOURCES, *OF_TEXTS) if scaled else SOURCES
    result = {str(file.relative_to(PACKAGE)) for pattern in patterns for file in PACKAGE.glob(pattern)}
    return sorted(name for name in result if not name.startswith(NOT_SOURCES))


def sources_digest(scaled: bool) -> str:
    """sha256 of what comes with the package and decides what a bundle holds: code, and the prompts where features are
    `scaled` by them."""
    digest = hashlib.sha256()
    prompts = {PROMPTS.name: PROMPTS} if scaled else {}
    for name, file in ({name: PACKAGE / name for name in source_files(scaled)} | prompts).items():
        digest.update(f"{name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def differences(there: BuiltFrom | None, asked: BuiltFrom) -> list[str]:
    """How what is asked for differs from what is there."""
    if there is None:
        return ["it does not say what it was built from"]
    result = []
    for name in sorted(there.options.keys() | asked.options.keys()):
        was, now = (
            f"{name} {side.options[name]}".rstrip() if name in side.options else f"no {name}" for side in (there, asked)
        )
        if was != now:
            result.append(f"it has {was}, asked for is {now}")
    for name in sorted(there.files.keys() | asked.files.keys()):
        was, now = (side.files[name].sha256 if name in side.files else "" for side in (there, asked))
        if was != now:
            result.append(f"{name} {'is another' if was and now else 'was not there' if now else 'is gone'}")
    if there.sources != asked.sources:
        result.append(CODE)
    return result


def is_input(built: BuiltFrom, option: str, folder: Path, besides: Collection[str] = ()) -> bool:
    """Whether a folder has the files that an option of the build read, wherever they were, but those of some names."""
    was = {name: file for name, file in built.files.items() if name.startswith(f"{option} ") and name not in besides}
    now = {name: file for name, file in files_of_option(option, folder) if name not in besides}
    return was.keys() == now.keys() and all(input_file(now[name], was[name]).sha256 == was[name].sha256 for name in was)


def require_model(bundle: Path, model: Path) -> None:
    """Check that a bundle was built from the `config.json` and the weights of a model's folder, if it says from what.
    Raises ValueError where they are others, or where there is no bundle that can be read."""
    try:
        built = Manifest.read(bundle).built_from
    except BundleError as error:
        raise ValueError(str(error)) from None
    if built is None:
        return
    tokenizer = {f"--model {name}" for name in ("generation_config.json", *TOKENIZER_FILES)}
    if not is_input(built, "--model", model, tokenizer):
        raise ValueError(
            f"{bundle} was built from another model than {model}: leave it out, or build one with redraft build "
            f"--model {model} --no-drafter --features"
        )


def why_unusable(bundle: Path, manifest: Manifest) -> list[str]:
    """Why a bundle cannot be loaded here, as far as its files' sizes and the installed packages say it. Raises
    BundleError for a damaged `config.json`."""
    reasons = []
    for name, entry in manifest.files.items():
        file = bundle / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry.size:
            reasons.append(f"{name} is missing" if size is None else f"{name} has {size} bytes, expected {entry.size}")
    if missing := lacking(manifest.cpu_features):
        reasons.append(f"it needs a CPU with {missing}")
    backend = "" if reasons else BundleConfig.read(bundle).backend.name
    built, here = manifest.versions.get(backend), installed(backend)
    if built and here and built.split("+")[0] != here.split("+")[0]:
        reasons.append(f"it was built by {backend} {built}, here is {here}")
    return reasons


def installed(package: str) -> str | None:
    """An installed package's version."""
    try:
        return version(package) if package else None
    except PackageNotFoundError:
        return None
