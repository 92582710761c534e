"""What TensorRT is asked to build, over a stand-in library, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch

from redraft.bundle.config import LimitsInfo
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import ContextInfo
from redraft.compiler.bundle import check_caches, info_bytes
from redraft.compiler.passes.tensorrt_attention import tensorrt_form
from redraft.compiler.writers.engine_builder import EngineBuilder
from redraft.compiler.writers.tensorrt import save
from redraft.engines.memory import unaligned_caches, what_fits
from redraft.engines.tensorrt import profiles
from redraft.errors import BundleError
from redraft.model_defs.drafters.token_info import InfoForm
from redraft.model_defs.export.target import CacheShape, export_target_plugin
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tiny import DRAFTING, METHOD, bundle_config, tiny_bundle, tiny_drafter_of, tiny_lm, tiny_target

LIMITS = LimitsInfo(slots=5, max_len=80, max_tree=8, prefill_chunk=16)


def head_of(bundle: Bundle, network: str) -> dict:
    return json.loads((bundle.path / f"{network}.engine").read_bytes().partition(b"\n")[0])


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr("redraft.compiler.writers.engine_builder.CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_full_tensorrt_is_asked_for_typed_networks_with_plugins(monkeypatch, tmp_path, cache):
    stand_in_tensorrt.install(monkeypatch, "tensorrt")
    target = tiny_lm()
    drafter = tiny_drafter_of(target, "medusa")
    bundle = tiny_bundle(tmp_path, target, "tensorrt", "bf16", trained=drafter, limits=LIMITS)
    head = head_of(bundle, "target")
    flags = stand_in_tensorrt.NetworkDefinitionCreationFlag
    assert head["flags"] == 1 << flags.STRONGLY_TYPED | 1 << flags.PREFER_AOT_PYTHON_PLUGINS
    assert (head["preview"], head["builder_flags"]) == ([], [])
    steps = head["profiles"][:-1]
    assert [p["input_ids"] for p in steps] == [[[1], [2], [2]], [[4], [10], [10]], [[16], [40], [40]]]
    assert steps[1]["row_offsets"] == [[2], [6], [6]]
    assert steps[1]["commit_src"] == [[8], [40], [40]]
    assert steps[1]["tree_mask"][0] == [4, 1]
    assert steps[1]["k_cache.0"] == [[5, 2, 88, 64]] * 3
    prefill = head["profiles"][-1]
    assert prefill["input_ids"] == [[1], [16], [56]]
    assert prefill["logit_rows"] == [[1], [1], [56]]
    drafts = head_of(bundle, f"drafter.{METHOD}")["profiles"]
    assert [p["features"] for p in drafts] == [[[1, 56]] * 3, [[2, 56], [5, 56], [5, 56]]]
    assert bundle.manifest.versions["tensorrt"] == stand_in_tensorrt.VERSION


def test_measurements_are_kept_for_the_next_build(monkeypatch, tmp_path, cache):
    stand_in_tensorrt.install(monkeypatch, "tensorrt")
    for n in (1, 2):
        tiny_bundle(tmp_path / str(n), tiny_lm(), "tensorrt", "bf16", drafts=False, limits=LIMITS)
        (timings,) = cache.iterdir()
        assert (timings.name, timings.read_bytes()) == ("tensorrt-11.4.0.106-9.0-the-GPU.timings", b"measured " * n)


def test_measurements_that_tensorrt_refuses_are_replaced(monkeypatch, network, cache):
    stand_in_tensorrt.install(monkeypatch, "tensorrt")
    timings = cache / "tensorrt-11.4.0.106-9.0-the-GPU.timings"
    cache.mkdir()
    timings.write_bytes(b"another GPU's")
    builder().build_target(network)
    assert timings.read_bytes() == b"measured "


@pytest.mark.slow
def test_tensorrt_for_rtx_pads_to_slots_and_prefills_one_sequence(monkeypatch, tmp_path):
    """It would catch a profile that lacks a shape which the engine executes."""
    stand_in_tensorrt.install(monkeypatch, "tensorrt_rtx")
    drafter = tiny_drafter_of(tiny_target(), "eagle")
    bundle = tiny_bundle(tmp_path, tiny_target(), "tensorrt_rtx", trained=drafter, limits=LIMITS)
    head = head_of(bundle, "target")
    assert head["flags"] == 1 << stand_in_tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert head["preview"] == []
    assert head["builder_flags"] == ["require user allocation"]
    steps, prefill = head["profiles"]
    assert steps["mask"] == [[1, 1, 1, 88], [5, 1, 8, 88], [5, 1, 8, 88]]
    assert steps["logit_rows"] == [[1], [40], [40]]
    assert steps["k_cache.1"] == [[1, 1, 88, 32], [5, 1, 88, 32], [5, 1, 88, 32]]
    assert prefill["input_ids"] == [[1, 1], [1, 16], [1, 16]]
    pairs = head_of(bundle, f"drafter.{METHOD}")["profiles"]
    assert [p["features"][2][:2] for p in pairs] == [[5, 8], [1, 16]]
    assert pairs[-1]["k_cache.0"] == [[1, 1, 88, 32]] * 3
    assert "compute_capability" not in bundle.manifest.versions


def test_full_tensorrts_native_form_takes_any_head_and_no_compiler(monkeypatch, tmp_path, cache):
    """No plugin, so no nvcc; kernels are still chosen for each step's own shapes, on this GPU."""
    stand_in_tensorrt.install(monkeypatch, "tensorrt")
    monkeypatch.setattr("redraft.compiler.writers.engine_builder.ptx", None)
    options = {"precision": "bf16", "drafts": False, "limits": LIMITS, "form": "native"}
    bundle = tiny_bundle(tmp_path, tiny_target(), "tensorrt", **options)
    assert bundle.config.form == "native"
    head = head_of(bundle, "target")
    assert head["flags"] == 1 << stand_in_tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert (head["preview"], head["builder_flags"]) == ([], [])
    assert [p["input_ids"] for p in head["profiles"]] == [
        *([[1, 1], [1, 2], [2, 2]], [[1, 1], [5, 2], [5, 8]], [[2, 4], [5, 8], [5, 8]], [[1, 1], [1, 16], [1, 16]]),
    ]
    assert bundle.manifest.versions["compute_capability"] == "9.0"
    assert list(cache.glob("*.timings"))


