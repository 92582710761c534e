"""The settings of a service, once: a field's name, type, bounds, default and help are those of a flag of `redraft
serve`, of a variable REDRAFT_NAME, and of a key of `--config`. They count in this order. Every process of a service
gets the whole object."""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from redraft.bundle.backends import BACKENDS, OPENVINO, Precision, backend_of
from redraft.bundle.folder import is_bundle
from redraft.errors import read_text
from redraft.learning.policy import Policy, pattern
from redraft.logs import LogFormat
from redraft.serving.guard.limits import MAX_CALLS, MAX_REQUESTS
from redraft.worker.protocol import DRAIN_S

PREFIX = "REDRAFT_"
SETTINGS_VARIABLE = "REDRAFT_SETTINGS"
"""Environment variable in which the supervisor hands a process its settings, as JSON."""
API_KEY_VARIABLE = "REDRAFT_API_KEY"
"""Environment variable with the keys of /v1: the one setting that is passed outside of SETTINGS_VARIABLE, since that
is also written to files."""
DEFAULT = "default"
"""The model that is served where none is named."""
DAY_S = 86_400

_Port = Annotated[int, Field(ge=1, le=65535)]
# None only until `redraft serve` has prepared a bundle from `source`: nobody who gets the settings afterwards asks.
if TYPE_CHECKING:
    _Bundle = Path
else:
    _Bundle = Path | None
_Limit = Annotated[float, Field(ge=1, le=DAY_S)]


class Address(StrEnum):
    loopback = "127.0.0.1"
    every = "0.0.0.0"


class TextScope(StrEnum):
    """Whose served texts drafts come from, as `--served-texts` takes it."""

    off = "off"
    key = "key"
    all = "all"


class ToolParser(StrEnum):
    """The forms of tool calls that `--tool-parser` takes."""

    hermes = "hermes"
    llama3 = "llama3"
    mistral = "mistral"
    qwen3_coder = "qwen3_coder"
    pythonic = "pythonic"
    glm45 = "glm45"
    deepseek_v3 = "deepseek_v3"
    deepseek_v31 = "deepseek_v31"
    functiongemma = "functiongemma"
    gemma4 = "gemma4"


class Defaults(StrEnum):
    """Whose sampling requests get where they say nothing, as `--generation-config` takes it."""

    auto = "auto"
    vllm = "vllm"


class ReasoningParser(StrEnum):
    """The marks of thoughts that `--reasoning-parser` takes."""

    think = "think"
    mistral = "mistral"
    seed_oss = "seed_oss"
    gemma4 = "gemma4"
    none = "none"


def _words(value: object) -> object:
    """Split the text of an environment variable into a list."""
    return value.split() if isinstance(value, str) else value


def _lines(value: object) -> object:
    """Split the text of an environment variable into a list of its lines, without empty ones."""
    return list(filter(str.strip, value.splitlines())) if isinstance(value, str) else value


ANY_TEXTS = ("a", "0", " ", "Ünï 1\n" * 1000)
"""A pattern that is found in each of these is found in any text"""


def _patterns(texts: list[str]) -> list[str]:
    """The texts. Raises ValueError for one that is no regular expression, or keeps every answer out."""
    for text in texts:
        if all(map(pattern(text).search, ANY_TEXTS)):
            raise ValueError(f"{text!r} is found in any text, so that no answer would be stored")
    return texts


def _networks(texts: list[str]) -> list[str]:
    """The texts. Raises ValueError for one that is neither an address nor a network."""
    for text in texts:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise ValueError(f"{error}: expected an address or a network, such as 10.0.0.0/8") from None
    return texts


