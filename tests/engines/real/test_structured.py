"""Structured output of the default target: five schemas, with and without drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.verify.structured import ASK, SCHEMAS, is_valid, load_schemas
from redraft.chat import render_chat
from redraft.llm import LLM
from redraft.request import AUTO_REGRESSIVE, Guide, request
from tests.engines.real.methods import SETTINGS

NAMES = ("sentiment", "tuple", "tool_weather", "colour", "version")
CASES = [case for case in load_schemas(SCHEMAS) if case.name in NAMES]


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_a_guided_text_is_the_same_with_drafts_and_valid(smollm2, smollm2_bundle, sampling):
    def answers(llm: LLM, **method: Any) -> list[Any]:
        requests = []
        for place, case in enumerate(CASES):
            schema = json.dumps(case.schema)
            text = render_chat(smollm2, ASK.format(prompt=case.prompt, schema=schema))
            guide = Guide(kind="json_schema", text=schema)
            requests.append(request(text, 64, guide=guide, seed=place, **sampling, **method))
        return llm.run(requests, len(CASES))

    with LLM(smollm2_bundle) as llm:
        llm.runtime.fix_budget()  # drafts where none pay, too
        expected, got = answers(llm, method=AUTO_REGRESSIVE), answers(llm)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
    finished = [(answer, case) for answer, case in zip(got, CASES, strict=True) if answer.finish_reason == "stop"]
    assert len(finished) >= 4
    assert all(is_valid(answer.text, case.schema) for answer, case in finished)
    steps, accepted = (sum(getattr(answer.stats, name) for answer in got) for name in ("steps", "accepted"))
    assert 1 + accepted / steps > 2, "what a schema forces is drafted"
