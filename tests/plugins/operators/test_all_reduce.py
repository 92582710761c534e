"""Sums over ranks: in their order, the same on each, whatever else is summed."""

import contextlib
import ctypes
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from benchmarks.speed import kernel_calls
from redraft.compiler.passes.fusing import fuse
from redraft.compiler.passes.lowering import lower
from redraft.compiler.passes.tensorrt_all_reduce import COLLECTIVE, DOMAIN, tensorrt_form
from redraft.model_defs.export.target import CacheShape, export_target_plugin
from redraft.model_defs.target.shards import plan_shards, shard_target
from redraft.plugins import kernels
from redraft.plugins.operators.all_reduce import nccl
from redraft.plugins.operators.all_reduce.reference import all_reduce
from redraft.plugins.operators.all_reduce.torch_op import all_reduce as torch_all_reduce
from tests.engines.ranks.mpi import run_ranks
from tests.engines.tiny import tiny_lm
from tests.plugins.test_openvino import compile_nodes

RANKS_SCRIPT = Path(__file__).parents[1] / "all_reduce_ranks.py"
NCCL_SCRIPT = Path(__file__).parents[1] / "nccl_ranks.py"


def summed(parts: np.ndarray) -> np.ndarray:
    """By the reference."""
    return all_reduce(torch.from_numpy(parts)).numpy()


@pytest.mark.parametrize("shape", [(1, 1), (3, 111), (7, 4097)])
def test_the_kernel_sums_in_the_order_of_ranks(isa, rng, shape):
    parts = (rng.standard_normal((3, *shape)) * rng.choice([1e-4, 1, 1e4], (3, *shape))).astype(np.float32)
    np.testing.assert_array_equal(kernel_calls.sum_ranks(parts), summed(parts))
    if np.prod(shape) > 1:
        assert (summed(parts[::-1].copy()) != summed(parts)).any(), "another order would be seen"


def test_every_rank_gets_the_sum():
    done = run_ranks(3, RANKS_SCRIPT)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"rank {rank} of 3 is right") for rank in range(3)] == [1] * 3


@pytest.mark.slow
def test_the_cuda_operators_ranks_get_the_sum():
    """It would catch a CUDA operator that leaves out a rank, or sums in another order."""
    done = run_ranks(3, NCCL_SCRIPT)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"rank {rank} of 3 is right") for rank in range(3)] == [1] * 3


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (torch.float32, lambda parts: parts[2] + parts[1] + parts[0]),
        (torch.bfloat16, lambda parts: parts[0] + parts[1] + parts[2]),
    ],
    ids=["another order", "rounded twice"],
)
def test_the_sum_is_in_float32_in_the_order_of_ranks(rng, dtype, wrong):
    parts = torch.from_numpy(rng.standard_normal((3, 7, 111)) * rng.choice([1e-4, 1, 1e4], (3, 7, 111))).to(dtype)
    first, second, third = parts.float().numpy()
    expected = torch.from_numpy((first + second) + third).to(dtype)
    assert torch.equal(all_reduce(parts), expected)
    assert not torch.equal(wrong(parts), expected), "it would be seen"


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (ir.DataType.FLOAT, lambda parts: parts[2] + parts[1] + parts[0]),
        (ir.DataType.BFLOAT16, lambda parts: parts[0] + parts[1] + parts[2]),
        (ir.DataType.FLOAT16, lambda parts: parts[0] + parts[1] + parts[2]),
    ],
    ids=["another order", "bf16, rounded twice", "fp16, rounded twice"],
)
def test_tensorrt_is_given_the_sum_in_float32_in_the_order_of_ranks(rng, dtype, wrong):
    parts = (rng.standard_normal((3, 7, 111)) * rng.choice([1e-4, 1, 1e4], (3, 7, 111))).astype(dtype.numpy())
    expected = summed(parts.astype(np.float32)).astype(dtype.numpy())
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(["T", 111]))
    out = ir.Value(name="out", type=x.type, shape=x.shape)
    node = ir.node("AllReduce", [x], {"ranks": 3}, domain="redraft", outputs=[out], name="sum")
    graph = ir.Graph([x], [out], nodes=[node], opset_imports={"": 24, "redraft": 1}, name="graph")
    network = tensorrt_form(ir.Model(graph, ir_version=10))
    assert [value.name for value in network.graph.outputs] == ["out"]

    class Gather(OpRun):
        op_domain = DOMAIN

        def _run(self, x, nb_rank=None, **_):
            assert nb_rank == len(parts)
            np.testing.assert_array_equal(x, parts[1])
            return (np.concatenate(parts),)

    Gather.__name__ = COLLECTIVE
    (found,) = ReferenceEvaluator(ir.serde.serialize_model(network), new_ops=[Gather]).run(None, {"x": parts[1]})
    np.testing.assert_array_equal(found, expected)
    assert (wrong(parts) != expected).any(), "it would be seen"


