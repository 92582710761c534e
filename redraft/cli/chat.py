"""`redraft chat`: a conversation with a bundle, in a terminal or between pipes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from redraft.chat import ChatMessage
from redraft.cli.options import MethodOption, SeedOption, TemperatureOption, ThreadsOption, TopPOption
from redraft.console.interrupt import noted_interrupts
from redraft.console.output import err, fail, out
from redraft.console.template_options import TemplateOptions
from redraft.errors import read_text, reason
from redraft.llm import LLM
from redraft.output import Output
from redraft.request import INT32_MAX, Guide, InvalidRequest, Options, SequenceStats, request
from redraft.text import TextStream

DRAFTED = "green"
"""Style of drafted tokens."""
HELP = """\
/help   this list
/stats  statistics of each answer
/reset  begin a new conversation
/quit   end (or Ctrl-D)
Ctrl-C  stop an answer"""


def main(
    bundle: Annotated[Path, typer.Argument(help="Engine bundle, such as artifacts/engines/NAME.")],
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=INT32_MAX, help="Tokens of an answer at most; default: all that fit the context."),
    ] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    method: MethodOption = None,
    system: Annotated[str | None, typer.Option(help="System message; default: the chat template's own.")] = None,
    chat_template_kwargs: TemplateOptions = None,
    schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of a JSON schema that every answer meets; default: free text."),
    ] = None,
    threads: ThreadsOption = None,
) -> None:
    """Talk to a bundle in this process. No service is needed."""
    options: Options = {"temperature": temperature, "top_p": top_p, "seed": seed, "method": method}
    try:
        if schema is not None:
            options["guide"] = Guide(kind="json_schema", text=read_text(schema, "--schema"))
        with err.status("loading the bundle"):
            llm = LLM(bundle, threads)
        llm.runtime.sequence(None, request("Hello", 1, **options))
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"redraft chat: {reason(error)}")
    if out.is_terminal:
        out.print(HELP)
        out.print("drafted tokens that the target accepted look like this", style=DRAFTED)
    with llm:
        Conversation(llm, out, options, max_tokens, system, chat_template_kwargs).run(typed_lines())


class Conversation:
    """The messages so far and what their answers cost."""

    def __init__(
        self,
        llm: LLM,
        console: Console,
        options: Options,
        max_tokens: int | None = None,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        self._llm, self._console, self._options, self._max_tokens = llm, console, options, max_tokens
        self._chat_template_kwargs = chat_template_kwargs
        self._begin: list[ChatMessage] = [{"role": "system", "content": system}] if system is not None else []
        self.reset()

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._messages = list(self._begin)
        self._stats: list[SequenceStats] = []

    def run(self, lines: Iterator[str]) -> None:
        """Answer each line, or do what it commands, until `/quit` or the end."""
        for line in map(str.strip, lines):
            if line == "/quit":
                return
            if line == "/reset":
                self.reset()
            elif line == "/stats":
                self._print("\n".join(map(str, self._stats)) or "no finished answer yet")
            elif line == "/help":
                self._print(HELP)
            elif line.startswith("/"):
                self._print(f"{line.split()[0]}: no such command\n{HELP}")
            elif line:
                self._answer(line)

    def _answer(self, text: str) -> None:
        """Print an answer as it comes. Ctrl-C ends it; what was said until then belongs to the conversation. A terminal
        says so of an answer that was cut."""
        asked = [*self._messages, {"role": "user", "content": text}]
        options: Options = {**self._options, "add_special_tokens": False}
        try:
            prompt = self._llm.render(asked, chat_template_kwargs=self._chat_template_kwargs)
            stream = self._llm.stream(prompt, self._max_tokens, **options)
        except InvalidRequest as error:
            self._print(f"{error} (/reset begins a new conversation)")
            return
        codec = self._llm.runtime.codec
        written = TextStream(codec, codec.encode(prompt, add_special_tokens=False))
        said, note = "", ""
        with noted_interrupts() as interrupted, contextlib.closing(stream):
            for output in stream:
                for piece, drafted in pieces(output, written):
                    said += piece
                    self._console.print(piece, end="", style=DRAFTED if drafted else None, markup=False)
                if output.stats:
                    self._stats.append(output.stats)
                    if output.finish_reason == "length" and self._console.is_terminal:
                        note = f" (cut after {output.stats.output_tokens} tokens)"
                if interrupted.is_set():
                    break
        self._print(" (stopped)" if interrupted.is_set() else note)
        self._messages = [*asked, {"role": "assistant", "content": said}]

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)


def pieces(output: Output, text: TextStream) -> Iterator[tuple[str, bool]]:
    """The text of each token of an output, and whether it was drafted. A character of several tokens comes with its
    last one."""
    for token, drafted in zip(output.token_ids, output.drafted, strict=True):
        text.push(token)
        yield text.take(), drafted
    if output.finish_reason:
        text.finish()
        yield text.take(), False


def typed_lines(prompt: str = "> ") -> Iterator[str]:
    """Lines typed in a terminal, which can be edited and recalled, or those of a pipe. Ctrl-C drops a line."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() takes its editing and history
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends the conversation)")
        except EOFError:
            print()
            return