def _json(value: object) -> object:
    """Read the object that a flag, an environment variable or a text of a file holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("expected a JSON object") from None


def _has_key(value: SecretStr) -> SecretStr:
    if value.get_secret_value().isspace():  # taken as no key, it would open /v1 to everybody
        raise ValueError("it holds spaces only: expected a key, or several between spaces")
    return value


class ServeSettings(BaseModel):
    """What `redraft serve` is asked for. Fields without a description are no options. `exclude` marks secrets, which
    are printed and written nowhere. `metavar` is what the help shows for a value."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # JSON has neither

    source: str = Field(
        default=DEFAULT,
        description="A bundle, or a model: a folder, a .gguf file, a hub id, or 'default'. A model is fetched and "
        "built first, where that was not done yet.",
    )
    bundle: _Bundle = Field(
        default=cast(Any, None),
        description="Engine bundle to serve as it is; default: the one that is built of SOURCE.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    drafter: Path | None = Field(
        default=None,
        description="Drafter of the model: a folder, or the .gguf file of another model as draft LM; default: the one "
        "that you trained for it, or the shipped one, or n-grams.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    backend: Annotated[str, AfterValidator(lambda name: str(backend_of(name)))] = Field(
        default=OPENVINO.name,
        description="What executes the networks of a model.",
        json_schema_extra={"metavar": f"[{'|'.join(BACKENDS)}]"},
    )
    precision: Precision | None = Field(
        default=None,
        description="Stored weights of a model; default: source on CPUs where the model is quantized, fp8 on torch "
        "where it is in fp8, else bf16.",
    )
    tp: int = Field(
        default=1,
        ge=1,
        description="Ranks that execute a model together (tensor parallelism).",
    )
    address: Address = Field(
        default=Address.loopback, description="Where the ports are: on this machine only, or on all of its addresses."
    )
    http_port: _Port = Field(default=8000, description="Port of Triton's HTTP.")
    grpc_port: _Port = Field(default=8001, description="Port of Triton's gRPC.")
    metrics_port: _Port = Field(default=8002, description="Port of Triton's metrics.")
    openai_port: int = Field(default=8003, ge=0, le=65535, description="Port of OpenAI's API, /v1; 0: without it.")
    api_key: Annotated[SecretStr, AfterValidator(_has_key)] | None = Field(
        default=None,
        exclude=True,
        description="Key that /v1 asks for, or several between spaces, one for each client; default: it asks for none. "
        "Other users can read arguments: better set the variable REDRAFT_API_KEY.",
    )
    allow_host: Annotated[list[str], BeforeValidator(_words)] = Field(
        default=[],
        description="Another name by which clients may reach /v1, and web pages Triton's HTTP too; '*': any. "
        "Repeatable; default: none.",
    )
    trusted_proxy: Annotated[list[str], BeforeValidator(_words), AfterValidator(_networks)] = Field(
        default=[],
        description="An address or a network, such as 10.0.0.0/8, of proxies whose X-Forwarded-For names the client "
        "that --max-per-client counts. Repeatable; default: none.",
    )
    model_name: str | None = Field(default=None, description="The model's name in /v1; default: the bundle's.")
    tool_parser: ToolParser | None = Field(
        default=None,
        description="The form of the model's tool calls, for /v1; default: the one its chat template shows.",
    )
    generation_config: Defaults = Field(
        default=Defaults.auto,
        description="How requests of /v1 that do not say it are sampled: auto, as the model's generation_config.json "
        "says; vllm, at temperature 1.",
    )
    default_chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_json)] = Field(
        default={},
        description="Options of the model's chat template for requests that do not say them, such as "
        "'{\"enable_thinking\": false}'; default: none.",
        json_schema_extra={"metavar": "JSON"},
    )
    sanitize_control_tokens: bool = Field(
        default=False,
        description="Keep control tokens that messages of /v1 spell, such as <|im_start|>, as text. Those of the chat "
        "template stay tokens.",
    )
    reasoning_parser: ReasoningParser | None = Field(
        default=None,
        description="The marks of the model's thoughts, for /v1; none: they stay in the text; default: those its chat "
        "template shows.",
    )
    decoupled: bool = Field(default=True, description="Stream answers over Triton, or send one response per request.")
    threads: int | None = Field(
        default=None, ge=1, description="Threads of the engine, of each rank; default: all cores, or a rank's share."
    )
    max_queue: int = Field(
        default=128,
        ge=1,
        description="Requests that may wait; one more is refused as 'overloaded'. Triton's ports take at most "
        f"{MAX_REQUESTS} requests over HTTP and {MAX_CALLS} calls over gRPC at a time, streams included.",
    )
    max_per_client: int | None = Field(
        default=None,
        ge=1,
        description="Requests of one client of /v1 that run and wait before 'overloaded': of an address or, where "
        "there are several keys, of a key. Default: no limit.",
    )
    stream_interval_ms: int = Field(
        default=40, ge=0, le=10_000, description="Milliseconds between two pieces of a stream, at least."
    )
    prefix_reuse: bool = Field(
        default=True, description="Prefill a prompt that begins like an earlier one only from where they differ."
    )
    served_texts: TextScope = Field(
        default=TextScope.key,
        description="Whose prompts and answers n-grams guess from, too: key, those of the same API key, or of all "
        "requests without one; all, everybody's; off: the request's own. Another's text never shows as output, but how "
        "fast an answer comes may tell that it was served before.",
    )
    served_tokens: int = Field(
        default=1 << 20,
        ge=1 << 10,
        le=1 << 24,
        description="Tokens of these texts that are stored, the newest ones; each takes about 50 bytes.",
    )
    served_dir: Path | None = Field(
        default=None,
        description="Where these texts are kept over restarts, readable by the service's user only; default: in memory "
        "only.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    learned_dir: Path | None = Field(
        default=None,
        description="Where the service keeps what it learned of how much to draft; default: beside the bundle's files.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    learn: Path | None = Field(
        default=None,
        description="Store answers with the target's states in this folder, for `redraft learn`, whose drafter drafts "
        "for everybody; default: none.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    learn_share: float = Field(
        default=1.0, ge=0, le=1, description="With --learn: the share of answers that are stored, chosen at random."
    )
    learn_gb: float = Field(
        default=2.0, ge=0.1, description="With --learn: gigabytes beyond which the oldest answers are removed."
    )
    learn_days: float = Field(default=30.0, gt=0, description="With --learn: days after which an answer is removed.")
    learn_redact: Annotated[list[str], BeforeValidator(_lines), AfterValidator(_patterns)] = Field(
        default=[],
        description="With --learn: a regular expression of RE2; an answer is not stored if it is found in its text or "
        "its prompt's. Repeatable, or one on each line of the variable; default: none.",
    )
    hostfile: Path | None = Field(
        default=None,
        description="Machines of a tensor-parallel bundle's ranks, lines HOST:RANKS, this one first; default: this one "
        "has all ranks.",
    )
    start_timeout_s: _Limit = Field(
        default=180.0, description="Seconds after which a worker that is not ready has failed."
    )
    silence_s: _Limit = Field(
        default=30.0, description="Seconds after which a worker that does not answer is restarted."
    )
    triton_silence_s: _Limit = Field(
        default=10.0, description="Seconds after which a Triton server that does not answer is restarted."
    )
    drain_s: float = Field(
        default=DRAIN_S, ge=0, le=DAY_S, description="Seconds that running requests have to end when it is stopped."
    )
    log_format: LogFormat = Field(
        default=LogFormat.text, description="Lines of text or, except Triton's, of JSON objects."
    )

    @property
    def learning(self) -> Policy | None:
        """Which answers are stored for drafters to learn from; None: none are."""
        if self.learn is None:
            return None
        return Policy(
            self.learn, self.learn_share, self.learn_gb, self.learn_days, tuple(map(pattern, self.learn_redact))
        )

    worker_command: list[str] = [sys.executable, "-m", "redraft.worker.server"]


