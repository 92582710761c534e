"""Chat templates run in a process that may die, with bounds on time and memory."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from redraft.templates import renderer as module
from redraft.templates.renderer import CannotWrite, Renderer, TemplateError

LOOP, END = "{% for a in range(99999) %}", "{% endfor %}"


@pytest.fixture
def renderer():
    made = Renderer()
    yield made
    made.close()


@pytest.mark.parametrize(
    "source",
    [
        3 * LOOP + 3 * END,
        "{{ 'a' * 3000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_what_takes_too_much_ends_and_the_next_is_served(renderer, source, monkeypatch):
    monkeypatch.setattr(module, "CPU_S", 0.3)
    for _ in range(2):
        with pytest.raises(TemplateError, match=r"takes more than 0.3 s or 1 GiB"):
            renderer.render(source, {"a": "xxxx"})
    assert renderer.render("{{ a }}", {"a": 1}) == "1"


def test_what_goes_wrong_is_named(renderer):
    with pytest.raises(TemplateError, match=r"cannot be read: line 2: Encountered unknown tag 'nonsense'"):
        renderer.check("a\n{% nonsense %}")
    with pytest.raises(TemplateError, match="no users"):
        renderer.render("{{ raise_exception('no users') }}", {})
    with pytest.raises(CannotWrite, match="cannot write these messages: TypeError"):
        renderer.render("{{ 1 + a }}", {"a": "x"})
    with pytest.raises(ValueError, match="expected values that JSON has"):
        renderer.render("x", {"a": object()})
    renderer.check("{{ raise_exception('only when it runs') }}")


def test_templates_cannot_leave_the_sandbox(renderer):
    with pytest.raises(TemplateError, match="unsafe"):
        renderer.render("{{ ''.__class__.__mro__ }}", {})


def test_any_text_comes_back_as_it_was(renderer):
    text = "é日🙂\n\u2028\r\x00\ud800"
    assert renderer.render("{{ a }}|{{ a | tojson }}", {"a": text}).startswith(text)


def test_a_process_that_died_meanwhile_is_replaced(renderer):
    assert renderer.render("{{ a }}", {"a": 1}) == "1"
    os.kill(renderer._process.pid, signal.SIGKILL)
    renderer._process.wait()
    assert renderer.render("{{ a }}", {"a": 2}) == "2"


def test_threads_get_their_own_texts(renderer):
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda number: renderer.render("{{ a }}", {"a": number}), range(200)))
    assert texts == list(map(str, range(200)))


def test_a_fork_has_a_process_of_its_own(renderer):
    assert module.RENDERER.render("{{ a }}", {"a": 1}) == "1"
    if (child := os.fork()) == 0:
        os._exit(int(module.RENDERER.render("{{ a }}", {"a": 7})))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert module.RENDERER.render("{{ a }}", {"a": 2}) == "2"


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no ' * 1000000) }}", "{{ " + "a" * 1000000 + "( }}", "{% " + "x" * 1000000 + " %}"]
)
def test_a_long_reason_is_cut(renderer, source):
    with pytest.raises(TemplateError) as refusal:
        renderer.render(source, {})
    assert len(str(refusal.value)) < 1100
