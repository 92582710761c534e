"""What the clients of TensorRT-LLM and Triton send beyond the fields of every request: names, shapes and types are
those of their sources, as the migration guide lists them."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.conftest import wait_until
from tests.serving.client_side import GrpcStream, told

ANSWER = " w0é w1é w2é w3é"
FRONT_END = {
    "text_input": np.array([["one two three"]], np.object_),
    "stream": np.array([[True]], np.bool_),
    "max_tokens": np.array([[4]], np.int32),
    "stop_words": np.array([["never", "ever"]], np.object_),
    "top_p": np.array([[1.0]], np.float32),
    "frequency_penalty": np.array([[0.0]], np.float32),
    "presence_penalty": np.array([[0.0]], np.float32),
    "seed": np.array([[2**64 - 1]], np.uint64),
    "temperature": np.array([[1.0]], np.float32),
    "exclude_input_in_output": np.array([[True]], np.bool_),
    "return_num_input_tokens": np.array([[True]], np.bool_),
    "return_num_output_tokens": np.array([[True]], np.bool_),
}
"""What Triton's OpenAI front end makes of a completion for a model that is not vLLM's."""
CORE_CLIENT = {
    **{"input_ids": [5, 6, 7], "input_lengths": 3, "beam_width": 1, "temperature": 1.0, "end_id": 2, "pad_id": 2},
    **{"runtime_top_k": 1, "runtime_top_p": 0.0},
}
"""What TensorRT-LLM's inflight_batcher_llm_client sends by default, but the length."""
STOP = {
    "input_ids": np.array([[123456789]], np.int32),  # whatever was in memory there
    "input_lengths": np.array([[0]], np.int32),
    "request_output_len": np.array([[0]], np.int32),
    "stop": np.array([[True]], np.bool_),
}
"""Its request to stop the one with the same id."""
METRICS = {
    "kv_cache_alloc_new_blocks": "INT32", "kv_cache_reused_blocks": "INT32", "kv_cache_alloc_total_blocks": "INT32",
    "arrival_time_ns": "INT64", "first_scheduled_time_ns": "INT64", "first_token_time_ns": "INT64",
    "last_token_time_ns": "INT64", "acceptance_rate": "FP32", "total_accepted_draft_tokens": "INT32",
    "total_draft_tokens": "INT32",
}  # fmt: skip


def number(result, name: str, datatype: str) -> float:
    """The number of an output of shape [1, 1]."""
    output = result.get_output(name)
    assert (output.datatype, list(output.shape)) == (datatype, [1, 1]), name
    return result.as_numpy(name)[0, 0].item()


def test_tritons_openai_front_end_streams(service, stream):
    stream.send(**FRONT_END)
    results = stream.receive_all()
    assert [result.as_numpy("text_output").tolist() for result in results] == [
        [word.encode()] for word in (" w0é", " w1é", " w2é", " w3é")
    ], "one text each, as it reads them"
    assert [number(result, "num_input_tokens", "INT32") for result in results] == [3] * 4, "it takes the first one"
    assert [number(result, "num_output_tokens", "INT32") for result in results] == [1] * 4, "it adds them up"


def test_tritons_openai_front_end_gets_one_response_without_a_stream(service, stream):
    stream.send(**FRONT_END | {"stream": np.array([[False]], np.bool_)})
    (result,) = stream.receive_all()
    assert result.as_numpy("text_output").tolist() == [ANSWER.encode()]
    assert number(result, "num_input_tokens", "INT32") == 3
    assert number(result, "num_output_tokens", "INT32") == 4


def test_a_tool_that_tritons_openai_front_end_names_is_a_guide(service, stream):
    guide = {
        "guided_decoding_guide_type": np.array([["json_schema"]], np.object_),
        "guided_decoding_guide": np.array([['{"type": "object"}']], np.object_),
    }
    stream.send(**FRONT_END | guide | {"stream": np.array([[False]], np.bool_)})
    (result,) = stream.receive_all()
    assert result.as_numpy("text_output").tolist() == [f'json_schema {{"type": "object"}}{ANSWER}'.encode()]


