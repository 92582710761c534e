"""The front end's process as the supervisor starts it. Imports no web framework."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path

from redraft.serving.child import Child
from redraft.serving.rundir import RunDir, Settings
from redraft.serving.watched import Watched, answers

API_KEY_VARIABLE = "REDRAFT_API_KEY"
"""Environment variable with the keys, separated by spaces, of which the front end asks clients for one."""
ALLOW_HOST_VARIABLE = "REDRAFT_ALLOW_HOST"
"""Environment variable with names for `--allow-host`, separated by spaces."""
DRAIN_S = 2
"""How long requests may go on after SIGTERM."""
MAX_DELAY_S = 5.0
MAX_LOG_BYTES = 32 * 2**20
REPOSITORY = Path(__file__).resolve().parents[2]


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


def front_end(run_dir: RunDir, settings: Settings) -> Watched:
    """The process, as the supervisor watches it."""
    child = Child(
        run_dir,
        "openai",
        "the /v1 front end",
        command(run_dir, settings),
        run_dir.openai_log,
        dict(os.environ),
        REPOSITORY,
        MAX_DELAY_S,
        MAX_LOG_BYTES,
    )
    return Watched(child, lambda: answers(settings.openai_port, "/health", (200, 503)))


def command(run_dir: RunDir, settings: Settings) -> list[str]:
    """Command line of the process."""
    return [
        *(sys.executable, "-m", "redraft.openai.server"),
        *("--bundle", str(run_dir.bundle), "--socket", str(run_dir.socket)),
        *("--log", str(run_dir.openai_log), "--silence-s", str(settings.silence_s)),
        *("--address", settings.address, "--port", str(settings.openai_port)),
        *(["--model-name", settings.model_name] if settings.model_name else []),
        *(["--tool-parser", settings.tool_parser] if settings.tool_parser else []),
        *("--generation-config", settings.generation_config),
        *("--chat-template-kwargs", json.dumps(settings.chat_template_kwargs)),
        *(["--sanitize-control-tokens"] if settings.sanitize_control_tokens else []),
        *(["--reasoning-parser", settings.reasoning_parser] if settings.reasoning_parser else []),
        *(argument for name in settings.allowed_hosts for argument in ("--allow-host", name)),
    ]