@pytest.mark.parametrize("reads_context", [None, False, True])
@pytest.mark.parametrize(("slots", "max_tree"), [(1, 1), (16, 32), (5, 7)])
def test_few_profiles_hold_all_steps(reads_context, slots, max_tree):
    """So that a large target's build does not choose kernels 20 times over."""
    limits = LimitsInfo(slots=slots, max_len=2048, max_tree=max_tree, prefill_chunk=128)
    kinds = [profiles.plugin_target(limits), profiles.native_target(limits, by_rows=True)]
    for buckets in kinds if reads_context is None else [profiles.drafter(limits, reads_context, by_rows=True)]:
        assert len(buckets.profiles) <= profiles.RANGES + bool(buckets.prefill)
        for number, step in enumerate(buckets.steps):
            low, usual, high = buckets.profiles[buckets.profile_of(number)]
            for field in ("sequences", "rows", "logits"):
                assert getattr(low, field) <= getattr(step, field) <= getattr(high, field)
            assert usual in buckets.steps
            assert step.all_rows <= usual.all_rows
        shared = buckets.profiles[:-1] if buckets.prefill else buckets.profiles
        chosen = [usual.all_rows for _, usual, _ in shared]
        assert chosen == sorted(chosen)


def test_every_profile_of_limits_of_one_is_whole():
    limits = LimitsInfo(slots=1, max_len=2, max_tree=1, prefill_chunk=1)
    ranges = list(
        profiles.profile_ranges(
            {"input_ids": (-1,)}, profiles.plugin_target(limits), profiles.plugin_target_shapes(limits)
        )
    )
    assert ranges == [{"input_ids": ((1,), (1,), (1,))}, {"input_ids": ((1,), (1,), (2,))}]


@pytest.mark.parametrize(
    ("draft_rows", "remedy"), [(8, "--max-len 80 is the nearest smaller that works"), (9, "choose another --max-tree")]
)
def test_a_cache_whose_slots_are_not_aligned_is_refused(draft_rows, remedy):
    heads = {"num_kv_heads": 3, "head_size": 64}
    context = ContextInfo(layers=1, draft_rows=draft_rows, **heads)
    limits, methods = (
        LIMITS.model_copy(update={"max_len": 81}),
        {METHOD: DRAFTING.model_copy(update={"context": context})},
    )
    config = bundle_config(tiny_lm(), methods, limits, "fp16", "tensorrt_rtx")
    config = config.model_copy(update={"target": config.target.model_copy(update=heads)})
    with pytest.raises(BundleError, match=rf"--max-len 81: .* 34176 bytes, .* a multiple of 256; {remedy}"):
        check_caches(config)
    check_caches(config.model_copy(update={"precision": "fp32"}))


