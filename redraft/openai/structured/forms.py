"""The forms in which models write tool calls: how each is recognised, read and forced."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redraft.openai.structured.grammars import (
    CallGrammar,
    call_schema,
    calls_schema,
    json_rule,
    parameters_schema,
    terminal,
)
from redraft.openai.structured.reader import CallReader, Reading
from redraft.openai.structured.tools import Function
from redraft.text import TextCodec

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MISTRAL_ID_LENGTH = 9
"""Mistral's chat templates refuse ids of another length."""
_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolForm:
    """How models of a family write tool calls."""

    name: str
    read: Callable[[CallReader], Reading[None]]
    """An answer's pieces."""
    grammar: Callable[[Sequence[Function], bool, TextCodec], CallGrammar]
    """The grammar of a call of one of the functions or, where the flag says so, of one or more."""
    marks: tuple[str, ...]
    """What marks the calls. Where it is a special token, an answer's text has it only on request."""
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    """Ids that the chat templates take."""


def _read_hermes(answer: CallReader) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number of them, anywhere. Small models forget the
    marks: then the answer begins with the object."""
    while (yield from answer.call(bare=True)):
        yield from answer.skip(CALL_END)
    while (yield from answer.text_until(CALL)):
        if (yield from answer.call()):
            yield from answer.skip(CALL_END)


def _hermes(functions: Sequence[Function], several: bool, codec: TextCodec) -> CallGrammar:
    again, end = (" ".join(terminal(part, codec) for part in parts) for parts in (("\n", CALL, "\n"), ("\n", CALL_END)))
    calls = f"calls: call ({again} call)*" if several else "calls: call"
    object_rule = json_rule("object", call_schema(functions, "arguments"))
    return CallGrammar((CALL, "\n"), f"{calls}\ncall: object {end}\n{object_rule}")


def _read_llama3(answer: CallReader) -> Reading[None]:
    """`{"name": ..., "parameters": ...}` where the answer begins or after `<|python_tag|>`; a `;` between several."""
    while True:
        while (yield from answer.call(bare=True)):
            yield from answer.skip(";")
        if not (yield from answer.text_until(PYTHON_TAG)):
            return


def _llama3(functions: Sequence[Function], _: bool, __: TextCodec) -> CallGrammar:
    """One call: the templates write no more."""
    return CallGrammar((), json_rule("calls", call_schema(functions, "parameters")))


def _read_mistral(answer: CallReader) -> Reading[None]:
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]` or `[TOOL_CALLS]name[ARGS]{...}`, any number of them."""
    while (yield from answer.text_until(TOOL_CALLS)):
        before = answer.calls
        if (yield from answer.skip("[")):
            while (yield from answer.call()):
                yield from answer.skip(",")
            if answer.calls > before:
                yield from answer.skip("]")
        else:
            yield from answer.named_call()


def _mistral(functions: Sequence[Function], several: bool, codec: TextCodec) -> CallGrammar:
    """A list of calls, or one call of the newer form where the vocabulary has a token for that."""
    if codec.special_id(ARGS) is None:
        return CallGrammar((TOOL_CALLS,), json_rule("calls", calls_schema(functions, "arguments", several)))
    heads = (f"{json.dumps(one.name)} {terminal(ARGS, codec)} object_{place}" for place, one in enumerate(functions))
    objects = (json_rule(f"object_{place}", parameters_schema(one)) for place, one in enumerate(functions))
    return CallGrammar((TOOL_CALLS,), "\n".join((f"calls: {' | '.join(heads)}", *objects)))


def _mistral_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(MISTRAL_ID_LENGTH))


HERMES = ToolForm("hermes", _read_hermes, _hermes, (CALL, CALL_END))
LLAMA3 = ToolForm("llama3", _read_llama3, _llama3, (PYTHON_TAG,))
MISTRAL = ToolForm("mistral", _read_mistral, _mistral, (TOOL_CALLS, ARGS, CALL_ID), _mistral_id)
FORMS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}
"""By the names that `--tool-parser` takes."""


def form_of(template: str) -> ToolForm | None:
    """The form that a chat template writes calls in; None where it is not known."""
    if TOOL_CALLS in template:
        return MISTRAL
    if CALL in template and not any(other in template for other in ("<function=", "<arg_key>")):
        return HERMES
    if PYTHON_TAG in template or ('"parameters": ' in template and "<|start_header_id|>" in template):
        return LLAMA3
    return None
