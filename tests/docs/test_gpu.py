"""docs/gpu.md names what there is."""

import re
from pathlib import Path

import pytest

from benchmarks.gpu.kit import TRAVELS
from benchmarks.gpu.llama_7b import LLAMA_3_1_8B
from redraft.bundle.backends import TORCH, Precision
from redraft.bundle.config import BundleConfig, ContextInfo, LimitsInfo, MethodConfig, TargetInfo
from redraft.engines.memory import cache_bytes, step_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text()


def test_every_script_is_on_the_page():
    scripts = {file.stem for file in (ROOT / "benchmarks/gpu").glob("*.py") if "def main(" in file.read_text()}
    listed = set(re.findall(r"^\| `(\w+)` \| \D", PAGE, re.MULTILINE))
    assert listed == scripts - {"kit"}
    assert set(re.findall(r"benchmarks\.gpu\.(\w+)", PAGE)) - {"NAME"} <= scripts


def test_the_rows_are_those_of_the_first_half_hour():
    call = (ROOT / "benchmarks/gpu/calls/first_hour.sh").read_text()
    limits = re.findall(r"^(?: *|\S+=1 )(?:python_)?row (\w+) (\d+) ", call, re.MULTILINE)
    seconds = {name: int(limit) for name, limit in limits}
    builds = sum(map(int, re.findall(r'row "build_\S+" (\d+)', call)))
    rows = re.findall(r"^\| (`[\w`, ]+`) \| (\d+) \| ", PAGE, re.MULTILINE)
    shown = {tuple(re.findall(r"\w+", names)): int(limit) for names, limit in rows}
    assert {name for names in shown for name in names} == seconds.keys()
    for names, limit in shown.items():
        assert limit == sum(seconds[name] for name in names) + 2 * builds * ("batches" in names)


def test_every_call_is_on_the_page_with_the_seconds_of_its_rows():
    rows = dict(re.findall(r"^\| `bash benchmarks/gpu/calls/(\w)\.sh` \| (\d+) \|", PAGE, re.MULTILINE))
    assert rows.keys() == TRAVELS.keys()
    assert sum(map(int, rows.values())) <= 15 * 60 - 90 - 4 * 15, "a start and four transfers"


def eagle3_on_an_8b(slots: int, max_len: int) -> BundleConfig:
    context = ContextInfo(layers=1, num_kv_heads=8, head_size=128, draft_rows=20)
    shape = TargetInfo.model_fields.keys() & vars(LLAMA_3_1_8B)
    return BundleConfig(
        name="8b",
        backend=TORCH,
        precision=Precision.bf16,
        target=TargetInfo(feature_size=4096, **{name: getattr(LLAMA_3_1_8B, name) for name in shape}),
        limits=LimitsInfo(slots=slots, max_len=max_len, max_tree=16, prefill_chunk=512),
        methods={
            "eagle3": MethodConfig(
                drafter="eagle3",
                construction="best_first",
                beam_width=4,
                beam_length=5,
                candidates=8,
                tree_budget=15,
                ngram=True,
                verification="sampled_walk",
                context=context,
            )
        },
        tensor_parallel=1,
    )


def test_the_memory_of_an_8b_is_what_loading_counts():
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert [int(slots) for slots, *_ in rows] == [1, 8, 16, 32, 64]
    for slots, *cells in rows:
        for max_len, cell in zip((2048, 8192, 32768, 131072), cells, strict=True):
            config = eagle3_on_an_8b(int(slots), max_len)
            assert float(cell) == pytest.approx((cache_bytes(config) + step_bytes(config)) / 1e9, abs=0.06)
