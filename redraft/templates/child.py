"""The process that renders: a request and its answer are lines of JSON on standard input and output.

A template is a program that came with a model. It may loop for ever or take all memory, also while it is compiled. The
kernel ends the process at a time and a size, whatever code it is in.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_REASON = 1000
"""Characters"""


class Generation(Extension):
    """`{% generation %}` blocks, which mark an assistant's text for training and change nothing of it."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Refused(Exception):
    """The template refuses the messages."""


def answer(request: dict[str, Any], most_characters: int) -> dict[str, str]:
    """The text of a request's template or, without values, an empty one if it can be read."""
    try:
        template = _compiled(request["source"])
    except TemplateSyntaxError as error:
        return {"unreadable": f"line {error.lineno}: {_start(error.message)}"}
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # what Python's own compiler says of the code that jinja2 made of it
        return {"unreadable": f"{type(error).__name__}: {_start(error)}"}
    if (values := request.get("values")) is None:
        return {"text": ""}
    try:
        text = template.render(values)
    except (Refused, TemplateError) as error:
        return {"refused": _start(error)}
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # a template is a program: it may do anything with fields it does not expect
        return {"failed": type(error).__name__}
    if len(text) > most_characters:
        return {"refused": f"the prompt has {len(text)} characters: expected at most {most_characters}"}
    return {"text": text}


def _start(reason: object) -> str:
    """Cut a reason to what an error message holds: a template may write one of any length."""
    text = str(reason)
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."


@lru_cache(8)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes what HTML would not take."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    """Today's date, as templates of Llama 3 and Mistral write it."""
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise Refused(message)


def main(cpu_s: float, memory_bytes: int, most_characters: int) -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe when it ends
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, most))
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
        try:
            result = answer(json.loads(line), most_characters)
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        text = json.dumps(result, ensure_ascii=False) + "\n"
        sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
