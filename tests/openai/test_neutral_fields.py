"""Fields of OpenAI's clients, gateways and other servers at values that ask for nothing, on every endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from redraft.openai.schemas import ChatBody, CompletionBody, ResponsesBody
from redraft.openai.tokens import TokenizeBody
from redraft.openai.translate import chat_job
from tests.openai.jobs import GENERATING, JOBS, NEEDED, refusal
from tests.serving.client_side import HTTP

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
    "store": (True,),
    "stream_options": (None, {"include_usage": False}),
    "suffix": ("",),
    "temperature": (1,),
    "text": ({"format": TEXT, "verbosity": "medium"}, {"format": TEXT}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "new_field": (None,),
    "top_p": (1,),
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
    "early_stopping": (False, True),
    "guided_choice": (None,),
    "guided_decoding_backend": ("auto",),
    "guided_json": (None,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 0.5),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (None,),
    "repetition_penalty": (1,),
    "request_id": ("r",),
    "sanitize_control_tokens": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
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


@pytest.mark.parametrize("body", NEEDED)
@pytest.mark.parametrize("fields", [OPENAI, VLLM, OTHERS], ids=["openai", "vllm", "others"])
def test_a_neutral_value_changes_nothing(body, fields, model):
    def job(**more):
        made = JOBS[body](body.model_validate(NEEDED[body] | more), model)
        return made if body is TokenizeBody else made.requests

    plain = job()
    for field, value in [(field, value) for field, values in fields.items() for value in values]:
        assert job(**{field: value}) == plain, (field, value)


@pytest.mark.parametrize("body", NEEDED)
def test_another_value_is_refused_by_name(body, model):
    for field, value in ASKING.items():
        error = refusal(body, model, **{field: value})
        assert (error.param, error.message.partition(":")[0]) == (field, field)


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        (CompletionBody, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (CompletionBody, "chat_template_kwargs", {"enable_thinking": False}),
        (ChatBody, "echo", True),
        (ChatBody, "suffix", "end"),
        (ResponsesBody, "n", 2),
        (ResponsesBody, "draft_trees", True),
        (ResponsesBody, "response_format", {"type": "json_object"}),
        (TokenizeBody, "logprobs", True),
        (TokenizeBody, "n", 2),
    ],
)
def test_fields_of_one_endpoint_are_refused_by_name_on_others(body, field, value, model):
    error = refusal(body, model, **{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize("body", GENERATING)
@pytest.mark.parametrize(("field", "default", "all_tokens"), [("repeat_last_n", 64, -1), ("penalize_nl", False, True)])
def test_what_penalties_count_matters_with_penalties_only(body, field, default, all_tokens, model):
    """Clients of llama.cpp send its defaults with every request."""
    penalty = {"presence_penalty": 1.5} if body is ChatBody else {"repetition_penalty": 1.5}
    for more in ({field: default}, {field: default, "presence_penalty": 0}, {field: all_tokens} | penalty):
        assert JOBS[body](body.model_validate(NEEDED[body] | more), model)
    error = refusal(body, model, **{field: default} | penalty)
    assert error.message == f"{field}: penalties count all tokens of the text"


def test_two_efforts_that_differ_are_refused(model):
    asked = {"reasoning_effort": "low", "reasoning": {"effort": "low"}}
    assert chat_job(ChatBody.model_validate(NEEDED[ChatBody] | asked), model)
    assert refusal(ChatBody, model, **asked | {"reasoning": {"effort": "none"}}).status == 400


def test_a_response_is_never_stored(server):
    """OpenAI's clients ask for it by default."""
    path = "/v1/responses"
    asked = {"input": "Hi", "max_output_tokens": 1, "store": True, "reasoning": {"effort": "none"}}
    answer = server.post(path, asked).json()
    assert (answer["status"], answer["store"]) == ("incomplete", False)
    assert answer["reasoning"] == {"effort": "none", "summary": None}
    assert HTTP.get(f"{server.url}{path}/{answer['id']}").status_code == 404


def test_a_prompt_without_alternatives_is_not_scored_in_a_stream(server, model):
    """As vLLM has it."""
    for body, path in ((ChatBody, "/v1/chat/completions"), (CompletionBody, "/v1/completions")):
        events = server.events(path, NEEDED[body] | {"max_tokens": 1, "prompt_logprobs": 0})
        assert not any("prompt_logprobs" in event for event in events)
        assert refusal(body, model, prompt_logprobs=1, stream=True).param == "prompt_logprobs"


@pytest.mark.parametrize("body", GENERATING)
def test_seed_minus_1_is_drawn_and_top_p_0_leaves_all_tokens(body, model):
    """As in vLLM and llama.cpp."""
    asked = JOBS[body](body.model_validate(NEEDED[body] | {"seed": -1, "top_p": 0}), model).requests[0].sampling
    assert (asked.seed, asked.top_p) == (None, None)
