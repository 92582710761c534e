"""The live page in a headless Chromium, before the real front end and a model that says what it is asked.

A chat's answers are its questions, so all drafts are n-grams of the prompt. Nothing here waits for a time: on a slow
machine the tests take longer, and that is all.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.openai.page.chromium import EXECUTABLE, chromium
from tests.openai.parrot_worker import PARROT_LIMITS, VOCABULARY
from tests.openai.serving import FrontEnd, front_end, toy_bundle

pytestmark = [pytest.mark.slow, pytest.mark.skipif(EXECUTABLE is None, reason="needs Debian's chromium")]

TIMEOUT_MS = 120_000
"""A hang fails the test; a slow machine does not."""
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}<assistant>"
"""Each message has its end token, which n-grams then guess after the answer."""
QUESTION, OTHER_QUESTION = "One fish, two fish, red fish, blue fish.", "Black fish, blue fish."
DESKTOP, TABLET, PHONE = ({"width": width, "height": height} for width, height in ((1440, 900), (900, 700), (390, 844)))
REFUSED = "the server responded with a status of"
"""What Chromium itself logs of a refused request."""
LABELS = """() => {
  const labels = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    const drawn = element.ownerSVGElement;
    const scale = drawn ? drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width : 1;
    labels.push([texts.currentNode.textContent, scale * parseFloat(getComputedStyle(element).fontSize)]);
  }
  return labels;
}"""
"""Every text that the page shows, with its size in px as drawn."""
BEYOND = """() => [...document.querySelectorAll('header *, .chat *, .figures *, .bar *, .legend *')]
  .filter((element) => element.checkVisibility() && !element.closest('svg') && (
    element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== 'inline'
    || element.getBoundingClientRect().right > innerWidth + 1))
  .map((element) => element.outerHTML.slice(0, 200))"""
"""Elements that are wider than the screen or whose content is wider than they are."""


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    bundle = toy_bundle(tmp_path_factory.mktemp("parrot"), TEMPLATE, VOCABULARY, PARROT_LIMITS.max_len)
    with (  # in a short path: a socket's may have 107 characters
        tempfile.TemporaryDirectory(prefix="redraft-test-") as folder,
        front_end(Path(folder), bundle, worker="tests/openai/parrot_worker.py") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT_MS)
    with chromium(TIMEOUT_MS) as running:
        yield running


@contextmanager
def opened(browser: Browser, server: FrontEnd, size: dict[str, int], refusals: bool = False) -> Iterator[Page]:
    """The page as a new visitor sees it. It may log no error, but for `refusals`, and load nothing from elsewhere."""
    context = browser.new_context(viewport=size)
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    errors, loaded = list[str](), set[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: loaded.add(request.url.removeprefix(server.url)))
    page.goto(server.url)
    yield page
    context.close()
    assert [error for error in errors if not (refusals and REFUSED in error)] == []
    assert loaded <= {"/", "/page.css", "/page.js", "/icon.svg", "/v1/models", "/v1/chat/completions", "/metrics"}


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def page(browser: Browser, parrot: FrontEnd, request: pytest.FixtureRequest) -> Iterator[Page]:
    with opened(browser, parrot, request.param) as page:
        yield page


@pytest.fixture
def desktop(browser: Browser, parrot: FrontEnd) -> Iterator[Page]:
    with opened(browser, parrot, DESKTOP) as page:
        yield page


def ask(page: Page, question: str) -> Locator:
    """Ask, and wait for the end of the answer, which is returned."""
    count = page.locator(".user").count()
    page.get_by_label("Your message").fill(question)
    page.get_by_label("Your message").press("Enter")
    expect(page.locator(".user")).to_have_count(count + 1)
    return ended(page)


def ended(page: Page) -> Locator:
    """The last answer, after its end."""
    answer = page.locator(".answer").last
    expect(answer.locator(".text:not(.running)")).to_be_attached()
    return answer


@contextmanager
def held(page: Page, plain: bool) -> Iterator[list[Route]]:
    """Keep requests of plain decoding, or else the others, from the server. They come into the list."""
    routes = list[Route]()

    def handle(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        if (body.get("speculative") is False) == plain:
            routes.append(route)
        else:
            route.continue_()

    page.route("**/v1/chat/completions", handle)
    yield routes
    for route in routes:
        route.abort()


def first_of(routes: list[Route], page: Page) -> Route:
    """The first request that is held, once the page has sent it."""
    while not routes:
        page.wait_for_timeout(20)
    return routes[0]


def test_the_first_answer_is_compared_by_itself(page):
    """Nobody has to find out that plain decoding can be run beside it."""
    answer = ask(page, QUESTION)
    expect(answer.locator(".text")).to_have_text(QUESTION)
    expect(answer.locator(".text .ngrams").first).to_be_attached()
    expect(answer.locator(".verdict")).to_contain_text("✓ the same text")
    expect(answer.locator(".verdict")).to_have_text(re.compile(r"[\d.]+. as fast.* tokens per step instead of 1"))
    expect(answer.get_by_role("button")).to_have_count(0)
    assert all(re.match(r"\d", figure) for figure in page.locator("dd").all_inner_texts())


def test_a_question_need_not_wait_for_the_list_of_methods(desktop):
    """The server chooses."""
    desktop.route("**/v1/models", lambda route: None)
    desktop.reload()
    expect(ask(desktop, QUESTION).locator(".text .ngrams").first).to_be_attached()


def test_later_answers_have_an_invitation(desktop):
    ask(desktop, QUESTION)
    expect(desktop.locator(".verdict")).to_contain_text("the same text")
    answer = ask(desktop, OTHER_QUESTION)
    expect(answer.locator(".verdict")).to_have_count(0)
    answer.get_by_role("button", name="Run it by plain decoding too").click()
    expect(answer.locator(".verdict")).to_contain_text("the same text")


def test_who_types_is_not_kept_by_a_comparison(desktop):
    """The comparison does not begin, and stands there as an invitation."""
    with held(desktop, plain=False) as requests:
        message = desktop.get_by_label("Your message")
        message.fill(QUESTION)
        message.press("Enter")
        request = first_of(requests, desktop)
        message.fill("And another")
        requests.clear()
        request.continue_()
        answer = ended(desktop)
        expect(answer.get_by_role("button", name="Run it by plain decoding too")).to_be_enabled()
        expect(message).to_have_value("And another")


def test_a_comparison_gives_way_to_a_question(desktop):
    """And waits, as an invitation, for who wants it later."""
    with held(desktop, plain=True) as requests:
        ask(desktop, QUESTION)
        first_of(requests, desktop)
        expect(desktop.locator(".compare .row")).to_have_count(2)
        second = ask(desktop, OTHER_QUESTION)
        expect(second.locator(".text")).to_have_text(OTHER_QUESTION)
        expect(desktop.get_by_role("button", name="Run it by plain decoding too")).to_have_count(2)
        assert len(requests) == 1


def test_each_step_shows_its_tree(page):
    answer = ask(page, QUESTION)
    columns = page.locator("#timeline button")
    steps = columns.count()
    assert 2 < steps < len(QUESTION)
    assert page.locator("#count").inner_text() == f"{steps - 1} for {len(QUESTION) - 1} tokens"  # the prompt's is apart
    answer.locator(".text .ngrams").last.click()
    expect(page.locator("#outcome")).to_have_text(re.compile(r"\d+ guess(?:es)? checked, [1-9]\d* kept: \d+ tokens?"))
    kept = int(re.findall(r"(\d+) kept", page.locator("#outcome").inner_text())[0])
    expect(page.locator("#tree g.node.kept")).to_have_count(kept + 2)  # the root and the model's own token too
    page.locator("#tree").press("ArrowLeft")
    page.get_by_role("button", name="Step before").click()
    page.get_by_role("button", name="Next step").click()
    columns.first.click()
    expect(page.locator("#title")).to_have_text("The prompt")
    page.locator("#tree").press("ArrowRight")
    expect(page.locator("#title")).to_have_text("Step 1")


def test_drawing_leaves_the_processor_to_the_server(desktop):
    """Steps that come faster than anybody looks are not all drawn: that took a core, which drafts then lacked."""
    desktop.evaluate(
        """() => {
          window.drawn = [];
          const note = (changes) => drawn.push(...changes.map(() => performance.now()));
          new MutationObserver(note).observe(document.getElementById("tree"), { childList: true });
        }"""
    )
    ask(desktop, QUESTION)
    drawn, at_start_and_end = desktop.evaluate("drawn"), 3
    assert len(drawn) <= at_start_and_end + (drawn[-1] - drawn[0]) / 150


def test_what_drafts_gain_in_all_requests_is_said(page):
    """By the server's metrics, of whatever was asked before."""
    ask(page, QUESTION)
    expect(page.locator("#server")).to_have_text(
        re.compile(
            r"All requests since the start: [\d.]+ guesses a step, [\d.]+ expected to be kept, "
            r"(?!0.00)[\d.]+ kept; predicted step times are \d+% off"
        )
    )


