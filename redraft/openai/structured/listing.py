"""Tools for chat templates that have no place for them: a system message lists them, and calls are written out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from redraft.openai.structured.forms import CALL, CALL_END

RESULT, RESULT_END = "<tool_response>", "</tool_response>"


def written_out(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation of `chat.turns` in texts only, after a system message with the tools, if there are any."""
    written: list[dict[str, Any]] = []
    for results, group in groupby(turns, lambda turn: turn["role"] == "tool"):
        plain = list(map(_plain, group))
        if results:
            plain = [{"role": "user", "content": "\n".join(turn["content"] for turn in plain)}]
        written += plain
    if not tools:
        return written
    if written and written[0]["role"] in ("system", "developer"):
        written[0]["content"] += f"\n\n{_listing(tools)}"
    else:
        written.insert(0, {"role": "system", "content": _listing(tools)})
    return written


def _plain(turn: Mapping[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        return {"role": "user", "content": f"{RESULT}\n{turn['content']}\n{RESULT_END}"}
    calls = [_call(call["function"]) for call in turn.get("tool_calls", ())]
    content = "\n".join([*([turn["content"]] if turn["content"] or not calls else []), *calls])
    return {name: value for name, value in turn.items() if name != "tool_calls"} | {"content": content}


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{CALL}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_END}"


def _listing(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = '{"name": "NAME", "arguments": {...}}'
    return (
        f"You can call functions. One JSON object a line describes each of them:\n{functions}\n\n"
        f"To call a function, write its name and arguments in this form:\n{CALL}\n{example}\n{CALL_END}"
    )
