"""The forms in which models write tool calls: how each is recognised, read, forced, and listed in a system message."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from redraft.grammar.json_schema import MOST_REASONS, SchemaError, Work, json_rules, loosened_schema, schema_rules
from redraft.openai.errors import ApiError
from redraft.openai.structured.formats import guide_for
from redraft.openai.structured.reader import CallReader, Reading, Tags
from redraft.openai.structured.tools import Function
from redraft.request import Guide
from redraft.text import TextCodec

ANY_OBJECT = {"type": "object"}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of an answer that calls."""

    opening: Sequence[str]
    """What the calls begin with: texts, and special tokens."""
    rules: str
    """In Lark: the rule `calls`, what follows, and those that it needs."""

    def after_opening(self) -> Guide:
        """Calls, of which the prompt has the opening. Raises ApiError where the grammar is too long."""
        return guide_for("tools", "grammar", f"start: calls\n{self.rules}")

    def with_opening(self, codec: TextCodec) -> Guide:
        """Calls and their opening. Raises ApiError where the grammar is too long."""
        return guide_for("tools", "grammar", f"start: {self._opening(codec)} calls\n{self.rules}")

    def _opening(self, codec: TextCodec) -> str:
        return " ".join(terminal(part, codec) for part in self.opening)

    def or_json(self, field: str, wanted: Guide, codec: TextCodec) -> Guide:
        """Calls, or the JSON that a field wants. Raises ApiError where the grammar is too long, or the schema none."""
        try:
            rules = json_rules("json", wanted.text)
        except SchemaError as error:
            raise ApiError(f"{field}: the json_schema cannot be used: {error}", field) from None
        start = f"start: json | {self._opening(codec)} calls"
        return guide_for("tools", "grammar", "\n".join((start, rules, self.rules)))


