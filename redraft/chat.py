"""A user's turn as the text that the model continues: the chat template of a bundle or model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render_chat(folder: Path, user: str) -> str:
    """The prompt for one user turn. Raises FileNotFoundError if the folder holds no chat template."""
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    template_file = folder / "chat_template.jinja"
    source = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise FileNotFoundError(f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    tokens = {name: config[name] for name in ("bos_token", "eos_token") if isinstance(config.get(name), str)}
    messages = [{"role": "user", "content": user}]
    return environment.from_string(source).render(messages=messages, add_generation_prompt=True, **tokens)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