def test_a_guessed_end_counts_as_kept(desktop):
    """All guesses of the last step are right: kept are the tokens of the text, and the end."""
    ask(desktop, QUESTION)
    desktop.locator("#timeline button").last.click()
    outcome = desktop.locator("#outcome").inner_text()
    said = re.fullmatch(r"\d+ guess(?:es)? checked, (\d+) kept: (\d+) tokens?, the text ends here", outcome)
    assert said, outcome
    assert int(said[1]) == int(said[2]) + 1
    tokens, steps = len(QUESTION) - 1, int(desktop.locator("#count").inner_text().split()[0])
    assert int(desktop.locator("#kept").inner_text().split()[0]) == tokens - (steps - 1) + 1


def test_the_cached_part_of_a_prompt_is_said(desktop):
    ask(desktop, QUESTION)
    note = ask(desktop, OTHER_QUESTION).get_by_text("the cache had").inner_text()
    cached, prompt = map(int, re.fullmatch(r"the cache had (\d+) of the prompt's (\d+) tokens", note).groups())
    assert 2 * len(QUESTION) < cached < prompt


@pytest.mark.parametrize(("most", "note"), [(3, "cut after 3 tokens"), (1, "cut after 1 token")])
def test_a_cut_answer_says_so(desktop, most, note):
    desktop.get_by_label("Most tokens").fill(str(most))
    answer = ask(desktop, QUESTION)
    expect(answer.locator(".text")).to_have_text(QUESTION[:most])
    expect(answer.get_by_text(note, exact=True)).to_be_visible()


