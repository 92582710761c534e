"""`LLM` on the toy engine: what a program sees of several requests at once, and what is left after they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, zip_longest
from pathlib import Path

import pytest

from redraft import LLM
from redraft.bundle.method import MethodConfig
from redraft.request import GenerateRequest, Guide, InvalidRequest
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from tests.engines.tiny import tiny_bundle, tiny_target
from tests.toy_engine import TOY, ToyEngine, only, toy_codec, toy_tokenizer

PROMPTS = ["hello", "to be or not", "abab", "Once upon a time", "x"]
PLAN = MethodConfig(construction="best_first", ngram=True, tree_budget=8)
LIMITS = Limits(slots=2, max_len=256, max_tree=32, prefill_chunk=8)


def toy_runtime(**engine) -> Runtime:
    toy = ToyEngine(slots=LIMITS.slots, **engine)
    return Runtime(toy, toy_codec(), LIMITS, toy.vocab_size, frozenset({0}), only(PLAN))


@pytest.fixture
def llm():
    with LLM(toy_runtime()) as loaded:
        yield loaded


def test_prompts_are_answered_together_as_one_by_one(llm):
    options = {"max_tokens": 30, "temperature": 1.0, "seed": 3, "return_log_probs": True}
    together = llm.generate(PROMPTS, **options)
    one_by_one = [llm.generate(prompt, **options) for prompt in PROMPTS]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in one_by_one]
    assert [answer.text for answer in together] == [llm.runtime.codec.decode(answer.token_ids) for answer in together]
    for answer in together:
        assert len(answer.log_probs) == len(answer.token_ids)
        assert answer.finish_reason == ("length" if len(answer.token_ids) == 30 else "stop")
        assert answer.stats.seed == 3
        assert answer.seconds > 0
    assert sum(answer.stats.accepted for answer in together) > 0
    assert llm.generate([], max_tokens=4) == []
    assert llm.generate("hello", max_tokens=4).log_probs is None


def test_a_prompt_and_its_answer_are_scored(llm):
    """The prompt's log-probabilities are those that the same tokens have in an answer."""
    whole = llm.generate("hello", max_tokens=20, end_id=-1, top_log_probs=2)
    ids = llm.runtime.codec.encode("hello")
    again = GenerateRequest(
        id="r", input_ids=[*ids, *whole.token_ids], max_tokens=0, prompt_log_probs=True, top_log_probs=2
    )
    (scored,) = llm.run([again])
    assert (scored.token_ids, scored.text, scored.finish_reason, scored.log_probs) == ([], "", "length", [])
    assert scored.prompt_log_probs[len(ids) :] == pytest.approx(whole.log_probs, abs=1e-5)
    alternatives = zip(scored.prompt_top_log_probs[len(ids) :], whole.top_log_probs, strict=True)
    assert all([token for token, _ in one] == [token for token, _ in other] for one, other in alternatives)
    assert [top[0][0] for top in whole.top_log_probs] == whole.token_ids, "greedy"
    assert whole.prompt_log_probs is None
    assert llm.generate("hello", 0, prompt_log_probs=True).prompt_log_probs[0] is None


def test_a_bias_steers_an_answer(llm):
    forced = llm.generate("hello", max_tokens=5, logit_bias={40: 100.0})
    assert forced.token_ids == [40] * 5
    assert 40 not in llm.generate("hello", max_tokens=30, temperature=3.0, logit_bias={40: -100.0}).token_ids


def test_a_method_is_chosen_by_name(llm):
    assert llm.methods == [TOY, "auto_regressive"]
    plain = llm.generate("hello", max_tokens=30, method="auto_regressive")
    drafted = llm.generate("hello", max_tokens=30)
    assert plain.token_ids == drafted.token_ids
    assert plain.stats.drafted == 0 < drafted.stats.accepted


def test_a_stream_says_which_tokens_were_drafted(llm):
    expected = llm.generate("hello", max_tokens=40)
    outputs = list(llm.stream("hello", max_tokens=40))
    assert "".join(output.text for output in outputs) == expected.text
    assert [token for output in outputs for token in output.token_ids] == expected.token_ids
    drafted = [flag for output in outputs for flag in output.drafted]
    assert len(drafted) == len(expected.token_ids)
    assert not drafted[0]
    last = outputs[-1]
    assert last.finish_reason == expected.finish_reason
    assert 0 < sum(drafted) <= last.stats.accepted
    assert all(not flag for output in llm.stream("hello", 20, method="auto_regressive") for flag in output.drafted)


def test_other_requests_run_while_a_stream_is_open(llm):
    expected = llm.generate(PROMPTS, max_tokens=30)
    stream = llm.stream(PROMPTS[0], max_tokens=30)
    begun = next(stream).token_ids
    assert [answer.token_ids for answer in llm.generate(PROMPTS, max_tokens=30)] == [a.token_ids for a in expected]
    assert [*begun, *(token for output in stream for token in output.token_ids)] == expected[0].token_ids


