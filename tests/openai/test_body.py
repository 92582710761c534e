"""Fields of bodies without a server: what asks for nothing is taken, and errors have the client's names of fields."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from redraft.bundle.generation import GENERATION_CONFIG
from redraft.errors import BundleError
from redraft.openai.body import field_names, unserved
from redraft.openai.errors import ApiError, invalid_body
from redraft.openai.model import ServedModel
from redraft.openai.schemas import ChatBody, CompletionBody, ResponsesBody
from redraft.openai.tokens import TokenizeBody, tokenize
from redraft.openai.translate import chat_job, completion_job, responses_job, sampling
from redraft.samplers import EMPTY, PENALIZED, asks_for_nothing
from redraft.serving.settings import ServeSettings
from tests.openai.serving import toy_bundle

NEEDED = {
    ChatBody: {"messages": [{"role": "user", "content": "Hi"}]},
    CompletionBody: {"prompt": "Hi"},
    ResponsesBody: {"input": "Hi"},
}
TOKENIZED = {TokenizeBody: {"prompt": "Hi"}}
JOBS = {TokenizeBody: tokenize, ChatBody: chat_job, CompletionBody: completion_job, ResponsesBody: responses_job}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ServedModel:
    return ServedModel(toy_bundle(tmp_path_factory.mktemp("bundle")))


def refusal(body, model: ServedModel, **fields) -> ApiError:
    """The error of a body, from its schema or from the worker's request."""
    with pytest.raises((ApiError, ValidationError)) as raised:
        JOBS[body](body.model_validate((NEEDED | TOKENIZED)[body] | fields), model)
    error = raised.value
    return invalid_body(error) if isinstance(error, ValidationError) else error


@pytest.mark.parametrize("body", NEEDED | TOKENIZED)
def test_an_unserved_field_is_refused_only_where_it_asks_for_something(body, model):
    needed = (NEEDED | TOKENIZED)[body]
    plain = body.model_validate(needed)
    for field, (neutral, text) in unserved(body).items():
        for value in (
            None,
            {"effort": None},
            *neutral,
            *(value for value in EMPTY if asks_for_nothing(value, neutral)),
        ):
            assert body.model_validate(needed | {field: value}) == plain, (field, value)
        penalty = {"repetition_penalty": 2} if field in PENALIZED else {}
        error = refusal(body, model, **{field: {"a": 1}} | penalty)
        assert (error.param, error.code) == (field, "unsupported_parameter")
        assert error.message == f"{field}: {text}"


def test_false_asks_for_nothing_unless_true_does():
    for neutral in ((), (1,), (True, False)):
        assert asks_for_nothing(False, neutral)
    assert not asks_for_nothing(False, (True,))
    assert not asks_for_nothing(0)
    assert not asks_for_nothing(True, (1,))


