"""`/tokenize` and `/detokenize`, as vLLM's clients use them."""

from __future__ import annotations

import pytest

from redraft.openai.tokens import MAX_TEXT_BYTES
from tests.openai.test_chat_completions import HELLO, PROMPT
from tests.toy_engine import toy_codec

CODEC = toy_codec(111)
TEXT = "Hé 🙂"


def test_a_text_as_tokens_and_back(server):
    answer = server.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}).json()
    ids = CODEC.encode(TEXT)
    spelled = [CODEC.token_string(token) for token in ids]
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": spelled}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": CODEC.decode(ids)}
    assert server.post("/detokenize", {"tokens": [0, *ids]}).json() == {"prompt": "<end>" + CODEC.decode(ids)}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_conversation_as_chats_encode_it(server):
    answer = server.post("/tokenize", {"messages": HELLO}).json()
    assert answer["tokens"] == CODEC.encode(PROMPT)
    assert answer["token_strs"] is None
    chat = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == answer["count"]
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    answer = server.post("/tokenize", {"messages": begun, "continue_final_message": True}).json()
    assert CODEC.decode(answer["tokens"]).endswith("<assistant>Well")
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    answer = server.post("/tokenize", {"messages": HELLO, "tools": [tool]}).json()
    assert '"name": "now"' in CODEC.decode(answer["tokens"])


def test_a_text_that_no_context_holds_is_counted(server):
    answer = server.post("/tokenize", {"prompt": "ab" * 1000}).json()
    assert answer["count"] == len(CODEC.encode("ab" * 1000)) > answer["max_model_len"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, None),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": " " * (MAX_TEXT_BYTES + 1)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * MAX_TEXT_BYTES}]}, "messages"),
        ("/tokenize", {"prompt": "a", "more": 1}, "more"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [111]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_what_is_refused_is_named(server, path, body, param):
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_another_model_is_not_found(server):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert server.post(path, body | {"model": "other"}).status_code == 404
