"""The live page in a headless Chromium, by hand: `python -m tests.openai.page.in_chromium URL FOLDER`.

Asks a question, waits for the answer and for plain decoding of it, which runs by itself, asks another one, and one
whose answer is cut, then fills the context. Fails where the page logs an error, the answer has no drafted tokens,
nothing of the first question is reused, the cut is not said, no new chat begins by itself, a label is smaller than 11
px or there are more than 12 tab stops. Writes pictures of the page, light, dark and narrow, into FOLDER;
`answered.png` is the one in the documentation. Needs Debian's `chromium`.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUESTION, ANOTHER = "Why is the sky blue?", "And at sunset?"
WAIT_S = 120.0
LONGEST_STEP = """
[...document.querySelectorAll('#timeline button')]
  .reduce((a, b) => (b.children.length > a.children.length ? b : a)).click()
"""


SMALLEST_LABEL = """
Math.min(...[...document.querySelectorAll('#tree text, dt, .legend li, .muted')].map((label) => {
  const drawn = label.ownerSVGElement;
  const scale = drawn ? drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width : 1;
  return scale * parseFloat(getComputedStyle(label).fontSize);
}))
"""
TAB_STOPS = """
[...document.querySelectorAll('button:enabled, input, select, textarea, [tabindex]')]
  .filter((element) => element.tabIndex >= 0 && element.offsetParent).length
"""
IDLE = "document.querySelector('#send').textContent === 'Send'"
MOST_TOKENS = 8
LONG = 0.6
"""A question's share of the context: two of them do not fit it."""


class Chromium:
    """A page of a headless browser, over the DevTools protocol on a pair of pipes."""

    def __init__(self, profile: str):
        (their_input, self._out), (self._in, their_output) = os.pipe(), os.pipe()
        script = f"exec 3<&{their_input} 4>&{their_output}; exec chromium --headless=new --no-sandbox --disable-gpu " \
                 f"--hide-scrollbars --remote-debugging-pipe --user-data-dir={profile} about:blank"  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", script], pass_fds=(their_input, their_output), stderr=subprocess.DEVNULL
        )
        self._numbers, self._rest, self.errors = itertools.count(1), b"", list[str]()
        self._session: str | None = None
        (page,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command. Errors that the page logs meanwhile are kept in `errors`."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._in, 2**20)
            data, _, self._rest = self._rest.partition(b"\0")
            event = json.loads(data)
            if event.get("id") == number:
                assert "error" not in event, event
                return event["result"]
            if event.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.errors.append(str(event["params"]["entry"]))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true, or anything that counts as true."""
        deadline = time.monotonic() + WAIT_S
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (condition, self.errors)
            time.sleep(0.1)

    def ask(self, question: str) -> None:
        """Send a question to the model."""
        self.run(f"document.querySelector('#prompt').value = {json.dumps(question)}")
        self.run("document.querySelector('#composer').requestSubmit()")

    def picture(self, file: Path, width: int, height: int, scheme: str = "light") -> None:
        """The page as it looks."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        time.sleep(0.3)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = Chromium(profile)
        try:
            page.call("Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False)
            page.call("Page.navigate", url=url)
            page.wait("document.querySelectorAll('#method option').length")
            page.picture(folder / "empty.png", 1440, 900)
            page.ask(QUESTION)
            page.wait("document.querySelectorAll('#timeline button').length > 4")
            page.picture(folder / "running.png", 1440, 900)
            page.wait("document.querySelector('.verdict > *')")
            page.run(LONGEST_STEP)
            page.picture(folder / "answered.png", 1440, 900)
            assert page.run(SMALLEST_LABEL) > 10.9
            assert page.run(TAB_STOPS) <= 12
            print(page.run("document.querySelector('.compare').innerText"))
            print(page.run("document.querySelector('.figures').innerText").replace("\n", " "))
            assert page.run("document.querySelectorAll('.text .drafter, .text .both, .text .ngrams').length") > 0
            page.picture(folder / "light.png", 1440, 900)
            page.picture(folder / "dark.png", 1440, 900, "dark")
            page.run("document.querySelector('#messages').scrollTop = 0")
            page.ask(ANOTHER)
            page.wait("document.querySelectorAll('.compare > button:enabled').length")
            assert page.run("document.querySelector('#messages').scrollTop") > 0
            page.picture(folder / "second.png", 1440, 900)
            page.picture(folder / "narrow.png", 420, 900)
            reused = page.run(
                "document.querySelector('.answer:last-child').innerText.match(/.* were in the cache/)?.[0]"
            )
            print(reused)
            assert reused
            page.run("document.querySelector('#most').value = 3")
            page.ask(QUESTION)
            page.wait("document.querySelector('.answer:last-child').innerText.includes('cut after 3 tokens')")
            page.run(f"document.querySelector('#most').value = {MOST_TOKENS}")
            question = "word " * int(LONG * int(page.run("document.querySelector('#most').max")))
            page.ask(question)
            page.wait(IDLE)
            page.ask(question)
            page.wait("document.querySelector('.break')")
            page.wait(IDLE)
            assert not page.run("document.querySelector('.error')")
            page.picture(folder / "began_anew.png", 1440, 900)
            page.run("document.querySelector('#new').click()")
            assert page.run("document.querySelectorAll('#timeline button, #tree svg, .text').length") == 0
            page.picture(folder / "new_chat.png", 1440, 900)
            assert not page.errors, page.errors
        finally:
            page.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
