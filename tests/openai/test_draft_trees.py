"""`draft_trees`: the tree of each step in an answer's choices, with texts."""

from __future__ import annotations

import pytest

from tests.openai.serving import directly

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "seed": 7},
    COMPLETIONS: {"prompt": "abcabcabc", "max_tokens": 24, "seed": 7},
}


BYTES = [f"bytes:\\x{byte:02x}" for byte in range(128, 256)]


def text_of(choice) -> str:
    return choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"]


@pytest.mark.parametrize("path", BODIES)
def test_an_answers_trees_tell_its_text(server, path):
    """Whole, streamed, and of several choices; without the field the answer is the same, and has none."""
    body = BODIES[path] | {"n": 2}
    plain = server.post(path, body).json()["choices"]
    choices = server.post(path, body | {"draft_trees": True}).json()["choices"]
    streamed = [[], []]
    for event in server.events(path, body | {"draft_trees": True}):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("draft_trees", ())
    assert [text_of(choice) for choice in plain] == [text_of(choice) for choice in choices]
    assert not [choice for choice in plain if "draft_trees" in choice]
    for trees, choice in zip(streamed, choices, strict=True):
        for whole in (trees, choice["draft_trees"]):
            assert "".join("".join(tree["gained"]) for tree in whole) == text_of(choice)
            assert {node["origin"] for tree in whole for node in tree["nodes"]} >= {"root", "drafter"}
            accepted = [
                (tree["nodes"][node]["token"], gained)
                for tree in whole
                for node, gained in zip(tree["path"][1:], tree["gained"], strict=False)
            ]
            assert accepted
            assert all(token in (gained, *BYTES) for token, gained in accepted)


def test_plain_decoding_has_trees_of_one_node(server):
    body = BODIES[CHAT] | {"speculative": False, "draft_trees": True}
    trees = server.post(CHAT, body).json()["choices"][0]["draft_trees"]
    assert len(trees) == 24
    assert all([node["origin"] for node in tree["nodes"]] == ["root"] and len(tree["gained"]) == 1 for tree in trees)


def test_the_worker_has_them_too(server):
    answer = directly(server, "Hello", 12, draft_trees=True)
    assert [token for tree in answer.draft_trees for token in tree.gained] == answer.token_ids
    assert directly(server, "Hello", 12).draft_trees is None
