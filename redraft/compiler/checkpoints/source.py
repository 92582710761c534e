"""The interface of a checkpoint: configuration, tokenizer, and tensors that are read a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from torch import Tensor

from redraft.request import clipped

TOKENIZER = "tokenizer.json"


class FetchError(ValueError):
    """The source cannot be fetched; the message says why, and what to do."""


class Checkpoint(Protocol):
    """A model to fetch. Opening one reads only headers and configuration."""

    title: str
    """The name that goes into `config.json`."""
    precision: str
    """How the source stores the weights: Q4_K_M, float32."""
    config: dict[str, Any]
    """The model's configuration in Hugging Face's terms."""
    remarks: list[str]
    """What its user should know: what the weights have beside what its configuration says."""
    files: dict[str, Path]
    """The files of weights that a model folder keeps, by their names there; none: it gets bfloat16 safetensors."""
    memory: int
    """Bytes of the source that are mapped at once while its tensors are read."""

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        ...

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows in order, as floating-point chunks of about CHUNK numbers. Raises ValueError."""
        ...

    def tokenizer(self) -> Any:
        """The tokenizer as transformers loads it. Raises FetchError."""
        ...

    def copy_settings(self, folder: Path) -> None:
        """Copy what belongs to the model besides configuration, weights and tokenizer."""
        ...


def load_tokenizer(source: Path) -> Any:
    """The tokenizer of a folder, or of a GGUF file. Raises FetchError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if source.is_dir():
            # By its own class transformers rebuilds a tokenizer from the vocabulary, with the class's rules for cutting
            # texts into words, whatever `tokenizer.json` says of them.
            kind = PreTrainedTokenizerFast if (source / TOKENIZER).is_file() else AutoTokenizer
            tokenizer = kind.from_pretrained(source, trust_remote_code=False)
            tokenizer("a")  # some odd settings are noticed only here
            return tokenizer
        # In a folder of its own, as a `tokenizer.json` beside the file would be read instead. AutoTokenizer reads the
        # model's configuration too, and refuses architectures that it does not know.
        with TemporaryDirectory() as folder:
            (Path(folder) / source.name).symlink_to(source.resolve())
            return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=source.name)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises no narrower one, and of a panic in Rust none of Exception's
        reason = clipped(str(error).partition("\n")[0], 300)
        raise FetchError(f"{source}: no usable tokenizer ({reason})") from error
