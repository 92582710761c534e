"""What the reference page of errors says of all codes."""

from redraft.errors import Code


def test_the_type_follows_from_the_status_as_the_page_says():
    for code in Code:
        type_ = (
            "server_error" if code.http >= 500 else "rate_limit_error" if code.http == 429 else "invalid_request_error"
        )
        assert code.type == type_
