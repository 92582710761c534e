"""The sizes of a training that fits a time, and what twice the time may bring."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from redraft.bundle.config import BundleConfig
from redraft.bundle.method import MethodConfig
from redraft.prompts import Prompt
from redraft.request import AUTO_REGRESSIVE
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from redraft.text import TextCodec
from redraft.training import plan
from redraft.training.gains import (
    fitting_prompts,
    gain_of_twice,
    measure_gains,
    shipped_curves,
    unseen_prompts,
)
from redraft.training.parts import held_out_tokens
from redraft.training.plan import PASSES, make_plan
from redraft.training.prompts import cutoff_of
from tests.engines.tiny import tiny_target
from tests.toy_engine import ToyEngine, toy_codec


@pytest.mark.parametrize(("teacher", "training"), [(700, 2900), (120, 1200), (5000, 900), (60, 4000)])
@pytest.mark.parametrize("hours", [0.25, 1, 7])
def test_teacher_data_and_training_take_the_time_given(hours, teacher, training):
    made = make_plan("model", hours, teacher, training, 20)
    writing = (made.tokens + held_out_tokens(made.tokens)) / teacher
    assert writing + made.positions / training + 40 == pytest.approx(3600 * hours, rel=0.05)
    assert PASSES[0] * 0.7 <= made.positions / made.tokens <= PASSES[1]


@pytest.mark.parametrize("rates", [(100, 1000), (60, 70), (5, 3), (40, 4000)])
def test_too_little_time_is_refused_with_what_would_do(rates):
    with pytest.raises(ValueError, match=r"--hours 0.01 is too short .* at least (\d+\.\d\d)") as told:
        make_plan("model", 0.01, *rates, 10)
    least = float(str(told.value).rpartition(" ")[2])
    assert 2000 <= make_plan("model", least, *rates, 10).tokens < 4000


def test_no_half_of_a_plan_is_left_on_a_full_disk(tmp_path, monkeypatch):
    def full(file: Path, text: str, **_) -> None:
        with file.open("w") as half:
            half.write(text[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        make_plan("model", 1, 100, 1000, 10).write(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_the_gain_of_a_doubling_is_read_off_the_curves():
    curves = [[(100, 1.2), (200, 1.5), (400, 1.6)], [(50, 1.0), (100, 1.1), (200, 1.0), (400, 1.4)]]
    assert gain_of_twice(curves, 100) == pytest.approx((0.0, 0.3))
    assert gain_of_twice(curves, 10) == pytest.approx((0.1, 0.3)), "the first doubling of each"
    assert gain_of_twice(curves, 9000) == pytest.approx((0.1, 0.3)), "the last"
    for positions in (10_000, 2_000_000):
        least, most = gain_of_twice(shipped_curves(), positions)
        assert 0 <= least < most < 0.5


def test_gains_are_measured_on_prompts_that_are_not_trained_on():
    prompts = [Prompt(str(n), "all", (str(n % 200),)) for n in range(300)]
    held_out = unseen_prompts(prompts, cutoff_of(prompts), [])
    assert 0 < len(held_out) < 30
    assert len(set(held_out)) == len(held_out)
    others = [Prompt(str(n), "all", (f"{n} ",)) for n in range(190, 210)]
    assert unseen_prompts(prompts, cutoff_of(prompts), others) == held_out + [f"{n} " for n in range(200, 210)]
    assert unseen_prompts(prompts[:1], 0, []) == []


def test_gains_are_measured_on_prompts_that_every_bundle_has_room_for(tmp_path, monkeypatch):
    """A model without a chat template continues the prompt as it is."""
    room = {"small": 100, "large": 200}
    monkeypatch.setattr(
        BundleConfig, "read", lambda path: SimpleNamespace(limits=SimpleNamespace(max_len=room[path.name]))
    )
    codec = toy_codec()
    monkeypatch.setattr(TextCodec, "load", lambda _: codec)
    bundles = [tmp_path / name for name in room]
    expected = [codec.encode(text) for text in ("b" * 36, "c")]
    assert fitting_prompts(tmp_path, bundles, ["a" * 37, "b" * 36, "c"]) == expected
    with pytest.raises(ValueError, match="none of 1 prompts to judge by has at most 36 tokens"):
        fitting_prompts(tmp_path, bundles, ["a" * 37])


def test_no_text_comes_twice_in_a_measurement(tmp_path, monkeypatch):
    """Where there are fewer texts than streams, those streams are left out."""
    sent = []
    engine = ToyEngine(slots=4, max_tree=14)
    limits = Limits(slots=4, max_len=256, max_tree=14, prefill_chunk=64)
    plans = {"ngrams": MethodConfig(construction=None, ngram=True, tree_budget=8)}
    runtime = Runtime(engine, toy_codec(), limits, engine.vocab_size, frozenset({0}), plans)
    engine.close = lambda: None
    sequence = runtime.sequence
    runtime.sequence = lambda key, request: sent.append((request.method, request.input_ids)) or sequence(key, request)
    monkeypatch.setattr(Runtime, "load", lambda *_, **__: runtime)
    (tmp_path / "log.jsonl").write_text('{"positions": 9}\n')
    speed = measure_gains(tmp_path, tmp_path, tmp_path, [[5], [6], [7]])["speed"]
    assert [row["streams"] for row in speed["drafter"]] == [1, 2]
    turns = [method for method, _ in sent][::3]
    assert turns == [AUTO_REGRESSIVE, "ngrams"] * 4, "each beside decoding that is as busy"
    assert [ids for _, ids in sent] == [[5], [6], [7]] * 8


def test_a_run_that_was_killed_goes_on_with_its_plan(tmp_path, monkeypatch):
    """Nothing is measured again, unless the target or the hours are others."""
    monkeypatch.setattr(plan, "model_digest", lambda model: model.name)
    monkeypatch.setattr(plan, "measure_teacher_rate", lambda *_: pytest.fail("measured again"))
    stored = make_plan("model", 1, 700, 2900, 20)
    stored.write(tmp_path / "plan.json")
    arguments = (Path("engine"), Path("data"), [], 1.0, lambda _: None)
    assert plan.plan_training(tmp_path / "plan.json", Path("model"), *arguments) == stored
    with pytest.raises(pytest.fail.Exception):
        plan.plan_training(tmp_path / "plan.json", Path("another"), *arguments)
    (tmp_path / "checkpoint.safetensors").touch()
    assert plan.plan_training(tmp_path / "plan.json", Path("model"), *arguments) == stored
    with pytest.raises(ValueError, match="drafter of another plan, for --hours 1: remove or rename it"):
        plan.plan_training(tmp_path / "plan.json", Path("model"), Path("engine"), Path("data"), [], 2.0, lambda _: None)
    assert plan.plan_training(tmp_path / "plan.json", Path("model"), *arguments, kind="eagle3") == stored, (
        "it tells none"
    )
    stored.model_copy(update={"kind": "recurrent"}).write(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="is of a drafter of kind recurrent, not eagle3"):
        plan.plan_training(tmp_path / "plan.json", Path("model"), *arguments, kind="eagle3")


@pytest.mark.parametrize("changed", ["prompts", "chat_template"])
def test_a_plan_of_other_data_is_refused(tmp_path, monkeypatch, changed):
    """Its folders hold what the new run would otherwise take for its own; a plan that does not tell is taken."""
    monkeypatch.setattr(plan, "model_digest", lambda model: model.name)
    monkeypatch.setattr(plan, "measure_teacher_rate", lambda *_: (700.0, 20.0))
    monkeypatch.setattr(plan, "measure_training_rate", lambda *_: 2900.0)
    monkeypatch.setattr(plan.Target, "from_folder", lambda _: tiny_target())
    monkeypatch.setattr(TextCodec, "load", lambda _: SimpleNamespace(encode=list))
    prompts = [Prompt("1", "all", ("why?",))]
    path, model, teacher = tmp_path / "plan.json", tmp_path / "model", tmp_path / "data"
    model.mkdir()
    arguments = (path, model, Path("engine"), teacher)
    stored = plan.plan_training(*arguments, prompts, 1, lambda _: None)
    assert plan.plan_training(*arguments, prompts, 1, lambda _: None) == stored
    if changed == "prompts":
        prompts = [Prompt("1", "all", ("why not?",))]
    else:
        (model / "chat_template.jinja").write_text("{{ messages }}")
    for hours in (1, 2):
        with pytest.raises(ValueError, match=f"remove or rename {tmp_path}, {teacher} and {teacher}-held-out"):
            plan.plan_training(*arguments, prompts, hours, lambda _: None)
