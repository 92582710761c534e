"""A headless Chromium for the live page: Debian's, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

EXECUTABLE = shutil.which("chromium")
"""None where it is missing."""
# No sandbox, which needs rights that containers lack, and no call of the browser itself to its makers' servers.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def chromium(timeout: float) -> Iterator[Browser]:
    """A browser with a new profile, closed at the end. `timeout` in ms bounds its start."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=FLAGS, timeout=timeout)
        yield browser
        browser.close()
