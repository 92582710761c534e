"""What a network becomes for the CPU engine."""

from collections import Counter

import onnx_ir as ir
import torch

from model_defs.export import export_drafter
from model_defs.recurrent import RecurrentDrafting
from plugins.cpu.lowering import lower
from plugins.program.fuse import fuse
from tests.engines.tiny import tiny_drafter, tiny_target


def lowered_drafter(levels: int) -> ir.Model:
    drafter = tiny_drafter(tiny_target())
    with torch.no_grad():
        return lower(export_drafter(RecurrentDrafting(drafter, 3, levels, 4), drafter.config.hidden_size), "int8")


def test_a_drafter_level_is_one_program():
    fused = fuse(lowered_drafter(levels=3))
    programs = [node for node in fused.graph if node.op_type == "Program"]
    assert len(programs) == 4, "the root's embedding and context, then a level each"
    assert len({node.inputs[-1] for node in programs}) == 1, "all share one constant"
    assert not {"MatMul", "Gemm", "Sigmoid", "Linear", "LinearTopK"} & {node.op_type for node in fused.graph}


def test_silu_is_part_of_the_projection():
    linears = [node for node in lowered_drafter(levels=3).graph if node.op_type == "Linear"]
    activations = Counter((node.attributes["activation"].value, node.attributes["inputs"].value) for node in linears)
    drafter = tiny_drafter(tiny_target())
    assert activations["silu_last", "scale,bias,residual,rows"] == 2, "a state for each level behind the first"
    assert activations["silu", "scale,bias,residual"] == 3 * len(drafter.blocks)
