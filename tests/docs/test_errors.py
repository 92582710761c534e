"""The reference page of errors lists the codes as they are."""

from redraft.errors import Code
from tests.conftest import ROOT


def test_the_page_has_every_code_with_its_statuses():
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for code in Code:
        retry = f", Retry-After {code.retry_after_s}" if code.retry_after_s else ""
        assert f"| `{code}` | {code.http}{retry} | {code.grpc} | {code.meaning} |\n" in page


def test_the_type_follows_from_the_status_as_the_page_says():
    for code in Code:
        type_ = (
            "server_error" if code.http >= 500 else "rate_limit_error" if code.http == 429 else "invalid_request_error"
        )
        assert code.type == type_
