"""`/v1/chat/completions` with the openai package, against what the worker itself answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from redraft.openai.translate import derived_seed
from tests.openai.serving import MODEL, directly
from tests.toy_engine import toy_codec

HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "<user>Hello<assistant>"
SEEDED = {"temperature": 1.0, "seed": 7}


def test_an_answer_is_the_workers(server):
    """Without a temperature OpenAI's default samples; the worker's own default would be greedy."""
    answer = server.client().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, seed=7)
    expected = directly(server, PROMPT, 24, sampling=SEEDED)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert choice.message.role == "assistant"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        expected.stats.prompt_tokens, expected.stats.output_tokens, expected.stats.prompt_tokens + 24,
    )  # fmt: skip
    greedy = server.client().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, temperature=0)
    assert greedy.choices[0].message.content == directly(server, PROMPT, 24).text != expected.text


def test_statistics_are_named_as_vllm_names_them(server):
    answer = server.client().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=40, seed=7)
    stats = directly(server, PROMPT, 40, sampling=SEEDED).stats
    found = answer.metrics["speculative_decoding"]
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"]) == stats.steps
    assert found["num_accepted_draft_tokens"] == stats.accepted > 0
    assert sum(j * steps for j, steps in enumerate(found["acceptance_histogram"])) == stats.accepted
    assert found["num_draft_tokens"] == stats.drafted
    assert found["mean_acceptance_length"] == pytest.approx(1 + stats.accepted / stats.steps)
    assert found["accepted_by_depth"] == stats.accepted_by_depth


@pytest.mark.parametrize(
    "usage", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, None]
)
def test_a_stream_adds_up_to_the_answer(server, usage):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 7}
    whole = server.client().chat.completions.create(**options)
    extra = {"stream_options": usage} if usage else {}
    events = list(server.client().chat.completions.create(**options, stream=True, **extra))
    assert len(events) > 5
    assert len({event.id for event in events}) == 1
    ends = [event for event in events if event.choices]
    assert ends[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in ends) == whole.choices[0].message.content
    assert [event.choices[0].finish_reason for event in ends] == [None] * (len(ends) - 1) + ["length"]
    if usage:
        assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert events[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1, "asked before"
    else:
        assert events[-1].usage is None
    assert events[-1].metrics["speculative_decoding"] == whole.metrics["speculative_decoding"]
    counts = [event.usage.completion_tokens for event in ends if event.usage]
    assert counts == sorted(counts)
    assert len(counts) == (len(ends) if usage and len(usage) == 2 else 0)


def test_streams_side_by_side(server):
    async def ask(seed: int) -> str:
        client = server.async_client()
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=20, seed=seed, stream=True
        )
        return "".join([event.choices[0].delta.content or "" async for event in stream])

    async def both() -> list[str]:
        return await asyncio.gather(ask(1), ask(2))

    expected = [directly(server, PROMPT, 20, sampling={"temperature": 1.0, "seed": seed}).text for seed in (1, 2)]
    assert asyncio.run(both()) == expected


def test_each_of_n_choices_is_a_request_with_its_seed(server):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 12}
    several = server.client().chat.completions.create(**options, n=3, seed=-5)
    texts = [choice.message.content for choice in several.choices]
    seeds = [derived_seed(-5, place) for place in range(3)]
    assert seeds[0] == 2**64 - 5
    single = [server.client().chat.completions.create(**options, seed=seed) for seed in seeds]
    assert texts == [one.choices[0].message.content for one in single]
    assert len(set(texts)) == 3
    assert several.usage.prompt_tokens == single[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(one.usage.completion_tokens for one in single)
    streamed = [""] * 3
    for event in server.events("/v1/chat/completions", options | {"n": 3, "seed": -5}):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


def test_a_derived_seed_is_the_documented_hash():
    import hashlib

    digest = hashlib.sha256(b"7:2").digest()
    assert derived_seed(7, 2) == int.from_bytes(digest[:8], "big") // 2
    assert derived_seed(7, 0) == 7


def test_choices_without_a_seed_differ(server):
    whole = {"max_tokens": 12, "n": 2, "extra_body": {"ignore_eos": True}}
    choices = server.client().chat.completions.create(model=MODEL, messages=HELLO, **whole).choices
    assert choices[0].message.content != choices[1].message.content


def test_log_probabilities_are_the_targets(server):
    options = {"messages": HELLO, "max_tokens": 12, "seed": 7, "logprobs": True, "top_logprobs": 3}
    answer = server.post("/v1/chat/completions", options).json()
    expected = directly(server, PROMPT, 12, sampling=SEEDED, top_log_probs=3)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == expected.log_probs
    codec = toy_codec()
    assert [bytes(entry["bytes"]) for entry in entries] == [codec.token_bytes(token) for token in expected.token_ids]
    for entry, best in zip(entries, expected.top_log_probs, strict=True):
        assert [one["logprob"] for one in entry["top_logprobs"]] == [value for _, value in best]
    streamed = [
        entry
        for event in server.events("/v1/chat/completions", options)
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


def test_stop_ends_the_text_before_it(server):
    text = directly(server, PROMPT, 24, sampling=SEEDED).text
    stop = text[10:12]
    answer = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 24, "seed": 7, "stop": stop}).json()
    assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_what_is_left_of_the_context_is_the_default(server):
    body = {"messages": HELLO, "ignore_eos": True, "logit_bias": {"0": 100}}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_deadline_ends_the_answer(server):
    answer = server.post("/v1/chat/completions", {"messages": HELLO, "ignore_eos": True, "timeout": 0.02}).json()
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert answer["usage"]["total_tokens"] < 256


def test_a_bias_chooses_the_token(server):
    wanted = toy_codec().encode("Q")[0]
    body = {"messages": HELLO, "max_tokens": 8, "logit_bias": {str(wanted): 100}}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "Q" * 8


@pytest.mark.parametrize("extra", [{"speculative": False}, {"drafting_method": "auto_regressive"}])
def test_decoding_without_drafts(server, extra):
    body = {"messages": HELLO, "max_tokens": 12, "seed": 7}
    plain, drafted = (server.post("/v1/chat/completions", body | more).json() for more in (extra, {}))
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert plain["choices"][0]["message"] == drafted["choices"][0]["message"]


def test_what_the_template_gets(server):
    """System prompts, parts, tools and their answers, as agents send them."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": "<2>"}'}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    rendered = '<system>Be brief<user>a\nb<assistant>(add {"b": "<2>"})<tool>4'
    body = {"messages": messages, "max_tokens": 8, "seed": 7}
    with_tools = server.post("/v1/chat/completions", body | {"tools": tools}).json()
    without = server.post("/v1/chat/completions", body | {"tools": tools, "tool_choice": "none"}).json()
    for answer, prompt in (
        (with_tools, f"{rendered}[{json.dumps(tools)}]<assistant>"),
        (without, f"{rendered}<assistant>"),
    ):
        expected = directly(server, prompt, 8, sampling=SEEDED)
        assert answer["choices"][0]["message"]["content"] == expected.text
        assert answer["usage"]["prompt_tokens"] == expected.stats.prompt_tokens


def test_models_and_metrics(server):
    assert [model.id for model in server.client().models.list()] == [MODEL]
    assert server.client().models.retrieve(MODEL).max_model_len == 256
    before = server.metric("redraft_generation_tokens_total")
    server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "ignore_eos": True})
    assert server.metric("redraft_generation_tokens_total") == before + 5
    assert server.metric("redraft_openai_sequences_running") == 0
    assert server.metric("redraft_worker_up") == 1