OF_A_MODEL = ("source", "drafter", "backend", "precision", "tp")
"""The settings that say of what a bundle is made: they are not for one that is served as it is."""
OPTIONS = {name: field for name, field in ServeSettings.model_fields.items() if field.description}
"""The fields that users set."""


def environment_of(settings: ServeSettings) -> dict[str, str]:
    """Return this process's environment with the settings for a child: what its `process_settings` returns."""
    return dict(os.environ) | {SETTINGS_VARIABLE: settings.model_dump_json()}


def process_settings() -> ServeSettings:
    """Return the settings that the supervisor has given this process. One that somebody starts by hand takes them from
    REDRAFT_* variables, and is ended by one that is wrong."""
    if text := os.environ.get(SETTINGS_VARIABLE):
        return ServeSettings.model_validate_json(text)
    try:
        return read({})
    except SettingsError as error:
        sys.exit(str(error))


class SettingsError(ValueError):
    """A setting that cannot be taken: the text names it and where it stands."""


def flag(name: str) -> str:
    """Return a field's option on the command line."""
    return "--" + name.replace("_", "-")


def read(flags: Mapping[str, Any], file: Path | None = None) -> ServeSettings:
    """Return the settings in force: the flags of the command line, then variables, a file and defaults. Raises
    SettingsError, also where a bundle is served as it is and a setting of the same or a stronger layer would have it
    made otherwise."""
    layers: dict[str, Mapping[str, Any]] = {
        "file": _from_file(file) if file else {},
        "variables": _from_variables(),
        "flags": flags,
    }
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def setting(name: str) -> str:
        """A setting as it was given."""
        flags = "SOURCE" if name == "source" else flag(name)
        return {"file": f"{file}: {name}", "variables": PREFIX + name.upper(), "flags": flags}[origins[name]]

    for kind, layer in layers.items():
        if "source" in layer and "bundle" not in layer:
            values.pop("bundle", None)  # `redraft serve MODEL` is not about the bundle that a file names
        if "bundle" in layer or _names_bundle(layer):
            values = {name: value for name, value in values.items() if name not in OF_A_MODEL}
        values |= layer
        origins |= dict.fromkeys(layer, kind)
    bundle = "bundle" if "bundle" in values else "source" if _names_bundle(values) else ""
    if bundle and (others := [name for name in OF_A_MODEL if name in values and name != bundle]):
        both = f"{setting(others[0])} and {setting(bundle)}"
        raise SettingsError(f"{both}: a bundle is served as it is, expected one of the two")
    if bundle == "source":
        values["bundle"], origins["bundle"] = values.pop("source"), origins["source"]
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        details = error.errors()[0]
        name = str(details["loc"][0])
        raise SettingsError(f"{setting(name)}: {_reason(details, OPTIONS[name].exclude)}") from None