def terminal(text: str, codec: TextCodec) -> str:
    """A text in Lark; a special token's as that token."""
    token = codec.special_id(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def arguments_rules(rule: str, function: Function, only: bool, work: Work) -> str:
    """Rules of a function's arguments as JSON, as far as a grammar can enforce their schema. Raises ApiError for what
    it cannot if the function is the `only` one that may be called, or is strict."""
    try:
        schema, problems = loosened_schema(function.parameters or {}, work)
        rules = schema_rules(rule, _of_an_object(schema), work)
    except SchemaError as error:
        rules, problems = schema_rules(rule, ANY_OBJECT, Work()), [str(error)]
    if problems and (only or function.strict):
        reasons = "; ".join(problems[:MOST_REASONS])
        raise ApiError(f"tools: the parameters of {function.name!r} cannot be enforced: {reasons}", "tools")
    return rules


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema's objects, on one line; that of none if it names no keys."""
    schema = {"type": "object"} | {name: value for name, value in schema.items() if name not in ("type", "x-guidance")}
    return schema if schema.get("properties") or schema.keys() - {"type", "properties"} else NO_PARAMETERS


Grammar = Callable[[Sequence[Function], bool, TextCodec], CallGrammar]
"""The grammar of a call of one of the functions or, where the flag says so, of one or more."""

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
FUNCTION = "<function="
PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _deepseek_mark(words: str) -> str:
    """A mark of DeepSeek's, with a fullwidth bar and a character of its own for spaces."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = _deepseek_mark("tool calls begin"), _deepseek_mark("tool calls end")
DEEPSEEK_CALL, DEEPSEEK_CALL_END = _deepseek_mark("tool call begin"), _deepseek_mark("tool call end")
DEEPSEEK_SEPARATOR = _deepseek_mark("tool sep")
FUNCTION_GEMMA_CALL, FUNCTION_GEMMA_CALL_END, FUNCTION_GEMMA_QUOTE = (
    "<start_function_call>", "<end_function_call>", "<escape>",
)  # fmt: skip
GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MISTRAL_ID_LENGTH = 9
"""Mistral's chat templates refuse ids of another length."""
_ID_CHARACTERS = string.ascii_letters + string.digits
_MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*")
_DEEPSEEK_HEAD = re.compile(
    rf"\s*(?:function{re.escape(DEEPSEEK_SEPARATOR)})?\s*([\w.-]+)\s*(?:{re.escape(DEEPSEEK_SEPARATOR)})?\s*(?:```json)?\s*"
)
_QWEN_TAGS = Tags(
    head=re.compile(r"([\w.-]+)\s*"), head_end=">",
    key="<parameter=", key_end=">", value="", value_end="</parameter>", end="</function>", own_lines=True,
)  # fmt: skip
_GLM_TAGS = Tags(
    head=re.compile(r"\s*([\w.-]+)\s*"), head_end="",
    key="<arg_key>", key_end="</arg_key>", value="<arg_value>", value_end="</arg_value>", end=CALL_END, own_lines=False,
)  # fmt: skip


@dataclass(frozen=True)
class ToolForm:
    """How models of a family write tool calls."""

    name: str
    read: Callable[[CallReader], Reading[None]]
    """An answer's pieces."""
    marks: tuple[str, ...]
    """What marks the calls. Where it is a special token, an answer's text has it only on request."""
    grammar: Grammar
    """That of forced calls, which `read` reads too. It is Hermes' or Llama's where arguments are no JSON."""
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    """Ids that the chat templates take."""


def _read_hermes(answer: CallReader) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number of them, anywhere. Small models forget the
    marks: then the answer begins with the object."""
    while (yield from answer.call(CALL_END, bare=True)):
        yield from answer.skip(CALL_END)
    while (yield from answer.text_until(CALL)):
        yield from _read_objects(answer)


def _read_objects(answer: CallReader) -> Reading[None]:
    """Hermes' object up to the mark of its end. Small models write several there, or one brace too many."""
    while (yield from answer.call(CALL_END)):
        yield from answer.skip("}")
        if (yield from answer.skip(CALL_END)) or (yield from answer.peek()) != "{":
            return


def _hermes(functions: Sequence[Function], several: bool, codec: TextCodec) -> CallGrammar:
    again = " ".join(terminal(part, codec) for part in ("\n", CALL, "\n"))
    calls = f"calls: call ({again} call)*" if several else "calls: call"
    call = _object_calls("call", functions, "arguments", ("\n", CALL_END), codec)
    return CallGrammar((CALL, "\n"), f"{calls}\n{call}")


def _read_qwen3_coder(answer: CallReader) -> Reading[None]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, or Hermes' object. The model
    may forget the outer mark."""
    while mark := (yield from answer.text_until(CALL, FUNCTION)):
        if mark == CALL and (yield from answer.peek()) == "{":
            yield from _read_objects(answer)
        elif (mark == FUNCTION or (yield from answer.skip(FUNCTION))) and (yield from answer.tagged_call(_QWEN_TAGS)):
            yield from answer.skip(CALL_END)


def _read_glm45(answer: CallReader) -> Reading[None]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, or Hermes' object."""
    while (yield from answer.text_until(CALL)):
        if (yield from answer.peek()) != "{":
            yield from answer.tagged_call(_GLM_TAGS)
        else:
            yield from _read_objects(answer)


def _read_llama3(answer: CallReader) -> Reading[None]:
    """`{"name": ..., "parameters": ...}` where the answer begins or after `<|python_tag|>`; a `;` between several."""
    while True:
        while (yield from answer.call(bare=True)):
            yield from answer.skip(";")
        if not (yield from answer.text_until(PYTHON_TAG)):
            return


def _llama3(functions: Sequence[Function], _: bool, codec: TextCodec) -> CallGrammar:
    """One call: the templates write no more."""
    return CallGrammar((), _object_calls("calls", functions, "parameters", (), codec))


def _read_pythonic(answer: CallReader) -> Reading[None]:
    """`[NAME(KEY=VALUE), ...]` where the answer begins or after a mark of Llama 4, or Llama 3's objects."""
    while True:
        if (yield from answer.peek()) == "[":
            if (yield from answer.python_call("[")):
                while (yield from answer.python_call(",")):
                    pass
                yield from answer.skip("]")
        else:
            while (yield from answer.call(bare=True)):
                yield from answer.skip(";")
        yield from answer.skip(PYTHON_END)
        if not (yield from answer.text_until(PYTHON_TAG, PYTHON_START)):
            return


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
            yield from answer.named_call(_MISTRAL_HEAD)


def _mistral(functions: Sequence[Function], several: bool, codec: TextCodec) -> CallGrammar:
    """A list of calls, or one call of the newer form where the vocabulary has a token for that."""
    if codec.special_id(ARGS) is None:
        more = ' (", " call)*' if several else ""
        call = _object_calls("call", functions, "arguments", (), codec)
        return CallGrammar((TOOL_CALLS,), f'calls: "[" call{more} "]"\n{call}')
    return CallGrammar((TOOL_CALLS,), _named_calls("calls", functions, (), (ARGS,), (), codec))


def _mistral_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(MISTRAL_ID_LENGTH))


