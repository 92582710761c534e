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
from redraft.openai.translate import chat_job, completion_job, sampling
from redraft.samplers import EMPTY, PENALIZED, asks_for_nothing
from redraft.serving.settings import ServeSettings
from tests.openai.jobs import GENERATING, JOBS, NEEDED, refusal
from tests.openai.serving import toy_bundle

HELLO = [{"role": "user", "content": "Hello"}]


def prompt_ids(model: ServedModel, messages: list, **fields) -> list[int]:
    """The prompt of a conversation, which chats, responses and the counting of tokens have alike."""
    bodies = (ChatBody, "messages"), (ResponsesBody, "input"), (TokenizeBody, "messages")
    chat, response, counted = (
        JOBS[body](body.model_validate({name: messages} | fields), model) for body, name in bodies
    )
    assert chat.prompts[0].ids == response.prompts[0].ids == counted["tokens"]
    return counted["tokens"]


def asserted_prompt(model: ServedModel, text: str, messages: list | None = None, **fields) -> None:
    """Asserts what the prompt of a conversation is."""
    assert prompt_ids(model, messages or HELLO, **fields) == model.codec.encode(text), fields


@pytest.mark.parametrize("body", NEEDED)
def test_an_unserved_field_is_refused_only_where_it_asks_for_something(body, model):
    needed = NEEDED[body]
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


@pytest.mark.parametrize("body", GENERATING)
@pytest.mark.parametrize("value", [7.5, "xyz", [[]], {"a": {"b": 1}}], ids=["number", "text", "list", "object"])
def test_an_error_begins_with_the_field_that_the_client_sent(body, value, model):
    for field in sorted(field_names(body) - {"model"}):
        try:
            JOBS[body](body.model_validate(NEEDED[body] | {field: value}), model)
        except ValidationError as error:
            raised = invalid_body(error)
        except ApiError as error:
            raised = error
        else:
            continue
        assert raised.param.partition("[")[0].partition(".")[0] == field
        assert raised.message.startswith((raised.param, field)), raised.message


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
    for body in GENERATING:
        needed = NEEDED[body]
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


def test_fields_of_the_conversation_reach_the_template(tmp_path):
    """Qwen3's template has such a switch. A message is continued without its end."""
    template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}.{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}"
        "{% if documents %}{{ documents[0].text }}{% endif %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    model = ServedModel(toy_bundle(tmp_path, template))
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    for fields, text in (
        ({}, "<user>Hello.<assistant>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>Hello.<quiet><assistant>"),
        ({"documents": [{"text": "d"}]}, "<user>Hello.d<assistant>"),
        ({"add_generation_prompt": False}, "<user>Hello."),
        ({"messages": begun, "continue_final_message": True}, "<user>Hello.<assistant>Well"),
    ):
        asserted_prompt(model, text, **fields)
    for fields, said in (
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message: expected"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: expected tools as a field of its own"),
    ):
        error = refusal(ChatBody, model, **fields)
        assert (error.status, error.param) == (400, said.partition(":")[0])
        assert error.message.startswith(said)


QUIET = "<think>\n\n</think>\n\n"
EFFORTS = [
    ({}, ""),
    ({"reasoning_effort": None, "reasoning": {}}, ""),
    ({"reasoning_effort": "none"}, QUIET),
    ({"reasoning": {"effort": "none"}}, QUIET),
    ({"reasoning": {"effort": "none", "summary": "auto"}}, QUIET),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, ""),
    ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, QUIET),
    ({"reasoning_effort": "minimal"}, ""),
    ({"reasoning_effort": "max"}, ""),
]


def test_an_effort_of_reasoning_turns_thinking_off(tmp_path):
    """By Qwen3's switch. `chat_template_kwargs` win, then the request's effort, then the server's defaults."""
    template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
        "{% if enable_thinking is defined and enable_thinking is false %}" + QUIET + "{% endif %}"
    )
    bundle = toy_bundle(tmp_path, template)
    model = ServedModel(bundle)
    for fields, end in EFFORTS:
        asserted_prompt(model, "<user>Hello<assistant>" + end, **fields)
    for body in (ChatBody, ResponsesBody):
        error = refusal(body, model, reasoning_effort="lots")
        assert error.param == "reasoning_effort"
        assert "'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max', got 'lots'" in error.message
    quiet = ServedModel(bundle, ServeSettings(default_chat_template_kwargs={"enable_thinking": False}))
    asserted_prompt(quiet, "<user>Hello<assistant>" + QUIET)
    asserted_prompt(quiet, "<user>Hello<assistant>", reasoning_effort="low")


def test_options_of_the_template_have_defaults(tmp_path):
    bundle = toy_bundle(tmp_path, "{{ messages[0].content }}{{ style }}{{ depth }}")
    model = ServedModel(bundle, ServeSettings(default_chat_template_kwargs={"style": "s", "depth": 1}))
    asserted_prompt(model, "Hellos1")
    asserted_prompt(model, "Hellos2", chat_template_kwargs={"depth": 2})


@pytest.mark.parametrize(
    ("template", "said"),
    [("{% nonsense %}", "cannot be read"), ("{{ 'a' * 3000000000 }}", "takes more than 5 s or 1 GiB")],
)
def test_a_template_that_cannot_be_used_leaves_completions(tmp_path, template, said):
    model = ServedModel(toy_bundle(tmp_path, template))
    error = refusal(ChatBody, model)
    assert (error.status, error.param) == (400, "messages")
    assert said in error.message
    assert completion_job(CompletionBody(prompt="Hello"), model).requests


def test_control_tokens_of_a_message_stay_text_on_request(model, tmp_path):
    """In chats, in responses, and where tokens are counted; the server's option is for requests that do not say it."""
    said = [{"role": "user", "content": "a<end>b"}]
    encode = model.codec.encode
    plain, kept = encode("<user>a<end>b<assistant>"), [*encode("<user>a<"), *encode("end>b<assistant>")]
    assert 0 in plain
    assert 0 not in kept
    keeping = ServedModel(toy_bundle(tmp_path), ServeSettings(sanitize_control_tokens=True))
    for served, asked, ids in (
        (model, {}, plain),
        (model, {"sanitize_control_tokens": True}, kept),
        (keeping, {}, kept),
        (keeping, {"sanitize_control_tokens": False}, plain),
    ):
        assert prompt_ids(served, said, **asked) == ids
    assert tokenize(TokenizeBody(prompt="a<end>b"), keeping)["tokens"] == encode("a<end>b")