def _names_bundle(values: Mapping[str, Any]) -> bool:
    """Whether SOURCE, where it is among the values, is a bundle and not a model."""
    return "source" in values and is_bundle(Path(str(values["source"])))


def toml(settings: ServeSettings) -> str:
    """Write settings as a file for `--config`, without secrets. What is not set is left out, and of what its bundle was
    made."""
    values = settings.model_dump(mode="json", include=set(OPTIONS).difference(OF_A_MODEL if settings.bundle else ()))
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items() if value is not None)


def _toml_value(value: object) -> str:
    """Write a value as TOML, which takes JSON; but an object as JSON in a text, since TOML has no null."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(text, ensure_ascii=False) if isinstance(value, dict) else text


def _from_variables() -> Mapping[str, Any]:
    # The import takes 0.3 s, for which no process of a service waits.
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

    class Variables(ServeSettings, BaseSettings):
        model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, enable_decoding=False)

    return {name: value for name, value in EnvSettingsSource(Variables)().items() if name in OPTIONS}


def _from_file(file: Path) -> Mapping[str, Any]:
    try:
        values = tomllib.loads(read_text(file, "--config"))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file}: {error}") from None
    except ValueError as error:
        raise SettingsError(str(error)) from None
    for name in values:
        if name not in OPTIONS:
            raise SettingsError(f"{file}: {name}: no such setting{_similar(name, OPTIONS)}")
        if OPTIONS[name].exclude:
            raise SettingsError(f"{file}: {name}: a secret does not belong in a file: set {PREFIX}{name.upper()}")
    return values


def _similar(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name.replace("-", "_"), names, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _reason(details: ErrorDetails, is_secret: bool | None) -> str:
    message = details["msg"].removeprefix("Value error, ")
    value = "" if is_secret else f", got {str(details['input'])!r:.60}"
    return f"{message[:1].lower()}{message[1:]}{value}"
