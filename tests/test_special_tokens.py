"""Special tokens of chats: the template writes them, and the tokenizer adds none, as with transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from redraft import LLM
from redraft.chat import encode_user_turn
from redraft.openai.model import ServedModel
from redraft.openai.schemas import ChatBody, CompletionBody, ResponsesBody
from redraft.openai.tokens import TokenizeBody, tokenize
from redraft.openai.translate import chat_job, completion_job, responses_job
from redraft.runtime import Runtime
from redraft.serving.settings import ServeSettings
from redraft.serving.triton.fields import ENSEMBLE, PREPROCESSING
from redraft.text import TextCodec
from redraft.training.conversations import Template
from tests.openai.serving import toy_bundle
from tests.test_llm import toy_runtime

BOS = "<end>"
BODY = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
TEMPLATES = {
    "the template writes it": "{{ bos_token }}" + BODY,
    "the template does not": BODY,
    "it writes two": "{{ bos_token }}{{ bos_token }}" + BODY,
}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES)
def bundle(request, tmp_path):
    """A bundle whose tokenizer begins every text with a token."""
    folder = toy_bundle(tmp_path / "bundle", request.param)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))
    return folder


@pytest.fixture
def reference(bundle) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bundle / "tokenizer.json"), bos_token=BOS)
    tokenizer.chat_template = (bundle / "chat_template.jinja").read_text()
    return tokenizer


@pytest.fixture
def expected(reference) -> list[int]:
    encoded = reference.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True)
    ids = encoded if isinstance(encoded, list) else encoded["input_ids"]
    text = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ids == reference.encode(text, add_special_tokens=False)
    return ids


def runtime_of(bundle) -> Runtime:
    runtime = toy_runtime()
    runtime.codec, runtime.path = TextCodec.load(bundle / "tokenizer.json"), bundle
    return runtime


@pytest.mark.parametrize("sanitize", [False, True])
def test_v1_encodes_a_chat_as_transformers(bundle, expected, sanitize):
    model = ServedModel(bundle, ServeSettings(sanitize_control_tokens=sanitize))
    (chat,) = chat_job(ChatBody(messages=MESSAGES), model).requests
    (response,) = responses_job(ResponsesBody(input=MESSAGES), model).requests
    counted = tokenize(TokenizeBody(messages=MESSAGES), model)["tokens"]
    assert chat.input_ids == response.input_ids == counted == expected


def test_v1_adds_them_to_texts_and_where_it_is_asked_to(bundle, reference):
    model = ServedModel(bundle)
    (text,) = completion_job(CompletionBody(prompt="Hi"), model).requests
    assert text.input_ids == tokenize(TokenizeBody(prompt="Hi"), model)["tokens"] == reference.encode("Hi")
    assert text.input_ids[0] == reference.bos_token_id
    bare = reference.encode("Hi", add_special_tokens=False)
    assert tokenize(TokenizeBody(prompt="Hi", add_special_tokens=False), model)["tokens"] == bare
    asked = tokenize(TokenizeBody(messages=MESSAGES, add_special_tokens=True), model)["tokens"]
    assert asked[0] == reference.bos_token_id


def test_llm_encodes_a_chat_as_transformers(bundle, reference, expected):
    prompts = []
    with LLM(runtime_of(bundle)) as llm:
        submit = llm.runtime.scheduler.submit
        llm.runtime.scheduler.submit = lambda sequence: prompts.append(list(sequence.prompt)) or submit(sequence)
        llm.chat(MESSAGES, max_tokens=1)
        list(llm.stream(MESSAGES, max_tokens=1))
        llm.generate(llm.render(MESSAGES), max_tokens=1, add_special_tokens=False)
        llm.generate("Hi", max_tokens=1)
    assert prompts == [*[expected] * 3, reference.encode("Hi")]
    assert encode_user_turn(bundle, TextCodec.load(bundle / "tokenizer.json"), "Hi") == expected


def test_triton_encodes_a_chats_text_as_transformers(bundle, reference, expected):
    """Its clients write the chat."""
    text = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    given, plain = np.array([[text.encode()]], object), np.array([[False]])
    tensors = {"text_input": given, "max_tokens": np.array([[1]], np.int32), "add_special_tokens": plain}
    request = ENSEMBLE.parse("r", tensors)
    assert list(runtime_of(bundle).sequence(0, request).prompt) == expected
    names = {"text_input": "QUERY", "max_tokens": "REQUEST_OUTPUT_LEN", "add_special_tokens": "ADD_SPECIAL_TOKENS"}
    first = PREPROCESSING.parse("r", {names[name]: tensor for name, tensor in tensors.items()})
    assert (first.text, first.add_special_tokens) == (text, False)


def test_drafters_are_trained_on_the_same_tokens(reference, expected):
    template = Template.of(reference)
    assert [*template.prefix, *reference.encode("Hi", add_special_tokens=False), *template.assistant] == expected
