"""Pictures of the live page, by hand: `python -m tests.openai.page.picture URL FOLDER`.

Asks the service at URL a question and waits until its answer has been compared with plain decoding. Writes
`live_page.png`, which the documentation shows, and `dark.png` and `phone.png` to look at.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect

from tests.openai.page.chromium import chromium

QUESTION = "Why is the sky blue?"
SIZE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
TIMEOUT_MS = 300_000
LONGEST_STEP = """
[...document.querySelectorAll('#timeline button')]
  .reduce((longest, column) => (column.children.length > longest.children.length ? column : longest)).click()
"""


def main(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with chromium(TIMEOUT_MS) as browser:
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(url)
        page.get_by_label("Your message").fill(QUESTION)
        page.get_by_label("Your message").press("Enter")
        expect(page.locator(".verdict > *").first).to_be_attached(timeout=TIMEOUT_MS)
        page.evaluate(LONGEST_STEP)
        page.screenshot(path=folder / "live_page.png")
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=folder / "dark.png")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(PHONE)
        page.screenshot(path=folder / "phone.png", full_page=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
