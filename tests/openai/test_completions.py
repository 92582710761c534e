"""`/v1/completions` with the openai package: forms of prompts, echoes, and scores as evaluation harnesses read them."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from redraft.chat import ChatTemplate
from redraft.loadtest.clients.base import Generation, Piece
from redraft.loadtest.clients.connect import connect
from redraft.openai.answers.choices import CompletionLogProbs
from redraft.openai.model import ServedModel
from tests.grammar.test_prefixes import CODECS
from tests.openai.serving import MODEL, TEMPLATE, directly, toy_bundle
from tests.toy_engine import toy_codec

CODEC = toy_codec()
IDS = CODEC.encode("Once upon")


def test_the_text_is_continued_as_it_is(server):
    answer = server.client().completions.create(model=MODEL, prompt="Once upon", seed=3)
    expected = directly(server, "Once upon", 16, sampling={"temperature": 1.0, "seed": 3})
    assert (answer.choices[0].text, answer.usage.completion_tokens) == (expected.text, 16)
    parts = server.client().completions.create(model=MODEL, prompt="Once upon", seed=3, stream=True)
    assert "".join(part.choices[0].text for part in parts) == expected.text

    async def ask() -> str:
        return (await server.async_client().completions.create(model=MODEL, prompt=IDS, seed=3)).choices[0].text

    assert asyncio.run(ask()) == expected.text


@pytest.mark.parametrize("messages", [(), ({"role": "user", "content": "Once upon"},)])
def test_the_load_tests_client(server, messages):
    """It would catch a load test that times what `/v1` refuses, or counts other tokens."""

    async def ask() -> list[Piece]:
        client = await connect("openai", server.url, None, None)
        sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 3, "min_length": 2}
        generation = Generation("Once upon", 8, sampling, method="auto_regressive", messages=messages)
        try:
            return [piece async for piece in client.stream(generation)]
        finally:
            await client.close()

    pieces = asyncio.run(ask())
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 3, "min_length": 2}
    prompt = ChatTemplate(TEMPLATE).render(messages) if messages else "Once upon"
    assert "".join(piece.text for piece in pieces) == directly(server, prompt, 8, sampling=sampling).text
    assert pieces[-1].output_tokens == 8
    assert pieces[-1].statistics["speculative_decoding"]["num_draft_tokens"] == 0


@pytest.mark.parametrize("prompts", [["Once upon", "a time"], [IDS, CODEC.encode("a time")]])
def test_several_prompts_answer_in_their_order(server, prompts):
    answer = server.client().completions.create(model=MODEL, prompt=prompts, n=2, seed=3, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for place, prompt in enumerate(prompts):
        single = server.client().completions.create(model=MODEL, prompt=prompt, n=2, seed=3, max_tokens=6)
        found = [choice.text for choice in answer.choices[2 * place : 2 * place + 2]]
        assert found == [choice.text for choice in single.choices]
    assert answer.usage.prompt_tokens == len(IDS) + len(CODEC.encode("a time"))


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_scores(server, stream):
    """A harness sums `token_logprobs` from the context's length on, and compares with the best of `top_logprobs`."""
    body = {"prompt": IDS, "max_tokens": 2, "echo": True, "logprobs": 2, "temperature": 0}
    expected = directly(server, IDS, 2, prompt_log_probs=True, top_log_probs=2)
    if stream:
        events = [event["choices"][0] for event in server.events("/v1/completions", body) if event["choices"]]
        text = "".join(event["text"] for event in events)
        lists = [event["logprobs"] for event in events if event["logprobs"]]
        found = {name: [value for one in lists for value in one[name]] for name in lists[0]}
    else:
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        text, found = choice["text"], choice["logprobs"]
    assert text == "Once upon" + expected.text
    assert found["token_logprobs"] == [*expected.prompt_log_probs, *expected.log_probs]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    tokens = [*IDS, *expected.token_ids]
    assert "".join(found["tokens"][: len(IDS)]) == "Once upon"
    assert found["text_offset"][: len(IDS)] == list(range(len(IDS)))
    best = [*expected.prompt_top_log_probs, *expected.top_log_probs]
    for place in range(1, len(tokens)):
        alternatives = found["top_logprobs"][place]
        assert alternatives[found["tokens"][place]] == found["token_logprobs"][place]
        assert max(alternatives.values()) == best[place][0][1]
        assert 2 <= len(alternatives) <= 3


