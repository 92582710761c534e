"""Joins consecutive operators of plugins/ into `Program` nodes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

ALIGNMENT = 64
CONSTANT_TYPES = {"uint8": "u8", "int32": "i32", "float32": "f32"}
OPERATORS = ("TreeAttention", "Linear", "LinearTopK", "Embedding", "RMSNorm")


def fuse(model: ir.Model) -> ir.Model:
    """A copy of a lowered network in which every run of two or more of our operators is one Program."""
    fused = model.clone()
    run: list[ir.Node] = []
    for node in [*fused.graph, None]:
        if node is not None and node.domain in ("redraft", "redraft.cpu") and node.op_type in OPERATORS:
            run.append(node)
            continue
        if len(run) > 1:
            _join(fused.graph, run)
        run = []
    return fused


def _join(graph: ir.Graph, run: list[ir.Node]) -> None:
    made = {output for node in run for output in node.outputs}
    sources = list(dict.fromkeys(value for node in run for value in _arguments(node) if value not in made))
    constants = [value for value in sources if ir.convenience.get_const_tensor(value) is not None]
    inputs = [value for value in sources if value not in constants]
    results = [output for node in run for output in node.outputs if _used_outside(output, run)]
    lines, stored = _store(constants)
    inputs.append(ir.val(f"{run[0].outputs[0].name}.constants", const_value=ir.tensor(stored)))
    graph.register_initializer(inputs[-1])
    number = {value: i for i, value in enumerate([*inputs, *constants])}
    for node in run:
        arguments = " ".join(str(number[value]) for value in _arguments(node))
        number |= {output: len(number) + i for i, output in enumerate(node.outputs)}
        outputs = " ".join(str(results.index(output) if output in results else -1) for output in node.outputs)
        attributes = [f"{name}={attribute.value}" for name, attribute in node.attributes.items()]
        lines.append("\t".join([node.op_type, arguments, outputs, *attributes]))
    program = ir.node(
        "Program", inputs, {"steps": "\n".join(lines)}, domain="redraft.cpu", num_outputs=len(results), name=run[0].name
    )
    graph.insert_after(run[-1], program)
    for old, new in zip(results, program.outputs, strict=True):
        new.name, new.shape, new.type = old.name, old.shape, old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = None
    for node in reversed(run):
        graph.remove(node, safe=True)
    for value in constants:
        if value.is_initializer() and not value.uses() and not value.is_graph_output():
            del graph.initializers[str(value.name)]


def _store(constants: list[ir.Value]) -> tuple[list[str], np.ndarray]:
    """The program's lines that declare constants, and their bytes one behind the other."""
    arrays = [tensor.numpy() for value in constants if (tensor := ir.convenience.get_const_tensor(value))]
    offsets = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)])
    stored = np.zeros(int(offsets[-1]), np.uint8)
    lines = []
    for array, offset in zip(arrays, offsets.tolist(), strict=False):
        stored[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        lines.append(f"constant\t{CONSTANT_TYPES[array.dtype.name]}\t{offset}\t{' '.join(map(str, array.shape))}")
    return lines, stored


def _arguments(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _used_outside(value: ir.Value, run: list[ir.Node]) -> bool:
    return value.is_graph_output() or any(use.node not in run for use in value.uses())
