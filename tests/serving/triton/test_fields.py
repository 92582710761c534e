"""Client fields to protocol: names, values and messages in the client's terms."""

import json

import numpy as np
import pytest

from redraft.request import Guide, InvalidRequest, PromptLimits
from redraft.serving.triton.fields import ENSEMBLE, TENSORRT_LLM


def text(*words: str) -> np.ndarray:
    return np.array([[word.encode() for word in words]], dtype=np.object_)


def ints(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array([values], dtype=np.float32)


def uint64(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.uint64)


def flag(value: bool) -> np.ndarray:
    return np.array([[value]])


def ensemble(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {"text_input": text("hi"), "max_tokens": ints(4)} | changes


def test_every_field_reaches_the_worker():
    request = ENSEMBLE.parse(
        "r1",
        ensemble(
            stream=flag(False),
            temperature=floats(0.7),
            top_p=floats(0.9),
            top_k=ints(5),
            random_seed=uint64(2**64 - 1),
            stop_words=text("a", "é"),
            bad_words=text(""),
            beam_width=ints(1),
            length_penalty=floats(2.0),
            exclude_input_in_output=flag(False),
            drafting_method=np.array([[b"rsd"]], object),
        ),
        json.dumps({"id": "7", "triton_enable_empty_final_response": True}),
    )
    assert (request.text, request.max_tokens, request.stream) == ("hi", 4, False)
    assert request.sampling.temperature == 0.7, "the decimal that the client wrote, not its float32 neighbour"
    assert request.sampling.seed == 2**64 - 1
    assert request.method == "rsd"
    assert (request.stop_words, request.bad_words, request.exclude_input_in_output) == (["a", "é"], [], False)


def test_newer_names_mean_the_same():
    request = ENSEMBLE.parse("r", ensemble(seed=uint64(7), min_tokens=ints(2)))
    assert (request.sampling.seed, request.sampling.min_length) == (7, 2)
    both = ensemble(seed=uint64(7), random_seed=uint64(7), min_length=ints(2), min_tokens=ints(2))
    assert ENSEMBLE.parse("r", both) == request


def test_fields_of_other_servers_samplers():
    request = ENSEMBLE.parse("r", ensemble(min_p=floats(0.1), stop_token_ids=np.array([[3, 5]], np.int32)))
    assert (request.sampling.min_p, request.stop_token_ids) == (0.1, [3, 5])
    with pytest.raises(InvalidRequest, match="stop_token_ids: expected at most 64 items, got 65"):
        ENSEMBLE.parse("r", ensemble(stop_token_ids=np.zeros((1, 65), np.int32)))


def test_top_p_0_is_no_top_p():
    """TensorRT-LLM's client sends it unless it is told otherwise."""
    assert ENSEMBLE.parse("r", ensemble(top_p=floats(0))).sampling.top_p == 0


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_limit_has_two_numbers(top_k):
    assert ENSEMBLE.parse("r", ensemble(top_k=ints(top_k))).sampling.top_k == 0


def test_neutral_values_of_tensors_ask_for_nothing():
    """Those of both models, also of a tensor that only the other one has: HTTP makes a parameter of it."""
    shared = {
        **{"beam_width": ints(1), "num_return_sequences": ints(1), "min_length": ints(0), "min_tokens": ints(0)},
        **{"repetition_penalty": floats(1), "presence_penalty": floats(0), "frequency_penalty": floats(0)},
        **{"min_p": floats(0), "return_log_probs": flag(False), "exclude_input_in_output": flag(True)},
        **{"return_perf_metrics": flag(False), "return_num_input_tokens": flag(False), "cache_prompt": flag(True)},
        **{"return_context_logits": flag(False), "stop_token_ids": np.zeros((1, 0), np.int32), "cache_salt": text("")},
    }
    top = {"top_k": ints(0), "top_p": floats(1), "stop_words": text(""), "bad_words": text(""), "stream": flag(False)}
    runtime = {"runtime_top_k": ints(-1), "runtime_top_p": floats(1), "runtime_top_p_decay": floats(1)}
    beams = {"len_penalty": floats(1), "early_stopping": flag(False), "beam_search_diversity_rate": floats(0)}
    others = {
        "typical_p": 1.0,
        "mirostat": 0,
        "early_stopping": False,
        "mirostat_tau": 5.0,
        "top_a": 0,
        "repeat_penalty": 1,
    }
    given = ENSEMBLE.parse("r", ensemble(**shared, **top, length_penalty=floats(1)), json.dumps(others))
    ids = TENSORRT_LLM.parse(
        "r",
        {"input_ids": ints(5), "request_output_len": ints(4)} | shared | runtime | beams | {"streaming": flag(False)},
    )
    for request in (given, ids):
        sampling = request.sampling.model_dump(exclude_defaults=True)
        penalties = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        assert sampling == penalties | {"min_length": 0, "min_p": 0, "top_k": 0, "top_p": 1}
        rest = request.model_dump(
            exclude={"sampling", "text", "input_ids", "max_tokens", "id", "op"}, exclude_defaults=True
        )
        assert rest == {}
    for name, value in {"typical_p": 0.5, "mirostat": 2, "top_a": 1, "do_sample": False}.items():
        with pytest.raises(InvalidRequest, match=f"unknown field '{name}'"):
            ENSEMBLE.parse("r", ensemble(), json.dumps({name: value}))
    window = json.dumps({"repeat_last_n": 64})
    ENSEMBLE.parse("r", ensemble(presence_penalty=floats(0)), window)
    with pytest.raises(InvalidRequest, match="unknown field 'repeat_last_n'"):
        ENSEMBLE.parse("r", ensemble(presence_penalty=floats(1)), window)


def test_a_stream_never_starts_with_the_prompt():
    tensors = ensemble(exclude_input_in_output=flag(False))
    assert not ENSEMBLE.parse("r", tensors | {"stream": flag(False)}).exclude_input_in_output
    streamed = ENSEMBLE.parse("r", tensors | {"stream": flag(True)})
    assert (streamed.stream, streamed.exclude_input_in_output) == (True, True)


def guided(kind: str, guide: str) -> dict[str, np.ndarray]:
    return {"guided_decoding_guide_type": text(kind), "guided_decoding_guide": text(guide)}


def test_guides_have_tensorrt_llms_names():
    for kind, guide, own in (
        ("json", "", "json"),
        ("json_schema", "{}", "json_schema"),
        ("regex", "a+", "regex"),
        ("ebnf_grammar", 'root ::= "a"', "grammar"),
    ):
        request = ENSEMBLE.parse("r", ensemble(**guided(kind, guide)))
        assert request.guide == Guide(kind=own, text=guide)
    error = "guide.text: the regex cannot be used: unclosed group"
    assert ENSEMBLE.in_client_terms(error) == error.replace("guide.text", "guided_decoding_guide")


def test_a_request_can_keep_to_itself_in_the_cache():
    given = ENSEMBLE.parse("r", ensemble(cache_prompt=flag(False), cache_salt=text("mine")))
    assert (given.cache_prompt, given.cache_salt) == (False, "mine")
    none = ENSEMBLE.parse("r", ensemble(cache_prompt=flag(True), cache_salt=text("")))
    assert none == ENSEMBLE.parse("r", ensemble())


def test_what_is_not_supported_is_accepted_where_it_is_not_asked_for():
    unwanted = {name: flag(False) for name in ("return_context_logits", "return_generation_logits")}
    unwanted |= {name: text("") for name in ("guided_decoding_guide_type", "guided_decoding_guide")}
    parameters = json.dumps({"accumulate_tokens": True, "id": 7, "Streaming": True})
    assert ENSEMBLE.parse("r", ensemble(**unwanted), parameters) == ENSEMBLE.parse("r", ensemble())


def test_a_top_p_that_decays_is_accepted_where_it_stays_the_same():
    needed = {"input_ids": ints(5), "request_output_len": ints(3)}
    others = {"beam_search_diversity_rate": floats(0), "len_penalty": floats(1), "early_stopping": flag(False)}
    stays = {"runtime_top_p_min": floats(1e-6), "runtime_top_p_reset_ids": ints(-1), "runtime_top_p_decay": floats(1)}
    assert TENSORRT_LLM.parse("r", needed | others | stays) == TENSORRT_LLM.parse("r", needed)
    with pytest.raises(InvalidRequest, match=r"^runtime_top_p_decay: expected 1 \(top-p stays the same\), got 0.5$"):
        TENSORRT_LLM.parse("r", needed | {"runtime_top_p_decay": floats(0.5)})
    assert ENSEMBLE.parse("r", ensemble(decoder_text_input=text(""))) == ENSEMBLE.parse("r", ensemble())


def test_a_timeout_comes_with_the_request_or_among_its_parameters():
    assert ENSEMBLE.parse("r", ensemble()).timeout_s is None
    assert ENSEMBLE.parse("r", ensemble(), timeout_us=1_500_000).timeout_s == 1.5
    assert ENSEMBLE.parse("r", ensemble(), '{"timeout": 250000}').timeout_s == 0.25
    assert ENSEMBLE.parse("r", ensemble(), '{"timeout": 0}').timeout_s is None


@pytest.mark.parametrize("value", ["-1", "1.5", '"1"', "true", "null"])
def test_a_timeout_that_is_no_number_of_microseconds(value):
    with pytest.raises(InvalidRequest, match=r"^timeout: expected a whole number of microseconds, got "):
        ENSEMBLE.parse("r", ensemble(), f'{{"timeout": {value}}}')


def test_flags_are_those_that_are_set():
    tensors = ensemble(return_num_input_tokens=flag(True), return_perf_metrics=flag(False))
    assert ENSEMBLE.flagged(tensors) == {"return_num_input_tokens"}
    assert ENSEMBLE.parse("r", tensors) == ENSEMBLE.parse("r", ensemble())
    with pytest.raises(InvalidRequest, match=r"^stop: expected one value, got shape \[1, 2\]$"):
        TENSORRT_LLM.flagged({"stop": np.array([[True, False]])})


def word_list(*rows: list[int]) -> dict[str, np.ndarray]:
    """A request for `tensorrt_llm` with this `stop_words_list`."""
    words = np.array([rows], dtype=np.int32)
    return {"input_ids": ints(5), "request_output_len": ints(3), "stop_words_list": words}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (([5, 6, 7, 0], [1, 3, -1, -1]), [[5], [6, 7]]),
        (([5, 6], [1, 2]), [[5], [6]]),
        (([0], [-1]), []),
        (([], []), []),
    ],
)
def test_words_given_as_token_ids(rows, words):
    tensors = word_list(*rows)
    assert TENSORRT_LLM.parse("r", tensors).stop_word_ids == words
    tensors["bad_words_list"] = tensors.pop("stop_words_list")
    assert TENSORRT_LLM.parse("r", tensors).bad_word_ids == words


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([5, 6], [2, 1]), "^stop_words_list: expected ends of words that grow up to 2, got .2, 1."),
        (([5, 6], [1, 3]), "^stop_words_list: expected ends of words that grow up to 2, got .1, 3."),
        (([5, 6], [0, 2]), "^stop_words_list: expected ends of words that grow up to 2, got .0, 2."),
        (([5, -6], [1, 2]), r"^stop_words_list\[1\]\[0\]: .*got -6"),
        (([5],), r"^stop_words_list: expected shape \[1, 2, n\], got \[1, 1, 1\]"),
        (([5] * 65, list(range(1, 66))), "^stop_words_list: expected at most 64 items, got 65"),
        (([5] * 4097, [-1] * 4097), "^stop_words_list: expected at most 4096 token ids, got 4097"),
    ],
)
def test_words_that_are_no_token_ids(rows, message):
    with pytest.raises(InvalidRequest, match=message):
        TENSORRT_LLM.parse("r", word_list(*rows))


