"""The live page's files: that they need no key and nothing from elsewhere, and that the package has them."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from redraft.openai import page
from tests.serving.client_side import HTTP

FOREIGN = re.compile(r"(?<![\w.])(?:https?:)?//[\w.-]+\.\w|@import|\beval\(|\bon\w+=")
NAMESPACE = "http://www.w3.org/2000/svg"


def test_the_page_is_served_without_a_key(locked_server):
    """What it asks of /v1 needs it."""
    url = locked_server.url
    for path, (name, kind) in page.FILES.items():
        answer = HTTP.get(f"{url}{path}")
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind), path
        assert answer.content == (files(page) / name).read_bytes()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
    assert HTTP.get(f"{url}/", headers={"Host": "evil.example"}).status_code == 403
    assert HTTP.get(f"{url}/page.js", headers={"Origin": "https://evil.example"}).status_code == 403
    assert HTTP.get(f"{url}/v1/models").status_code == 401
    assert HTTP.get(f"{url}/server.py").status_code == 401


@pytest.mark.parametrize("name", [name for name, _ in page.FILES.values()])
def test_the_page_names_nothing_elsewhere(name):
    """The policy would block it, and the page would be broken."""
    text = (files(page) / name).read_text().replace(NAMESPACE, "")
    assert not FOREIGN.search(text)
    assert "style=" not in text


def test_the_page_loads_only_files_that_are_served():
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', (files(page) / "index.html").read_text())
    assert loaded
    assert set(loaded) <= set(page.FILES)
    ids = set(re.findall(r'id="([^"]+)"', (files(page) / "index.html").read_text()))
    wanted = set(re.findall(r'\bby\("([^"]+)"\)', (files(page) / "page.js").read_text()))
    assert wanted <= ids
    assert len(wanted) > 5
