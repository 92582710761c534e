"""What `redraft doctor` says of bundles and machines, by what it measures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from redraft import doctor
from redraft.bundle.config import BundleConfig, LimitsInfo, TargetInfo
from redraft.bundle.method import MethodConfig
from redraft.model_defs.target.model import Target
from tests.engines.tiny import tiny_bundle
from tests.model_defs.weights.folders import write_folder

TARGET = TargetInfo(
    num_layers=3, hidden_size=96, feature_size=96, num_heads=3, num_kv_heads=3, head_size=32, vocab_size=111,
    eos_token_ids=(2,), max_position=64,
)  # fmt: skip
METHOD = MethodConfig(
    drafter="recurrent", construction="best_first", beam_width=3, beam_length=3, candidates=3, tree_budget=7,
    ngram=True, verification="sampled_walk",
)  # fmt: skip


def config_of(precision: str = "bf16", backend: str = "openvino", **methods: MethodConfig) -> BundleConfig:
    return BundleConfig(
        name="b", backend=backend, precision=precision, target=TARGET, methods=methods,
        limits=LimitsInfo(slots=3, max_len=64, max_tree=8, prefill_chunk=5),
    )  # fmt: skip


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    return tmp_path


@pytest.mark.parametrize(
    ("precision", "features", "wrong"),
    [
        ("bf16", {"avx2", "avx512f"}, True),
        ("bf16", {"avx512f", "avx512_bf16"}, False),
        ("bf16", {"amx_bf16"}, False),
        ("int8", {"avx2"}, False),
    ],
)
def test_bf16_needs_a_cpu_that_multiplies_it(precision, features, wrong):
    assert bool(doctor.processor(config_of(precision), features).remedy) == wrong


@pytest.mark.parametrize(
    ("threads", "quota", "physical", "wrong"),
    [(4, 2.0, 8, True), (4, None, 2, True), (2, 2.0, 2, False), (1, None, 1, False)],
)
def test_threads_share_no_core(monkeypatch, threads, quota, physical, wrong):
    monkeypatch.setattr(doctor, "cpu_quota", lambda: quota)
    monkeypatch.setattr(doctor.psutil, "cpu_count", lambda logical: physical)
    assert bool(doctor.cores(threads).remedy) == wrong


@pytest.mark.parametrize(("step", "wrong"), [(0.011, False), (0.020, True)])
def test_a_step_is_held_against_reading_the_weights(bundle, step, wrong):
    (bundle / "target.weights").write_bytes(b"0" * 10_000)
    assert bool(doctor.memory(bundle, config_of(), step, read=1e6).remedy) == wrong


def test_the_table_that_a_step_reads_a_row_of_does_not_count(tmp_path):
    """In the blocks of its source, or in a precision."""
    folder = write_folder(tmp_path / "model")
    blocks = Target.from_folder(folder, in_blocks=True, float_ends=False)
    source = tiny_bundle(tmp_path / "source", blocks, precision="source", drafts=False)
    half_panel = 32 + 8 * (32 + 384)  # 16 rows of 256 features in Q6_K: floats, then of each group steps and codes
    assert doctor.embedding_bytes(source.path / "target.onnx") == 7 * half_panel
    int4 = tiny_bundle(tmp_path / "int4", Target.from_folder(folder), precision="int4", drafts=False)
    assert doctor.embedding_bytes(int4.path / "target.onnx") == 7 * 16 * 8 * (4 + 16)


class Answers:
    """An LLM whose answers accept `chat` tokens per step under the template, and `raw` without it."""

    methods = ("a", "auto_regressive")

    def __init__(self, chat: float, raw: float, drafter: str | None):
        self._lengths = {True: chat, False: raw}
        self.runtime = SimpleNamespace(
            codec=SimpleNamespace(encode=str.split),
            limits=SimpleNamespace(max_len=512, max_tree=16),
            methods={"a": SimpleNamespace(drafter=drafter)},
            fix_budget=lambda nodes: None,
        )

    def generate(
        self, prompt: str, max_tokens: int, temperature: float, method: str, add_special_tokens: bool
    ) -> SimpleNamespace:
        assert method == "a"
        assert add_special_tokens is not prompt.endswith("!"), "the template writes them"
        length = self._lengths[prompt.endswith("!")]
        return SimpleNamespace(stats=SimpleNamespace(steps=100, accepted=100 * (length - 1)))


@pytest.mark.parametrize(
    ("chat", "raw", "drafter", "subjects"),
    [
        (2.0, 2.0, "recurrent", []),
        (2.0, 1.2, "recurrent", ["chat template"]),
        (1.05, 1.0, "recurrent", []),
        (1.05, 1.0, None, ["acceptance"]),
        (1.5, 1.0, None, []),
    ],
)
def test_acceptance_without_the_template_and_of_ngrams(bundle, chat, raw, drafter, subjects):
    found = list(doctor.acceptance(Answers(chat, raw, drafter), bundle, ["one", "two"]))
    said = [one.subject for one in found if one.remedy or one.subject != "acceptance"]
    assert said == subjects