def test_a_prompt_is_scored_without_an_answer(server):
    body = {"prompt": ["Once upon", "a"], "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = server.post("/v1/completions", body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["Once upon", "a"]
    assert (
        answer["choices"][0]["logprobs"]["token_logprobs"]
        == directly(server, IDS, 0, prompt_log_probs=True).prompt_log_probs
    )
    assert answer["choices"][0]["logprobs"]["top_logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 0
    plain = server.post("/v1/completions", {"prompt": "Once upon", "max_tokens": 0, "echo": True}).json()
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == ("Once upon", None)


def test_an_end_token_is_not_the_one_that_a_harness_drops(server):
    """It leaves out the last entry, which must be a generated token's, be it that the model would end."""
    body = {"prompt": IDS, "max_tokens": 1, "echo": True, "logprobs": 1, "logit_bias": {"0": 100}}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(IDS) + 1


def test_penalties_are_of_what_was_generated(server):
    body = {"prompt": [*range(1, 56)] * 2, "temperature": 0, "frequency_penalty": 2}
    expected, other = (
        directly(server, body["prompt"], 16, sampling={"frequency_penalty": 2.0, "penalize_prompt": counted}).text
        for counted in (False, True)
    )
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == expected != other


def test_offsets_count_characters_of_the_text(tmp_path):
    """Also where a character takes several tokens, and after a special token that the text has or does not have."""
    model = ServedModel(toy_bundle(tmp_path, vocab_size=257))
    ids = [0, *model.encode("a日é!", "prompt")]
    scores = [None, *[-1.0] * (len(ids) - 1)]
    for echoed, special, first in (("a日é!", True, 0), ("<end>a日é!", False, 5), (None, False, 0), (None, True, 5)):
        found = CompletionLogProbs(model, 0, special).add(ids, scores, None, echoed)
        places = dict(zip(found["tokens"], found["text_offset"], strict=True))
        assert (places["<end>"], places["a"], places["!"]) == (0, first, first + 3)
        assert found["tokens"][2] == "bytes:\\xe6"


@pytest.mark.parametrize("prefix", CODECS)
@pytest.mark.parametrize("text", ["hi", " hi", "yes no", "</s> no", "né"])
def test_offsets_leave_out_the_space_that_a_tokenizer_puts_before_a_text(text, prefix):
    codec = CODECS[prefix]
    model = SimpleNamespace(codec=codec, token_text=partial(ServedModel.token_text, SimpleNamespace(codec=codec)))
    ids = [codec.special_id("<s>"), *codec.encode(text)]
    found = CompletionLogProbs(model, 0, False).add(ids, [None, *[-1.0] * (len(ids) - 1)], None, text)
    begun = text[found["text_offset"][-1] :]
    token = found["tokens"][-1]
    assert begun in ({"é"} if token.startswith("bytes:") else {token, token.removeprefix(" ")})


@pytest.mark.parametrize("echo", [False, True])
def test_no_tokens_are_an_answer(server, echo):
    body = {"prompt": IDS, "max_tokens": 0, "logprobs": 1, "echo": echo}
    answer = server.post("/v1/completions", body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon" if echo else "", "length")
    assert [len(values) for values in choice["logprobs"].values()] == [len(IDS) * echo] * 4
    assert answer["usage"]["completion_tokens"] == 0


def test_a_prompt_is_scored_as_vllm_writes_it(server):
    expected = directly(server, IDS, 2, prompt_log_probs=True, top_log_probs=3)
    body = {"prompt": IDS, "max_tokens": 2, "prompt_logprobs": 3, "temperature": 0}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == (expected.text, None)
    first, *scores = choice["prompt_logprobs"]
    assert first is None
    places = zip(IDS[1:], scores, expected.prompt_log_probs[1:], expected.prompt_top_log_probs[1:], strict=True)
    for token, entry, value, best in places:
        assert (entry[str(token)]["logprob"], next(iter(entry))) == (value, str(token))
        assert {int(key): one["logprob"] for key, one in entry.items()} == {token: value} | dict(best)
        assert [entry[str(other)]["rank"] for other, _ in best] == [1, 2, 3]
        assert entry[str(token)]["decoded_token"] == CODEC.decode([token])
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "prompt_logprobs": 0, "logprobs": True}
    answer = server.post("/v1/chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(entry["top_logprobs"] == [] for entry in answer["choices"][0]["logprobs"]["content"])
    assert server.post("/v1/completions", body | {"stream": True}).json()["error"]["param"] == "prompt_logprobs"


def test_stop_tokens_and_stop_texts_are_kept_or_not(server):
    plain = directly(server, IDS, 16)
    stop = next(token for token in plain.token_ids[4:] if token not in plain.token_ids[:4])
    before = CODEC.decode(plain.token_ids[: plain.token_ids.index(stop)])
    body = {"prompt": IDS, "temperature": 0, "max_tokens": 16}
    (choice,) = server.post("/v1/completions", body | {"stop_token_ids": [stop]}).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
    kept = {"stop": before[-1], "include_stop_str_in_output": True}
    (choice,) = server.post("/v1/completions", body | kept).json()["choices"]
    assert choice["text"] == before[: before.index(before[-1]) + 1]
    assert choice["stop_reason"] == before[-1]
    (choice,) = server.post("/v1/completions", body | {"bad_words": [before[0]]}).json()["choices"]
    assert not choice["text"].startswith(before[0])
