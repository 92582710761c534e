"""`redraft chat` on the toy engine."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from redraft import LLM
from redraft.cli.chat import HELP, Conversation, pieces
from redraft.output import Output
from redraft.request import InvalidRequest
from redraft.text import TextStream
from tests.test_llm import toy_runtime
from tests.toy_engine import toy_codec

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def llm(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    runtime = toy_runtime()
    runtime.path = tmp_path
    with LLM(runtime) as loaded:
        yield loaded


def conversation(llm, lines, terminal=False, **options):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, color_system="standard" if terminal else None,
                      soft_wrap=True, highlight=False)  # fmt: skip
    talk = Conversation(llm, console, {}, **{"max_tokens": 20} | options)
    talk.run(iter(lines))
    return talk, screen.getvalue()


def test_turns_follow_each_other(llm):
    first = llm.generate("s:be brief;u:hello;a:", max_tokens=20)
    second = llm.generate(f"s:be brief;u:hello;a:{first.text};u:more;a:", max_tokens=20)
    talk, shown = conversation(llm, ["hello\n", "\n", "more\n", "/stats\n", "/quit\n", "never\n"], system="be brief")
    texts, statistics = shown.splitlines()[:-2], shown.splitlines()[-2:]
    assert "\n".join(texts) == f"{first.text}\n{second.text}"
    drafted, reused = r"\d+ of \d+ drafted tokens accepted", r"\d+ prompt tokens reused"
    assert all(re.fullmatch(rf"\d+ tokens in .*tokens/step, {drafted}, {reused}", line) for line in statistics)
    assert llm.runtime.scheduler.totals.requests == 4
    talk.reset()
    assert conversation(llm, ["hello", "/reset", "hello"], system="be brief")[1] == f"{first.text}\n" * 2


def test_options_of_the_template(llm):
    (llm.runtime.path / "chat_template.jinja").write_text(
        TEMPLATE + "{% if enable_thinking is false %}quiet{% endif %}"
    )
    expected = llm.generate("u:hello;a:quiet", max_tokens=20).text
    _, shown = conversation(llm, ["hello"], chat_template_kwargs={"enable_thinking": False})
    assert shown == f"{expected}\n"
    answer = llm.chat("hello", 20, chat_template_kwargs={"enable_thinking": False})
    assert llm.chat("hello", 20, reasoning_effort="none").text == answer.text
    assert llm.render("hello", reasoning_effort="none").endswith("quiet")
    assert not llm.render("hello", reasoning_effort="high").endswith("quiet")
    with pytest.raises(InvalidRequest, match="reasoning_effort: expected one of none, minimal"):
        llm.render("hello", reasoning_effort="lots")
    assert answer.text == expected
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}]
    (llm.runtime.path / "chat_template.jinja").write_text(TEMPLATE.removesuffix("a:"))
    answer = llm.chat(begun, 20, continue_final_message=True)
    assert answer.text == llm.generate("u:hello;a:Well", max_tokens=20).text
    with pytest.raises(InvalidRequest, match="continue_final_message: expected add_generation_prompt false"):
        llm.chat(begun, continue_final_message=True, add_generation_prompt=True)


def test_commands_are_listed(llm):
    assert conversation(llm, ["/help"])[1] == f"{HELP}\n"
    assert conversation(llm, ["/exit"])[1] == f"/exit: no such command\n{HELP}\n"


def test_drafted_tokens_are_coloured_in_a_terminal(llm):
    expected = llm.chat("hello", max_tokens=40)
    shown = conversation(llm, ["hello"], terminal=True, max_tokens=40)[1]
    assert ESCAPE.sub("", shown) == f"{expected.text} (cut after 40 tokens)\n"
    text = TextStream(llm.runtime.codec, llm.runtime.codec.encode("u:hello;a:"))
    outputs = llm.stream("u:hello;a:", max_tokens=40)
    drafted = [piece for output in outputs for piece, flag in pieces(output, text) if flag]
    assert "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown)) == "".join(drafted) != ""
    assert "\x1b" not in conversation(llm, ["hello"])[1]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(llm, monkeypatch):
    engine, execute, calls = llm.runtime.engine, llm.runtime.engine.execute, []

    def third_step_is_interrupted(*given):
        calls.append(given)
        if len(calls) == 3:
            signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
        return execute(*given)

    monkeypatch.setattr(engine, "execute", third_step_is_interrupted)
    before = signal.getsignal(signal.SIGINT)
    shown = conversation(llm, ["hello", "again"], max_tokens=40)[1]
    stopped, second = shown.splitlines()
    text = stopped.removesuffix(" (stopped)")
    assert stopped != text
    assert llm.generate("u:hello;a:", 40).text.startswith(text)
    assert second == llm.generate(f"u:hello;a:{text};u:again;a:", 40).text
    assert signal.getsignal(signal.SIGINT) is before


def test_what_the_bundle_cannot_answer_is_said_and_forgotten(llm):
    expected = llm.chat("hello", max_tokens=20).text
    refused, answered = conversation(llm, ["x" * 300, "hello"])[1].splitlines()
    assert "expected at most 255" in refused
    assert "/reset" in refused
    assert answered == expected


def test_an_unknown_command_is_named_and_not_answered(llm):
    first, *_ = conversation(llm, ["/stast now"])[1].splitlines()
    assert first.startswith("/stast: ")
    assert llm.runtime.scheduler.totals.requests == 0


def test_the_text_of_tokens_joins_to_the_text_of_all():
    """These tokens are bytes: most characters of other scripts take several."""
    codec = toy_codec(257)

    text = "naïve 漢字 🙂"
    tokens = codec.encode(text)
    stream = TextStream(codec)
    outputs = [Output(key=0, token_ids=[t], drafted=[True]) for t in tokens[:-1]]
    outputs.append(Output(key=0, token_ids=tokens[-1:], drafted=[True], finish_reason="length"))
    assert "".join(piece for output in outputs for piece, _ in pieces(output, stream)) == text


def test_lines_come_from_a_pipe():
    code = "from redraft.cli.chat import typed_lines; print([line for line in typed_lines()])"
    done = subprocess.run([sys.executable, "-c", code], input="a\nb", capture_output=True, text=True, check=True)
    assert done.stdout == "['a\\n', 'b']\n"
