"""Models of the Hugging Face hub: downloaded to a cache, the configuration first."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from redraft.compiler.checkpoints.source import FetchError
from redraft.compiler.checkpoints.wrapped import read_config
from redraft.console.progress import size
from redraft.console.resources import require_disk
from redraft.model_defs.files import INDEX, PICKLED, SINGLE, shards
from redraft.model_defs.target.config import TargetConfig

CONFIG = "config.json"
SMALL = ("*.json", "*.jinja", "tokenizer*", "merges.txt")
"""Configuration, chat templates, and the tokenizer in any of its forms."""
CONNECT_S = 20


def download(source: str, revision: str | None, cache: Path, say: Callable[[str], None]) -> Path:
    """The folder of a hub id (owner/name) in the cache. An unsupported model costs no download of weights.

    Raises FetchError, UnsupportedModelError, or ValueError where the disk is too small.
    """
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub_cache = cache / "hub"
    try:
        info = HfApi().model_info(source, revision=revision, files_metadata=True, timeout=CONNECT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        folder = Path(snapshot_download(source, revision=revision, cache_dir=hub_cache, allow_patterns=list(SMALL)))
        if not (folder / CONFIG).is_file():
            raise FetchError(
                f"{source} has no {CONFIG}, so it is no model in Hugging Face's form; of GGUF files take one: "
                f"hf download {source} FILE.gguf --local-dir FOLDER, and then redraft fetch FOLDER/FILE.gguf"
            )
        TargetConfig.load(folder, read_config(folder))
        weights = _weights(list(sizes), folder)
        total = sum(sizes[name] for name in weights)
        require_disk(cache, 2 * total)
        say(f"downloading {size(total)} of weights of {source}, which take up to {size(2 * total)} with a copy")
        snapshot_download(source, revision=revision, cache_dir=hub_cache, allow_patterns=[*SMALL, *weights])
    except HFValidationError as error:
        raise FetchError(f"{source!r} is not a hub id ({error})") from error
    except HfHubHTTPError as error:
        raise FetchError(
            f"the hub refused {source!r}: {str(error).splitlines()[0]} (a gated model needs `hf auth login`)"
        ) from error
    except (httpx2.HTTPError, OSError) as error:
        raise FetchError(f"the hub cannot be reached for {source!r} ({error}); give a local folder or GGUF") from error
    return folder


def _weights(names: list[str], folder: Path) -> list[str]:
    """The repository's files of weights: those that the index names, where other safetensors hold them once more."""
    if SINGLE in names:
        return [SINGLE]
    if (folder / INDEX).is_file():
        return [name for name in shards(folder / INDEX) if name in names]
    return [name for name in names if fnmatch(name, "*.safetensors")] or [n for n in names if fnmatch(n, PICKLED)]