def test_token_info_is_in_the_engines_dtype():
    info = tiny_drafter_of(tiny_target(), "hidden_state").token_info.stored(InfoForm.bf16)
    config = bundle_config(tiny_target(), {}, LIMITS, "fp32", "tensorrt_rtx")
    assert info_bytes(info, config) == 4 * (38 * 37 + 38 + 111)
    assert info_bytes(info, config.model_copy(update={"precision": "fp16"})) == 2 * (38 * 37 + 38) + 4 * 111


def builder(backend: str = "tensorrt", **limits) -> EngineBuilder:
    return EngineBuilder(bundle_config(tiny_lm(), {}, LIMITS.model_copy(update=limits), "bf16", backend))


@pytest.fixture
def network(tmp_path):
    target = tiny_lm().bfloat16()
    form = export_target_plugin(target, CacheShape(5, 80, 8), cache_dtype=torch.bfloat16, aliased_outputs=True)
    save(tensorrt_form(form), tmp_path / "target.onnx")
    return tmp_path / "target.onnx"


def test_heads_that_the_plugins_do_not_take_are_refused_before_anything_is_looked_for():
    config = bundle_config(tiny_target(), {}, LIMITS, "bf16", "tensorrt")
    with pytest.raises(BundleError, match=r"heads of size 32, .* take 64, 96, 128, 256; --form native takes any"):
        EngineBuilder(config)


def test_a_gpu_that_the_kernels_are_not_for_is_refused(monkeypatch, cache):
    stand_in_tensorrt.install(monkeypatch, "tensorrt", capability="7.5")
    with pytest.raises(BundleError, match=r"7\.5: .* 8\.0"):
        builder()
    stand_in_tensorrt.install(monkeypatch, "tensorrt", capability="10.0")
    assert builder().versions["compute_capability"] == "10.0"


def test_too_little_memory_says_what_would_fit(monkeypatch, network, cache):
    trt = stand_in_tensorrt.install(monkeypatch, "tensorrt")
    trt.fails_with = "[defaultAllocator.cpp::allocate] Requested size was 5 bytes: OutOfMemory (no further information)"
    with pytest.raises(BundleError, match=r"ran out of memory building .*target.onnx: about 0.00 GB are needed"):
        builder().build_target(network)
    trt.fails_with = "tactic not found"
    with pytest.raises(BundleError, match=r"TensorRT cannot build .*target.onnx: tactic not found"):
        builder().build_target(network)
    assert not list(network.parent.glob("*.engine"))


@pytest.mark.parametrize(
    ("weights", "free", "message"),
    [
        (10, 30e6, r"about 0.32 GB .*caches 0.32.*, 0.03 GB are free; --slots 1 or --max-len \d+ would fit"),
        (40e6, 30e6, "no limits would fit beside the weights: take a GPU with more memory"),
        (10, 1e9, r"another process may hold the rest \(nvidia-smi\)"),
    ],
)
def test_what_would_fit_does(weights, free, message):
    limits = LimitsInfo(slots=16, max_len=13000, max_tree=8, prefill_chunk=16)
    config = bundle_config(tiny_lm(), {}, limits, "bf16", "tensorrt")
    step = next(more for more in range(1, 99) if not unaligned_caches(config, limits.max_len + more))
    said = what_fits(config, int(weights), int(free))
    assert re.search(message, said), said
    for flag, count in re.findall(r"--(slots|max-len) (\d+) ?(?:or|would)", said):
        field = flag.replace("-", "_")
        again = config.model_copy(update={"limits": limits.model_copy(update={field: int(count)})})
        assert "another process" in what_fits(again, int(weights), int(free))
        assert not unaligned_caches(again, again.limits.max_len)
        more = config.model_copy(update={"limits": limits.model_copy(update={field: int(count) + step})})
        assert "another process" not in what_fits(more, int(weights), int(free))