def test_a_full_context_begins_a_new_chat(browser, parrot):
    """By itself: the question is answered there, and no message of the API is shown."""
    with opened(browser, parrot, DESKTOP, refusals=True) as page:
        page.get_by_label("Most tokens").fill("20")
        question = "x" * (PARROT_LIMITS.max_len * 3 // 5)
        ask(page, question)
        expect(page.locator(".break")).to_have_count(0)
        answer = ask(page, question)
        expect(page.locator(".break")).to_have_text(re.compile("filled the model's context.*new one begins"))
        expect(answer.locator(".text")).to_have_text("x" * 20)
        expect(page.locator(".error")).to_have_count(0)
        expect(page.locator(".user")).to_have_count(2)
        expect(ask(page, QUESTION).locator(".text")).to_have_text(QUESTION[:20])
        expect(page.locator(".break")).to_have_count(1)


def test_a_question_beyond_the_context_comes_back(browser, parrot):
    """No new chat could hold it. What was asked can be shortened and asked again."""
    with opened(browser, parrot, DESKTOP, refusals=True) as page:
        question = "x" * (PARROT_LIMITS.max_len + 1)
        answer = ask(page, question)
        expect(answer.locator(".error")).to_contain_text("tokens: expected at most")
        expect(page.get_by_label("Your message")).to_have_value(question)
        expect(page.locator(".break")).to_have_count(0)
        expect(ask(page, QUESTION).locator(".text")).to_have_text(QUESTION)


def test_a_stopped_question_comes_back(desktop):
    with held(desktop, plain=False) as requests:
        desktop.get_by_label("Your message").fill(QUESTION)
        desktop.get_by_role("button", name="Send").click()
        first_of(requests, desktop)
        desktop.get_by_role("button", name="Stop").click()
        expect(desktop.get_by_role("button", name="Send")).to_be_visible()
        expect(desktop.get_by_label("Your message")).to_have_value(QUESTION)
        expect(desktop.locator(".error")).to_have_count(0)


def test_a_new_chat_forgets_the_old_one(desktop):
    ask(desktop, QUESTION)
    desktop.get_by_role("button", name="New chat").click()
    expect(desktop.locator("#timeline button, #tree svg, .text, .user, .break")).to_have_count(0)
    expect(desktop.locator("#count")).to_have_text("0 for 0 tokens")
    example = desktop.locator("#examples button").first.inner_text()
    with desktop.expect_request("**/v1/chat/completions") as request:
        desktop.locator("#examples button").first.click()
    assert request.value.post_data_json["messages"] == [{"role": "user", "content": example}]
    expect(ended(desktop).locator(".text")).to_have_text(example)
    expect(desktop.locator(".user")).to_have_count(1)


def test_a_key_is_asked_for(browser, tmp_path):
    bundle = toy_bundle(tmp_path / "bundle", TEMPLATE, VOCABULARY, PARROT_LIMITS.max_len)
    with (
        front_end(tmp_path, bundle, key="sk-0123456789", worker="tests/openai/parrot_worker.py") as server,
        opened(browser, server, DESKTOP, refusals=True) as page,
    ):
        page.get_by_label("Key").fill("sk-0123456789")
        page.get_by_label("Key").press("Tab")
        expect(page.locator("#method option").first).to_be_attached()
        expect(ask(page, QUESTION).locator(".text")).to_have_text(QUESTION)


@pytest.mark.parametrize("size", [DESKTOP, TABLET, PHONE], ids=["desktop", "tablet", "phone"])
def test_labels_fit_and_can_be_read(browser, parrot, size):
    with opened(browser, parrot, size) as page:
        expect(page.locator("#method option").first).to_be_attached()
        assert page.evaluate(BEYOND) == []
        ask(page, QUESTION)
        expect(page.locator(".verdict")).to_contain_text("the same text")
        ask(page, QUESTION)
        for column in (page.locator("#timeline button").nth(1), page.locator("#timeline button").last):
            column.click()
            labels = page.evaluate(LABELS)
            assert len(labels) > 20
            assert [label for label in labels if label[1] < 10.99] == []
            assert page.evaluate(BEYOND) == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            strip, columns = page.locator("#timeline").bounding_box(), page.locator("#timeline button").all()
            assert all(column.bounding_box()["y"] >= strip["y"] for column in columns)


def test_the_keyboard_reaches_everything_in_few_stops(page):
    """Steps have none of their own: the arrow keys go through them."""
    ask(page, QUESTION)
    stops = list[str]()
    while (name := page.evaluate("document.activeElement.id")) not in stops:
        stops.append(name)
        page.keyboard.press("Tab")
        while page.evaluate("document.activeElement === document.body"):  # after the last stop
            page.keyboard.press("Tab")
    assert len(stops) <= 12
    assert {"method", "temperature", "most", "new", "prompt", "send", "replay", "tree"} <= set(stops)