def _read_deepseek(answer: CallReader) -> Reading[None]:
    """Any number of calls between their marks, each with its name, a separator and the arguments; in V3 the word
    `function`, a separator, the name, and the arguments as a block of Markdown."""
    while mark := (yield from answer.text_until(DEEPSEEK_CALLS, DEEPSEEK_CALL)):
        if mark == DEEPSEEK_CALLS and not (yield from answer.skip(DEEPSEEK_CALL)):
            continue
        if (yield from answer.named_call(_DEEPSEEK_HEAD, DEEPSEEK_CALL_END)):
            yield from answer.skip("```")
            yield from answer.skip(DEEPSEEK_CALL_END)
            yield from answer.skip(DEEPSEEK_CALLS_END)


def _deepseek(
    before: Sequence[str], after: Sequence[str], end: Sequence[str], between: Sequence[str]
) -> Callable[[Sequence[Function], bool, TextCodec], CallGrammar]:
    """The grammar with what comes before and after a call's name, after its arguments and between calls."""

    def grammar(functions: Sequence[Function], several: bool, codec: TextCodec) -> CallGrammar:
        again = " ".join(terminal(part, codec) for part in (*between, DEEPSEEK_CALL))
        calls = f"calls: call ({again} call)* " if several else "calls: call "
        call = _named_calls("call", functions, before, after, end, codec)
        return CallGrammar((DEEPSEEK_CALLS, DEEPSEEK_CALL), f"{calls}{terminal(DEEPSEEK_CALLS_END, codec)}\n{call}")

    return grammar


def _named_calls(
    rule: str,
    functions: Sequence[Function],
    before: Sequence[str],
    after: Sequence[str],
    end: Sequence[str],
    codec: TextCodec,
    write: Callable[[str], str] = str,
) -> str:
    """A rule of a call: the name, as it is written, between texts or special tokens, the arguments as JSON, an end."""
    calls, objects, work = [], [], Work()
    for index, function in enumerate(functions):
        head = [terminal(part, codec) for part in (*before, write(function.name), *after)]
        # An error of the library names the rule, and so the function.
        name = f"arguments_of_{re.sub('[^a-z0-9]+', '_', function.name.lower())}_{index}"
        calls.append(" ".join([*head, name, *(terminal(part, codec) for part in end)]))
        objects.append(arguments_rules(name, function, len(functions) == 1, work))
    return "\n".join((f"{rule}: {' | '.join(calls)}", *objects))


