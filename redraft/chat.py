"""Conversations as the text that the model continues: the chat template of a bundle or model folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]
"""`role` (user, assistant or system) and `content`."""


def render_chat(folder: Path, messages: str | Sequence[Message]) -> str:
    """The prompt for the next turn of a conversation, or for one user turn given as a text.

    Raises FileNotFoundError if the folder holds no chat template, ValueError for messages of another form, and
    TemplateError where the template refuses them.
    """
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if not turns:
        raise ValueError("expected at least one message, got none")
    for turn in turns:
        if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise ValueError(f"expected maps with the texts role and content, got {turn!r:.60}")
    source, config = _template(folder)
    if source is None:
        raise FileNotFoundError(f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    tokens = {name: config[name] for name in ("bos_token", "eos_token") if isinstance(config.get(name), str)}
    return environment.from_string(source).render(messages=turns, add_generation_prompt=True, **tokens)


def user_prompt(folder: Path, user: str) -> str:
    """One user turn as the model continues it: by the chat template, or as it is where the folder has none."""
    try:
        return render_chat(folder, user)
    except FileNotFoundError:
        return user


def template_digest(folder: Path) -> str | None:
    """sha256 of a folder's chat template; None where it has none."""
    source, _ = _template(folder)
    return hashlib.sha256(source.encode()).hexdigest() if source is not None else None


def _template(folder: Path) -> tuple[str | None, dict]:
    """A folder's chat template, and its tokenizer's configuration."""
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    source = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    return (source if isinstance(source, str) else None), config


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