def test_tensorrt_is_given_nccls_communicator(monkeypatch):
    backend = SimpleNamespace(_comm_ptr=lambda: 0xC0FFEE)
    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda device: {"cuda": backend}[device.type]))
    monkeypatch.setattr("torch.distributed.group", group)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    assert pointer(nccl.communicator(), b"ncclComm_t") == 0xC0FFEE
    backend._comm_ptr = lambda: 0
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    with pytest.raises(RuntimeError, match="NCCL is not connected on GPU 3, which this rank executes on"):
        nccl.communicator()


class Alone:
    """A communicator of ranks on one machine, of which the others fare as this one does."""

    def __init__(self, size: int):
        self.rank, self.size = 0, size

    def Split_type(self, _):
        return self

    def Free(self) -> None:
        pass

    def allgather(self, value):
        return [value] * self.size

    def bcast(self, value):
        return value


@pytest.mark.parametrize(
    ("has_nccl", "gpus", "message"),
    [
        (
            False,
            2,
            r"NCCL, by .*, is not in torch .*: install PyPI's, .* 'redraft\[train\]', or build .* 1",
        ),
        (
            True,
            1,
            r"2 ranks on .*, which shows 1 GPUs, .*: build .* for fewer ranks \(--tp 1 .*--hostfile",
        ),
        (
            True,
            2,
            r"NCCL does not connect the 2 ranks \(ncclSystemError\): NCCL_DEBUG=INFO says why, .*--tp 1 needs",
        ),
    ],
)
def test_ranks_that_nccl_cannot_connect_are_told_what_to_do(has_nccl, gpus, message, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("ncclSystemError")

    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr("torch.distributed.TCPStore", fail)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with pytest.raises(RuntimeError, match=message):
        nccl.connect(Alone(2))


def test_alone_it_is_the_identity(rng):
    x = rng.standard_normal((3, 111)).astype(np.float32)
    np.testing.assert_array_equal(kernels.all_reduce(x), x)
    torch.testing.assert_close(torch_all_reduce(torch.from_numpy(x), 1), torch.from_numpy(x), rtol=0, atol=0)


def test_ranks_that_are_missing(core, rng):
    node = helper.make_node("AllReduce", ["x"], ["out"], domain="redraft", ranks=2)
    specs = {"x": (TensorProto.FLOAT, [None, 5])}
    request = compile_nodes(core, [node], specs, {"out": specs["x"]}, {}).create_infer_request()
    kernels.take_failure()
    with contextlib.suppress(RuntimeError):
        request.infer([np.ones((1, 5), np.float32)])
    assert "the network is for 2 ranks: 1 are connected" in (kernels.take_failure() or "")
    with pytest.raises(RuntimeError, match="the network is for 2 ranks: 1 are connected"):
        torch_all_reduce(torch.ones(1), 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_target_of_a_rank_is_one_program(rank):
    target = tiny_lm()
    shard = plan_shards(target.config, 2)[rank]
    network = export_target_plugin(shard_target(target, shard), CacheShape(3, 40, 8), rank=rank, ranks=2)
    lowered = lower(network, "fp32")
    layers = target.config.num_layers
    counts = Counter(node.op_type for node in lowered.graph)
    assert counts["AllReduce"] == 2 * layers
    assert "Add" not in counts
    residuals = [
        node for node in lowered.graph if node.op_type == "Linear" and "residual" in node.attributes["inputs"].value
    ]
    assert len(residuals) == (0 if rank else 2 * layers), "rank 0 alone adds the residual stream"
    assert [node.op_type for node in fuse(lowered).graph if isinstance(node, ir.Node)].count("Program") == 1