def test_token_ids_are_trimmed_to_input_lengths():
    tensors = {"input_ids": ints(5, 6, 0, 0), "input_lengths": ints(2), "request_output_len": ints(3)}
    assert TENSORRT_LLM.parse("r", tensors).input_ids == [5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_input": text("")}, "text_input.*empty"),
        ({"text_input": np.array([[b"\xff"]], dtype=np.object_)}, "text_input: expected UTF-8"),
        ({"text_input": text("a", "b")}, r"text_input: expected one value, got shape \[1, 2\]"),
        ({"max_tokens": ints(0)}, "^max_tokens: .*got 0"),
        ({"temperature": floats(-1)}, "^temperature: .*got -1"),
        ({"temperature": floats(float("nan"))}, "^temperature: .*nan"),
        ({"top_p": floats(-0.5)}, "^top_p: .*got -0.5"),
        ({"min_length": ints(-1)}, "^min_length: .*got -1"),
        ({"min_tokens": ints(-1)}, "^min_tokens: .*got -1"),
        ({"min_tokens": ints(3), "min_length": ints(2)}, "^min_tokens and min_length mean the same: .*got 3 and 2"),
        ({"random_seed": uint64(3), "seed": uint64(2)}, "^random_seed and seed mean the same: .*got 3 and 2"),
        ({"return_context_logits": flag(True)}, "^return_context_logits: logits are not returned: .*got True"),
        ({"return_generation_logits": flag(True)}, "^return_generation_logits: logits are not returned: .*got True"),
        (guided("structural_tag", "{}"), "^guided_decoding_guide_type: expected one of json, .*got 'structural_tag'"),
        (guided("", "{}"), "^guided_decoding_guide_type: required field is missing"),
        (guided("regex", ""), "^guided_decoding_guide: expected the text of the regex, got ''"),
        (guided("json", "{}"), "^guided_decoding_guide: expected no text for json; json_schema takes a schema"),
        (guided("regex", "a" * 300_000), "^guided_decoding_guide: expected at most 262144 characters, got 300000"),
        ({"repetition_penalty": floats(0)}, "^repetition_penalty: .*got 0"),
        ({"beam_width": ints(2)}, "beam_width: expected 1"),
        ({"surprise": ints(2)}, "surprise: unknown field"),
    ],
)
def test_a_bad_value_is_named_as_the_client_named_it(changes, message):
    with pytest.raises(InvalidRequest, match=message):
        ENSEMBLE.parse("r", ensemble(**changes))