@pytest.mark.parametrize("body", NEEDED)
def test_neutral_values_of_served_fields_are_taken(body, model):
    harmless = {
        **{"n": 1, "best_of": 1, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0, "top_k": -1},
        **{"repetition_penalty": 1, "min_p": 0, "top_p": 1, "temperature": 1, "min_tokens": 0, "seed": None},
        **{"stop": [], "stop_token_ids": [], "bad_words": [], "ignore_eos": False, "skip_special_tokens": True},
        **{"guided_json": None, "guided_choice": None, "structured_outputs": {}, "response_format": {"type": "text"}},
        **{"stream_options": {"include_usage": False}, "prompt_logprobs": None, "tools": [], "tool_choice": "none"},
        **{"metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "spaces_between_special_tokens": True},
        **{"length_penalty": 0.5, "early_stopping": True, "add_special_tokens": body is CompletionBody},
        **{"parallel_tool_calls": True, "include_stop_str_in_output": False, "guided_decoding_backend": "auto"},
    }
    taken = {*field_names(body), *body.WITHOUT_EFFECT, *unserved(body)}
    known = {name: value for name, value in harmless.items() if value is None or name in taken}
    plain = JOBS[body](body.model_validate(NEEDED[body] | {"seed": 1}), model).requests
    assert JOBS[body](body.model_validate(NEEDED[body] | known | {"seed": 1}), model).requests == plain


def test_a_text_with_and_without_the_tokenizers_special_tokens(tmp_path):
    bundle = toy_bundle(tmp_path)
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.save(str(bundle / "tokenizer.json"))
    served = ServedModel(bundle)
    (whole,), (bare,) = (
        completion_job(CompletionBody(prompt="Hi", add_special_tokens=special), served).requests
        for special in (True, False)
    )
    assert whole.input_ids == [0, *bare.input_ids]


def test_what_no_answer_has_may_be_included():
    body = ResponsesBody.model_validate({"input": "Hi", "include": ["reasoning.encrypted_content"]})
    assert not body.log_probs
    with pytest.raises(ValidationError, match="include"):
        ResponsesBody.model_validate({"input": "Hi", "include": ["surprise"]})


@pytest.mark.parametrize(
    ("body", "field"), [(body, field) for body in NEEDED for field in sorted(field_names(body) - {"model"})]
)
@pytest.mark.parametrize("value", [7.5, "xyz", [[]], {"a": {"b": 1}}], ids=["number", "text", "list", "object"])
def test_an_error_begins_with_the_field_that_the_client_sent(body, field, value, model):
    try:
        JOBS[body](body.model_validate(NEEDED[body] | {field: value}), model)
    except ValidationError as error:
        raised = invalid_body(error)
    except ApiError as error:
        raised = error
    else:
        return
    name = raised.param.partition("[")[0].partition(".")[0]
    assert name == field
    assert raised.message.startswith(raised.param) or raised.message.startswith(f"{field}"), raised.message


@pytest.mark.parametrize(
    ("body", "fields", "param"),
    [
        (ChatBody, {"max_completion_tokens": 999}, "max_completion_tokens"),
        (ResponsesBody, {"max_output_tokens": 999}, "max_output_tokens"),
        (CompletionBody, {"bad_words": ["x" * 999] * 20}, "bad_words"),
        (ResponsesBody, {"text": {"verbosity": "high"}}, "text.verbosity"),
        (CompletionBody, {"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (ResponsesBody, {"input": [{"role": "user", "content": "a"}, {"type": "function_call"}]}, "input"),
        (ResponsesBody, {"input": []}, "input"),
        (ResponsesBody, {"instructions": "a" * 9999}, "instructions"),
        (ResponsesBody, {"instructions": "a", "input": "a" * 9999}, "input"),
        (CompletionBody, {"best_of": 2}, "best_of"),
        (ResponsesBody, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (ChatBody, {"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_names_of_what_is_checked_later(body, fields, param, model):
    error = refusal(body, model, **fields)
    assert error.param == param
    assert error.message.startswith(param)
    assert "messages" not in error.message
    assert error.message.count(", got ") <= 1


def test_instructions_of_too_many_tokens_are_named(model):
    error = refusal(ResponsesBody, model, instructions="a b " * 300)
    assert (error.param, error.message) == ("instructions", "the prompt has 1200 tokens: expected at most 255")


def test_a_models_own_sampling_is_used_where_the_client_says_nothing(tmp_path):
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    others = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": [1, 2], "transformers_version": "5"}
    bundle = toy_bundle(tmp_path)
    (bundle / GENERATION_CONFIG).write_text(json.dumps(own | others))
    served, plain = ServedModel(bundle), ServedModel(bundle, ServeSettings(generation_config="vllm"))
    for body, needed in NEEDED.items():
        asked = body.model_validate(needed)
        assert sampling(asked, served) == own
        assert sampling(asked, plain) == {
            **{"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        }
        said = body.model_validate(needed | {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0})
        assert sampling(said, served) == {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0} | {
            "repetition_penalty": 1.1
        }
        (request,) = JOBS[body](asked, served).requests
        assert request.sampling.model_dump(exclude_none=True, exclude={"penalize_prompt"}) == own
    limit = [chat_job(ChatBody.model_validate(NEEDED[ChatBody] | fields), served) for fields in ({}, {"max_tokens": 9})]
    assert [job.requests[0].max_tokens for job in limit] == [40, 9]
    assert served.successor().defaults == served.defaults
    (bundle / GENERATION_CONFIG).write_text('{"top_p": 3}')
    with pytest.raises(BundleError, match=r"generation_config\.json: top_p"):
        ServedModel(bundle)
