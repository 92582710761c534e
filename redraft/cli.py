"""The `redraft` command."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from redraft.console.output import err, fail, out
from redraft.console.template_options import TemplateOptions
from redraft.errors import BundleError
from redraft.request import INT32_MAX, Guide, Options, request

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"redraft {metadata.version('redraft')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding, here or served under Triton."""


@app.command()
def chat(
    bundle: Annotated[Path, typer.Argument(help="Engine bundle, such as artifacts/engines/NAME.")],
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=INT32_MAX, help="Most tokens of an answer; default: all that fit the context."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Absent: greedy decoding.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Applies with a temperature only.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1)] = None,
    method: Annotated[str | None, typer.Option(help="A drafting method of the bundle, or auto_regressive.")] = None,
    system: Annotated[str, typer.Option(help="System message; default: the chat template's own.")] = "",
    chat_template_kwargs: TemplateOptions = None,
    schema: Annotated[Path | None, typer.Option(help="File of a JSON schema that every answer meets.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the engine; default: all cores.")] = None,
) -> None:
    """Talk to a bundle in this process. No service is needed."""
    from redraft.bundle.budget import untuned_warning
    from redraft.console.chat import DRAFTED, HELP, Conversation, typed_lines
    from redraft.llm import LLM

    options: Options = {"temperature": temperature, "top_p": top_p, "seed": seed, "method": method}
    try:
        if schema is not None:
            options["guide"] = Guide(kind="json_schema", text=schema.read_text())
        with err.status("loading the bundle"):
            llm = LLM(bundle, threads)
        llm.runtime.sequence(None, request("Hello", 1, **options))
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"redraft chat: {error}")
    if llm.runtime.untuned:
        err.print(f"warning: {untuned_warning(llm.runtime.untuned, bundle)}", markup=False)
    if out.is_terminal:
        out.print(HELP)
        out.print("drafted tokens that the target accepted look like this", style=DRAFTED)
    with llm:
        Conversation(llm, out, options, max_tokens, system, chat_template_kwargs).run(typed_lines())


def add_serving() -> None:
    """Add the commands of a service, or, without the packages of the extra `serve`, commands that ask for them."""
    try:
        from redraft.serving import commands
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith("redraft"):
            raise

        def refuse() -> None:
            """Needs the packages of the extra `serve`."""
            fail(f"redraft: serving needs {missing}: pip install 'redraft[serve]'")

        for name in ("serve", "swap", "stop", "status", "generate"):
            app.command(name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(refuse)
    else:
        app.add_typer(commands.app)


@app.command()
def doctor(
    bundle: Annotated[Path, typer.Argument(help="Engine bundle to examine.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts of your own, to measure acceptance on them too.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the engine; default: all cores.")] = None,
) -> None:
    """Say why a bundle is slow. Or why its drafts are rejected; the exit status is 1 where something is wrong."""
    from redraft.doctor import examine
    from redraft.engines.ranks.process import is_first

    wrong = False
    try:
        with err.status("measuring"):
            for finding in examine(bundle, prompts, threads):
                if is_first():
                    out.print(str(finding), markup=False)
                wrong |= bool(finding.remedy)
    except (BundleError, OSError, ValueError) as error:
        fail(f"redraft doctor: {error}", code=2)
    except KeyboardInterrupt:
        fail("redraft doctor: interrupted", code=130)
    raise typer.Exit(int(wrong))


add_serving()


if __name__ == "__main__":
    app()