def test_a_guide_that_is_too_complex_to_follow_raises(llm):
    schema = json.dumps({"type": "string", "pattern": r"^(?:\S+\s+){0,199}\S+$", "maxLength": 2000})
    guide = Guide(kind="json_schema", text=schema)
    with pytest.raises(InvalidRequest, match="too complex to go on with"):
        llm.generate(PROMPTS, max_tokens=30, guide=guide)
    with pytest.raises(InvalidRequest, match="too complex to go on with"):
        list(llm.stream("hello", max_tokens=30, guide=guide))
    llm.generate("x", max_tokens=2)
    assert llm.runtime.scheduler.idle


def test_an_abandoned_stream_frees_its_slot(llm):
    expected = llm.generate(PROMPTS, max_tokens=30)
    for prompt in PROMPTS * 2:
        list(islice(llm.stream(prompt, max_tokens=200), 1))
    llm.stream("never begun", max_tokens=200)
    llm.generate("x", max_tokens=2)
    assert llm.runtime.scheduler.idle
    assert [answer.token_ids for answer in llm.generate(PROMPTS, max_tokens=30)] == [a.token_ids for a in expected]


def test_a_step_that_was_interrupted_harms_no_later_request(llm, monkeypatch):
    expected = llm.generate(PROMPTS, max_tokens=20)
    stream = llm.stream("hello", max_tokens=100)
    next(stream)
    engine, execute = llm.runtime.engine, llm.runtime.engine.execute

    def interrupted(*given):
        execute(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, max_tokens=20)
    monkeypatch.undo()
    assert llm.runtime.scheduler.idle
    with pytest.raises(RuntimeError, match="interrupted"):
        list(stream)
    assert [answer.token_ids for answer in llm.generate(PROMPTS, max_tokens=20)] == [a.token_ids for a in expected]


def test_threads_take_turns(llm):
    expected = llm.generate(PROMPTS, max_tokens=30)
    found = {}

    def ask(place):
        parts = list(llm.stream(PROMPTS[place], max_tokens=30))
        found[place] = [token for output in parts for token in output.token_ids]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    again = llm.generate(PROMPTS, max_tokens=30)
    for thread in threads:
        thread.join(30)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]
    assert [found[place] for place in range(len(PROMPTS))] == [answer.token_ids for answer in expected]


def test_no_limit_of_tokens_is_what_the_context_has_left(llm):
    answer = llm.generate("hello", max_tokens=None, end_id=-1)
    assert answer.stats.prompt_tokens + len(answer.token_ids) == LIMITS.max_len
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "options", "problem"),
    [
        ("hello", {"method": "magic"}, "method: expected one of toy, auto_regressive, got 'magic'"),
        ("hello", {"temperature": -1.0}, "temperature.*-1"),
        ("hello", {"logit_bias": {999: 1.0}}, "^logit_bias: expected token ids below 111"),
        ("hello", {"max_tokens": 255}, "expected at most 251 after a prompt of 5 tokens"),
        ("a" * 300, {}, "expected at most 255"),
        ("", {}, "empty"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(llm, prompt, options, problem):
    options = {"max_tokens": 4} | options
    with pytest.raises(InvalidRequest, match=problem):
        llm.generate(["hello", prompt], **options)
    with pytest.raises(InvalidRequest, match=problem):
        llm.stream(prompt, **options)
    assert llm.runtime.scheduler.totals.requests == 0


def test_a_closed_llm_says_so(llm):
    stream = llm.stream("hello", max_tokens=100)
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("hello", max_tokens=4), lambda: llm.stream("hello", 4), lambda: next(stream)):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_runtime_has_one_llm(llm):
    """Two would take each other's outputs."""
    with pytest.raises(ValueError, match="Runtime"):
        LLM(llm.runtime)


def test_llms_of_one_process_do_not_mix(tmp_path):
    """Two of one bundle and one of another, by turns and in threads."""
    tokenizer = toy_tokenizer().to_str()
    openvino, torch = (
        tiny_bundle(tmp_path / backend, tiny_target(), backend, tokenizer=tokenizer).path
        for backend in ("openvino", "torch")
    )
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 5}
    with LLM(openvino) as one, LLM(openvino) as same, LLM(torch) as other:
        llms = (one, same, other)
        expected = [llm.generate(PROMPTS, **options) for llm in llms]
        tokens = [[answer.token_ids for answer in answers] for answers in expected]
        streams = [llm.stream(PROMPTS[0], **options) for llm in llms]
        rows = zip_longest(*streams)
        turns = [[token for part in parts if part for token in part.token_ids] for parts in zip(*rows, strict=True)]
        assert turns == [answers[0] for answers in tokens]
        with ThreadPoolExecutor() as threads:
            answered = threads.map(lambda llm: [answer.token_ids for answer in llm.generate(PROMPTS, **options)], llms)
        assert list(answered) == tokens
        assert tokens[0] == tokens[1]


def test_importing_the_package_loads_nothing_else():
    """`redraft.serving` runs in Triton's environment, which has no tokenizers."""
    code = "import redraft, sys; assert 'numpy' not in sys.modules and 'redraft.llm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_openvino_reports_nothing(tmp_path):
    """Its telemetry keeps an identity in the home folder."""
    code = "import redraft.engines.openvino, openvino"
    environment = os.environ | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1], env=environment)
    assert not list(tmp_path.iterdir())