def test_counts_come_only_where_they_are_asked_for(service, stream):
    stream.send(text_input="hi", max_tokens=1, return_num_input_tokens=False)
    (result,) = stream.receive_all()
    assert {output.name for output in result.get_response().outputs} == {
        "text_output", "batch_index", "sequence_index"
    }  # fmt: skip


def test_the_core_models_client(service, stream):
    stream.send("tensorrt_llm", "7", request_output_len=2, streaming=False, **CORE_CLIENT)
    (result,) = stream.receive_all()
    assert result.as_numpy("output_ids").tolist() == [[[0, 1]]]
    assert (number(result, "batch_index", "INT32"), number(result, "sequence_index", "INT32")) == (0, 0)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_request_ends_the_request_with_its_id(service, stream, streaming):
    """Which answers what it has, as with TensorRT-LLM; a neighbour of another id goes on."""
    neighbour = GrpcStream(service.grpc)
    with told(service, "hold"):
        neighbour.send("tensorrt_llm", "other", request_output_len=60, streaming=True, **CORE_CLIENT)
        stream.send("tensorrt_llm", "mine", request_output_len=400, streaming=streaming, **CORE_CLIENT)
        if streaming:
            stream.receive()
        wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 2)
        stopper = GrpcStream(service.grpc)
        stopper.send("tensorrt_llm", "mine", **STOP)
        (answer,) = stopper.receive_all()
    assert not answer.get_response().outputs, "the client takes it for the confirmation"
    results = stream.receive_all()
    assert sum(number(result, "sequence_length", "INT32") for result in results) < 400
    assert len(neighbour.receive_all()) == 60
    neighbour.close()
    stopper.close()


def test_a_stop_request_of_an_unknown_or_no_id(service, stream):
    stream.send("tensorrt_llm", "gone", **STOP)
    (answer,) = stream.receive_all()
    assert not answer.get_response().outputs, "it may have just ended"
    stream.send("tensorrt_llm", **STOP)
    with pytest.raises(InferenceServerException, match=r"stop: expected the id of the request to stop .*, got none"):
        stream.receive()
    stream.send("tensorrt_llm", request_output_len=1, stop=False, **CORE_CLIENT)
    assert len(stream.receive_all()) == 1


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_performance_metrics(service, stream, model):
    prompt = {"text_input": "hi", "max_tokens": 4} if model == "ensemble" else {"request_output_len": 4, **CORE_CLIENT}
    stream.send(model, return_perf_metrics=True, **prompt)
    (result,) = stream.receive_all()
    values = {name: number(result, name, datatype) for name, datatype in METRICS.items()}
    assert (values["total_draft_tokens"], values["total_accepted_draft_tokens"]) == (9, 3)
    assert values["acceptance_rate"] == pytest.approx(1 / 3)
    first, last = values["first_token_time_ns"], values["last_token_time_ns"]
    assert values["arrival_time_ns"] == values["first_scheduled_time_ns"] == first - 20_000_000 == last - 35_000_000
    stream.send(model, return_perf_metrics=True, **{"stream" if model == "ensemble" else "streaming": True}, **prompt)
    for result in stream.receive_all():
        assert all(result.get_output(name) for name in METRICS), "the client reads them in every response"


@pytest.mark.parametrize("words", [np.zeros((1, 2, 0), np.int32), np.array([[[0], [-1]]], np.int32)])
def test_word_lists_without_a_word(service, stream, words):
    """As TensorRT-LLM's preprocessing makes them of no words, and of one that is empty."""
    stream.send(
        "tensorrt_llm", request_output_len=1, stop_words_list=words, bad_words_list=words,
        decoder_input_ids=np.array([[2]], np.int32), decoder_input_lengths=np.array([[1]], np.int32), **CORE_CLIENT,
    )  # fmt: skip
    assert len(stream.receive_all()) == 1