def _object_calls(
    rule: str, functions: Sequence[Function], arguments: str, end: Sequence[str], codec: TextCodec
) -> str:
    """A rule of a call: an object with a `name`, and the arguments under the name that is given; then an end."""
    # In the library's own parts of an object: a longer text here would hide what else may begin like it.
    head, rest = ("{", '"name"', ": "), (", ", json.dumps(arguments), ": ")
    return _named_calls(rule, functions, head, rest, ("}", *end), codec, json.dumps)


def _read_braced(mark: str, end: str, quote: str) -> Callable[[CallReader], Reading[None]]:
    """A reader of `call:NAME{KEY:VALUE}` between a mark and an end, or of Hermes' form."""

    def read(answer: CallReader) -> Reading[None]:
        while written := (yield from answer.text_until(mark, CALL)):
            if written == mark:
                yield from answer.braced_call(quote, end)
            else:
                yield from _read_objects(answer)

    return read


HERMES = ToolForm("hermes", _read_hermes, (CALL, CALL_END), _hermes)
LLAMA3 = ToolForm("llama3", _read_llama3, (PYTHON_TAG,), _llama3)
MISTRAL = ToolForm("mistral", _read_mistral, (TOOL_CALLS, ARGS, CALL_ID), _mistral, _mistral_id)
QWEN3_CODER = ToolForm("qwen3_coder", _read_qwen3_coder, (CALL, CALL_END), _hermes)
PYTHONIC = ToolForm("pythonic", _read_pythonic, (PYTHON_TAG, PYTHON_START, PYTHON_END), _llama3)
GLM45 = ToolForm("glm45", _read_glm45, (CALL, CALL_END, "<arg_key>", "<arg_value>"), _hermes)
_DEEPSEEK_MARKS = (DEEPSEEK_CALLS, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END, DEEPSEEK_CALLS_END)
DEEPSEEK_V3 = ToolForm(
    "deepseek_v3",
    _read_deepseek,
    _DEEPSEEK_MARKS,
    _deepseek(("function", DEEPSEEK_SEPARATOR), ("\n```json\n",), ("\n```", DEEPSEEK_CALL_END), ("\n",)),
)
DEEPSEEK_V31 = ToolForm(
    "deepseek_v31",
    _read_deepseek,
    _DEEPSEEK_MARKS,
    _deepseek((), (DEEPSEEK_SEPARATOR,), (DEEPSEEK_CALL_END,), ()),
)
FUNCTION_GEMMA = ToolForm(
    "functiongemma",
    _read_braced(FUNCTION_GEMMA_CALL, FUNCTION_GEMMA_CALL_END, FUNCTION_GEMMA_QUOTE),
    (FUNCTION_GEMMA_CALL, FUNCTION_GEMMA_CALL_END, FUNCTION_GEMMA_QUOTE),
    _hermes,
)
GEMMA4 = ToolForm(
    "gemma4",
    _read_braced(GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE),
    (GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE),
    _hermes,
)
_ALL = (HERMES, LLAMA3, MISTRAL, QWEN3_CODER, PYTHONIC, GLM45, DEEPSEEK_V3, DEEPSEEK_V31, FUNCTION_GEMMA, GEMMA4)
FORMS = {form.name: form for form in _ALL}
"""By the names that `--tool-parser` takes."""


def tool_form(template: str) -> ToolForm | None:
    """The form that a chat template writes calls in; None where it is not known."""
    signs = (
        (TOOL_CALLS, MISTRAL),
        (DEEPSEEK_CALLS, DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31),
        (FUNCTION_GEMMA_CALL, FUNCTION_GEMMA),
        (GEMMA_CALL, GEMMA4),
        (FUNCTION, QWEN3_CODER),
        ("<arg_key>", GLM45),
        (CALL, HERMES),
        (PYTHON_TAG, LLAMA3),
        ('{"name": function name, "parameters": ', LLAMA3),
        ("func_name1(", PYTHONIC),
    )
    return next((form for sign, form in signs if sign in template), None)


def written_out(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation of `chat.turns` for templates that have no place for tools: in texts only, after a system message
    with the tools, if there are any."""
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