def test_missing_and_unknown_fields():
    with pytest.raises(InvalidRequest, match="text_input: required"):
        ENSEMBLE.parse("r", {"max_tokens": ints(1)})
    with pytest.raises(InvalidRequest, match=r"unknown field 'max_token': expected some of .*max_tokens"):
        ENSEMBLE.parse("r", ensemble(), '{"max_token": 3}')


def test_what_is_too_large_is_refused_before_it_is_converted():
    limits = PromptLimits(tokens=9, text_bytes=45)
    assert ENSEMBLE.parse("r", ensemble(text_input=text("é" * 22)), limits=limits).text == "é" * 22
    with pytest.raises(InvalidRequest, match=r"^text_input: 46 bytes .*at most 45 "):
        ENSEMBLE.parse("r", ensemble(text_input=text("é" * 23)), limits=limits)
    tensors = {"input_ids": ints(*[-1] * 10), "request_output_len": ints(3)}
    with pytest.raises(InvalidRequest, match=r"^the prompt has 10 tokens: expected at most 9$"):
        TENSORRT_LLM.parse("r", tensors, limits=limits)
    assert TENSORRT_LLM.parse("r", tensors | {"input_ids": ints(*[1] * 10), "input_lengths": ints(9)}, limits=limits)
    not_text = np.array([[b"\xff"] * 10_000], dtype=np.object_)
    with pytest.raises(InvalidRequest, match=r"^stop_words: expected at most 64 items, got 10000$"):
        ENSEMBLE.parse("r", ensemble(stop_words=not_text))


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, json.dumps({"x" * 9_000: 1})),
        ({}, json.dumps({"x" * 2**20: 1})),
        ({}, json.dumps({f"x{place}": 1 for place in range(1_000)})),
        ({}, json.dumps({"\n\x1b[31m": 1})),
        ({}, '{"x": ' + "[" * 5_000),
        ({"drafting_method": text("m" * 2**20)}, ""),
        ({"stop_words": text("m" * 2**20)}, ""),
        ({"bad_words": text(*["m" * 900] * 900)}, ""),
        ({"text_input": text("m" * 2**24)}, ""),
    ],
)
def test_no_message_is_long_or_has_control_characters(changes, parameters):
    with pytest.raises(InvalidRequest) as caught:
        ENSEMBLE.parse("r", ensemble(**changes), parameters, PromptLimits(100, 1000))
    assert len(str(caught.value)) < 700
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("length", [0, 3])
def test_input_lengths_out_of_range(length):
    tensors = {"input_ids": ints(5, 6), "input_lengths": ints(length), "request_output_len": ints(3)}
    with pytest.raises(InvalidRequest, match=f"input_lengths: expected 1 to 2.*got {length}"):
        TENSORRT_LLM.parse("r", tensors)


def test_messages_of_the_worker_in_the_terms_of_tensorrt_llm():
    text = "max_tokens: expected at most 9, got 10; sampling.top_p: too small"
    assert TENSORRT_LLM.in_client_terms(text) == (
        "request_output_len: expected at most 9, got 10; runtime_top_p: too small"
    )
    assert ENSEMBLE.in_client_terms("sampling.seed: no", ["text_input", "random_seed"]) == "random_seed: no"
