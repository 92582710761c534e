"""Fields of OpenAI's clients, gateways and other servers at values that ask for nothing, on every endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "Hi"},
}
TEXT = {"type": "text"}
OPENAI: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include": ([],),
    "instructions": (None, ""),
    "logit_bias": ({}, []),
    "logprobs": (None, False),
    "max_tool_calls": (None,),
    "metadata": ({}, {"a": "b"}),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (None,),
    "presence_penalty": (0,),
    "prompt_cache_key": ("key",),
    "prompt_cache_retention": ("24h",),
    "reasoning": (None, {}, {"effort": None, "summary": None}, {"summary": "auto"}, {"effort": "none"}),
    "reasoning_effort": (None, "none", "medium"),
    "response_format": (None, TEXT),
    "safety_identifier": ("me",),
    "seed": (None,),
    "service_tier": ("auto", "default"),
    "stop": ([], "", None),
    "store": (False,),
    "stream_options": (None,),
    "suffix": ("",),
    "temperature": (1,),
    "text": ({"format": TEXT, "verbosity": "medium"}, {"format": TEXT}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "new_field": (None,),
    "top_p": (1, 0),
    "truncation": ("disabled",),
    "user": ("me",),
    "verbosity": ("medium",),
}
VLLM: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "chat_template_kwargs": ({}, None),
    "continue_final_message": (False,),
    "documents": ([], None),
    "early_stopping": (False,),
    "guided_json": (None,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (None,),
    "repetition_penalty": (1,),
    "request_id": ("r",),
    "sanitize_control_tokens": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "top_k": (-1, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
OTHERS: dict[str, tuple[Any, ...]] = {
    "adapter_id": ("",),
    "do_sample": (True,),
    "dry_base": (1.75,),
    "dry_multiplier": (0,),
    "dry_sequence_breakers": (["\n", ":"],),
    "dynatemp_exponent": (1.0,),
    "dynatemp_range": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "fallbacks": ([],),
    "grammar": ("",),
    "id_slot": (-1,),
    "keep_alive": ("5m",),
    "lora": ([],),
    "lora_path": (None, ""),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5.0,),
    "models": ([],),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "plugins": ([],),
    "provider": ({},),
    "reasoning_format": ("auto",),
    "regex": (None, ""),
    "repeat_last_n": (64, 0, -1),
    "repeat_penalty": (1.0,),
    "return_hidden_states": (False,),
    "samplers": ([],),
    "separate_reasoning": (True,),
    "smoothing_factor": (0,),
    "stream_reasoning": (True,),
    "t_max_predict_ms": (0,),
    "tfs_z": (1,),
    "timings_per_token": (False,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "transforms": ([],),
    "ttl": (300,),
    "typical_p": (1, 1.0),
    "watermark": (False,),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}
ASKING: dict[str, Any] = {
    "adapter_id": "mine",
    "do_sample": False,
    "dry_multiplier": 0.8,
    "fallbacks": ["other"],
    "grammar": 'root ::= "a"',
    "max_tool_calls": 2,
    "mirostat": 2,
    "models": ["other"],
    "n_probs": 5,
    "repeat_penalty": 1.1,
    "return_hidden_states": True,
    "separate_reasoning": False,
    "surprise": 1,
    "tfs_z": 0.9,
    "transforms": ["middle-out"],
    "truncate_prompt_tokens": 5,
    "truncation": "auto",
    "typical_p": 0.5,
    "use_beam_search": True,
    "verbosity": "high",
    "xtc_probability": 0.5,
}


@pytest.fixture(scope="module")
def client(server) -> Iterator[httpx.Client]:
    """One connection for all requests, as a new one for each takes longer than the answer."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("fields", [OPENAI, VLLM, OTHERS], ids=["openai", "vllm", "others"])
def test_a_neutral_value_is_never_refused(client, path, fields):
    pairs = [(field, value) for field, values in fields.items() for value in values]
    answers = [client.post(path, json=ENDPOINTS[path] | {field: value}) for field, value in pairs]
    assert [answer.text for answer in answers if answer.status_code != 200] == []


@pytest.mark.parametrize("path", ENDPOINTS)
def test_another_value_is_refused_by_name(client, path):
    for field, value in ASKING.items():
        error = client.post(path, json=ENDPOINTS[path] | {field: value}).json()["error"]
        assert (error["param"], error["message"].partition(":")[0]) == (field, field)


def test_fields_of_one_endpoint_are_refused_by_name_on_others(server):
    for path, field, value in (
        ("/v1/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
        ("/v1/completions", "chat_template_kwargs", {"enable_thinking": False}),
        ("/v1/chat/completions", "echo", True),
        ("/v1/chat/completions", "suffix", "end"),
        ("/v1/responses", "n", 2),
        ("/v1/responses", "draft_trees", True),
        ("/v1/responses", "response_format", {"type": "json_object"}),
        ("/tokenize", "logprobs", True),
        ("/tokenize", "n", 2),
    ):
        error = server.post(path, ENDPOINTS[path] | {field: value}).json()["error"]
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != "/tokenize"])
@pytest.mark.parametrize(("field", "default", "all_tokens"), [("repeat_last_n", 64, -1), ("penalize_nl", False, True)])
def test_what_penalties_count_matters_with_penalties_only(client, path, field, default, all_tokens):
    """Clients of llama.cpp send its defaults with every request."""
    penalty = {"presence_penalty": 1.5} if "chat" in path else {"repetition_penalty": 1.5}
    for more in ({field: default}, {field: default, "presence_penalty": 0}, {field: all_tokens} | penalty):
        assert client.post(path, json=ENDPOINTS[path] | more).status_code == 200, more
    error = client.post(path, json=ENDPOINTS[path] | {field: default} | penalty).json()["error"]
    assert error["message"] == f"{field}: penalties count all tokens of the text"


def test_two_efforts_that_differ_are_refused(client):
    path = "/v1/chat/completions"
    for effort, status in (("low", 200), ("none", 400)):
        efforts = {"reasoning_effort": "low", "reasoning": {"effort": effort}}
        assert client.post(path, json=ENDPOINTS[path] | efforts).status_code == status


def test_a_response_is_never_stored(server):
    """OpenAI's clients ask for it by default."""
    path = "/v1/responses"
    answer = server.post(path, ENDPOINTS[path] | {"store": True}).json()
    assert (answer["status"], answer["store"]) == ("incomplete", False)
    assert httpx.get(f"{server.url}{path}/{answer['id']}").status_code == 404
    assert server.post(path, ENDPOINTS[path] | {"store": "yes"}).json()["error"]["param"] == "store"


def test_a_prompt_without_alternatives_is_not_scored_in_a_stream(server):
    """As vLLM has it."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        events = server.events(path, ENDPOINTS[path] | {"prompt_logprobs": 0})
        assert not any("prompt_logprobs" in event for event in events)
        error = server.post(path, ENDPOINTS[path] | {"prompt_logprobs": 1, "stream": True}).json()["error"]
        assert error["param"] == "prompt_logprobs"


def test_seed_minus_1_is_drawn(server):
    """As in vLLM and llama.cpp."""
    body = ENDPOINTS["/v1/completions"] | {"seed": -1}
    seeds = {server.post("/v1/completions", body).json()["metrics"]["seed"] for _ in range(2)}
    assert len(seeds) == 2
