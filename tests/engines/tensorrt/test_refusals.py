"""What both TensorRT backends refuse or warn of when they load a bundle, over a stand-in library."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from redraft.engines import load_engine
from redraft.engines.cuda import device as gpu
from redraft.engines.tensorrt import drafter as tensorrt_drafter
from redraft.engines.tensorrt import target as tensorrt_target
from redraft.engines.tensorrt.engine import TensorRTEngine
from redraft.engines.tensorrt.library import RTX_LIBRARY
from redraft.errors import BundleError
from redraft.plugins.operators.all_reduce import nccl
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tensorrt.bundles import bundle_of
from tests.engines.tiny import METHOD, chain, grouped_target, make_batch, tiny_drafter_of, tiny_lm, tiny_target

OTHER_GPUS = ("8.0", "9.0")
"""That TensorRT for RTX does not support."""


def test_nccl_that_tensorrt_does_not_take(monkeypatch, tmp_path):
    options = {"target": grouped_target(), "drafts": False, "tensor_parallel": 2}
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, **options)
    monkeypatch.setattr(nccl, "communicator", object)
    monkeypatch.setattr(stand_in_tensorrt.Context, "set_communicator", lambda *_: False, raising=False)
    engine = TensorRTEngine(bundle, rank=1)
    with pytest.raises(BundleError, match=r"NCCL.*LD_LIBRARY_PATH"):
        engine.self_test()
    (bundle.path / "rank1" / "target.engine").write_bytes(b"plan")
    with pytest.raises(BundleError, match=r"rebuild.*NCCL.*--tp 1"):
        TensorRTEngine(bundle, rank=1)


def test_a_precision_that_the_gpu_has_no_tensor_cores_for(monkeypatch, tmp_path):
    """Engines of TensorRT for RTX are built without a GPU, and here tried on one that it does not support."""
    monkeypatch.setenv("REDRAFT_ANY_GPU", "1")
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, target=tiny_lm(), precision="bf16", drafts=False)
    stand_in_tensorrt.install(monkeypatch, "tensorrt_rtx", capability="7.5")
    with pytest.raises(BundleError, match=r"7.5: bf16 .* 8.0 .*--precision int8"):
        load_engine(bundle)


@pytest.mark.parametrize(
    ("backend", "capability", "message"),
    [
        ("tensorrt", "7.5", r"the GPU has compute capability 7\.5: engines of TensorRT need 8\.0 or later; take a"),
        *(("tensorrt_rtx", other, rf"{other}: TensorRT for RTX supports 8\.6, .* build .*") for other in OTHER_GPUS),
        *(("tensorrt_rtx", listed, None) for listed in ("8.6", "12.1")),
    ],
)
def test_a_gpu_that_no_engine_runs_on(backend, capability, message, monkeypatch, tmp_path):
    """Where a build would not help. The library of a GPU that it does not support can be tried all the same."""
    monkeypatch.delenv("REDRAFT_ANY_GPU", raising=False)
    bundle = bundle_of(backend, monkeypatch, tmp_path, drafts=False)
    stand_in_tensorrt.install(monkeypatch, backend, capability=capability)
    with pytest.raises(BundleError, match=message) if message else nullcontext():
        load_engine(bundle)
    if backend == "tensorrt_rtx":
        monkeypatch.setenv("REDRAFT_ANY_GPU", "1")
        load_engine(bundle)


def test_the_gpus_of_tensorrt_for_rtx_are_the_librarys():
    """Its enum has two more: 7.5, which needs engines of its own, and 8.0, which its support matrix does not list."""
    library = pytest.importorskip("tensorrt_rtx")
    known = {kind.value for kind in library.ComputeCapability.__members__.values()}
    listed = {10 * major + minor for major, minor in RTX_LIBRARY.gpus}
    others = {library.ComputeCapability.NONE.value, library.ComputeCapability.CURRENT.value, 75, 80}
    assert known == listed | others


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt_rtx"])
def test_an_engine_that_does_not_update_in_place_is_refused(backend, monkeypatch, tmp_path):
    bundle = bundle_of(backend, monkeypatch, tmp_path, drafts=False)
    named = tensorrt_target.named_caches

    def elsewhere(caches):
        return {name: cache.clone() if name == "v_cache.1" else cache for name, cache in named(caches).items()}

    monkeypatch.setattr(tensorrt_target, "named_caches", elsewhere)
    with pytest.raises(BundleError, match=r"the engine does not update v_cache\.1 in place; rebuild it with: "):
        load_engine(bundle)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt_rtx"])
def test_an_engine_that_changes_other_rows_is_refused(backend, monkeypatch, tmp_path):
    """As one would that gives a plugin memory of its own and copies it to the output."""
    bundle, execute = (
        bundle_of(backend, monkeypatch, tmp_path, drafts=False),
        stand_in_tensorrt.Context.execute_async_v3,
    )

    def spoil(context, stream):
        done = execute(context, stream)
        context._memory("v_cache.0.updated")[-1, 0, 40] = 7
        return done

    monkeypatch.setattr(stand_in_tensorrt.Context, "execute_async_v3", spoil)
    with pytest.raises(BundleError, match=r"changes rows of v_cache\.0"):
        load_engine(bundle)


COPY = {"Name": "Reformatting CopyNode for Network Input k_cache.1", "LayerType": "Reformat", "Inputs": ["k_cache.1"]}


@pytest.mark.parametrize(
    ("layers", "scratch", "said"),
    [
        ([{"Name": "TreeAttentionWrite", "LayerType": "PluginV3", "Inputs": ["k_cache.1"]}], 1000, None),
        ([COPY], 1000, "its layer Reformatting CopyNode for Network Input k_cache.1 copies one; build it with --alias"),
        ([], 64 << 20, "its smallest steps take 67 MB of scratch memory, and a cache has 0; build it with --alias"),
    ],
)
def test_a_copy_of_a_cache_in_every_step_is_said(layers, scratch, said, monkeypatch, tmp_path, capfd):
    """Results are right all the same, so the bundle is loaded."""
    bundle = bundle_of("tensorrt", monkeypatch, tmp_path, drafts=False)
    inspector = SimpleNamespace(get_engine_information=lambda _: json.dumps({"Layers": layers}))
    monkeypatch.setattr(stand_in_tensorrt.Engine, "create_engine_inspector", lambda _: inspector)
    monkeypatch.setattr(stand_in_tensorrt.Engine, "get_device_memory_size_for_profile_v2", lambda _, i: scratch + i)
    load_engine(bundle)
    lines = [line for line in capfd.readouterr().err.splitlines() if "copies caches in every step" in line]
    assert len(lines) == bool(said)
    assert (said or "") in "".join(lines)


def test_a_drafters_engine_that_does_not_update_in_place_is_refused(monkeypatch, tmp_path):
    drafter = tiny_drafter_of(tiny_target(), "eagle")
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, trained=drafter)
    named = tensorrt_drafter.named_caches
    monkeypatch.setattr(tensorrt_drafter, "named_caches", lambda caches: named(caches.clone()))
    with pytest.raises(BundleError, match=r"tiny does not update k_cache\.0 in place"):
        load_engine(bundle)


@pytest.mark.parametrize(
    ("backend", "name", "other", "message"),
    [
        (
            "tensorrt",
            "tensorrt",
            "10.16.1",
            r"built by TensorRT 10\.16\.1, this is 11\.4\.0\.106; on this machine rebuild",
        ),
        ("tensorrt", "compute_capability", "8.0", r"for a GPU of compute capability 8\.0, this one has 9\.0; on this"),
        ("tensorrt_rtx", "tensorrt_rtx", "1.6.0", r"built by TensorRT for RTX 1\.6\.0, this is 1\.7\.1\.116; on this"),
    ],
)
def test_engines_of_another_gpu_or_version_are_refused(monkeypatch, tmp_path, backend, name, other, message):
    """For RTX kernels are chosen at load, so its engines are of no GPU."""
    bundle = bundle_of(backend, monkeypatch, tmp_path, drafts=False)
    assert bundle.manifest.versions.get("compute_capability") == (None if backend == "tensorrt_rtx" else "9.0")
    manifest = bundle.manifest.model_copy(update={"versions": bundle.manifest.versions | {name: other}})
    with pytest.raises(BundleError, match=message):
        load_engine(dataclasses.replace(bundle, manifest=manifest))


def test_an_engine_for_other_extents_is_refused(monkeypatch, tmp_path):
    """As many profiles as expected, one for fewer slots."""
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path)
    engine = bundle.path / f"drafter.{METHOD}.engine"
    head, _, network = engine.read_bytes().partition(b"\n")
    built = json.loads(head)
    assert built["profiles"][0]["tokens"] == [[1], [5], [5]]
    built["profiles"][0]["tokens"] = [[1], [4], [4]]
    engine.write_bytes(json.dumps(built).encode() + b"\n" + network)
    message = (
        r"drafter\.tiny\.engine takes tokens from \(1,\) to \(4,\) in profile 0, expected \(1,\) to \(5,\): rebuild"
    )
    with pytest.raises(BundleError, match=message):
        load_engine(bundle)


def test_a_step_that_the_library_refuses_says_why(monkeypatch, tmp_path):
    """With what would fit where it is memory that it lacks."""
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path, drafts=False))
    reasons = iter(["kernel 3 failed", "Requested size was 5 bytes: OutOfMemory"])

    def refuse(context, stream):
        context.engine.logger.log(stand_in_tensorrt.ILogger.ERROR, next(reasons))
        return False

    monkeypatch.setattr(stand_in_tensorrt.Context, "execute_async_v3", refuse)
    batch = make_batch([chain(0, [], [1])], words=1)
    with pytest.raises(RuntimeError, match="TensorRT could not enqueue a step: kernel 3 failed"):
        engine.execute(batch)
    with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed .* would fit"):
        engine.execute(batch)


@pytest.mark.parametrize(
    ("driver", "devices", "torch_cuda", "message"),
    [
        (None, False, None, "driver is not loaded: .* install release 580 or later .*; .* --backend tensorrt_rtx"),
        ("580.95.05", False, None, "no GPU is visible: start the container with --gpus all; .* openvino's run on the"),
        ("575.57.08", True, None, r"the driver is 575\.57\.08: CUDA 13 needs release 580 or later"),
        ("580.95.05", True, None, "torch was built for the CPU, .*uninstall -y torch .*pip install 'redraft.train"),
        ("580.95.05", True, "13.0", "none of this machine's GPUs, and CUDA_VISIBLE_DEVICES is 7: .* name one"),
    ],
)
def test_without_a_gpu_the_reason_is_named(driver, devices, torch_cuda, message, monkeypatch, tmp_path):
    bundle = bundle_of("tensorrt_rtx", monkeypatch, tmp_path, drafts=False)
    monkeypatch.undo()
    stand_in_tensorrt.install_library(monkeypatch, "tensorrt_rtx")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(gpu, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(gpu, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    if driver:
        line = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build"
        (tmp_path / "version").write_text(f"{line}\nGCC version: gcc version 13.3.0\n")
    if devices:
        (tmp_path / "nvidia0").touch()
    with pytest.raises(BundleError, match=f"no CUDA device: .*{message}"):
        load_engine(bundle)
