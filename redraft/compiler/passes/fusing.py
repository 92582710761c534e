"""Joins consecutive operators of plugins/ into `Program` nodes."""

from __future__ import annotations

import hashlib
from io import BytesIO
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from redraft.compiler.passes.graph import inputs_of
from redraft.plugins.headers import operators
from redraft.plugins.operators.program import ALIGNMENT, CONSTANTS

CONSTANT_TYPES = {"uint8": "u8", "int8": "i8", "int32": "i32", "float32": "f32", "bfloat16": "bf16"}


class Constants:
    """Arrays one after the other in a file, each once: those of all programs of a network, or of several networks."""

    def __init__(self, file: BinaryIO | None = None):
        """`file` is written as arrays come, so that none of them is kept in memory; without one, they are."""
        self._file = file or BytesIO()
        self._lines: dict[tuple, str] = {}
        self.size = 0

    def declare(self, array: np.ndarray) -> str:
        """Store an array unless it is there; the line of a program that declares it."""
        array = np.ascontiguousarray(array)
        key = array.dtype.name, array.shape, hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest()
        if key not in self._lines:
            dimensions = " ".join(map(str, array.shape))
            self._lines[key] = f"constant\t{CONSTANT_TYPES[array.dtype.name]}\t{self.size}\t{dimensions}"
            padding = -array.nbytes % ALIGNMENT
            self._file.write(array.reshape(-1).view(np.uint8).data)
            self._file.write(bytes(padding))
            self.size += array.nbytes + padding
        return self._lines[key]

    def stored(self) -> np.ndarray:
        """All of them, uint8."""
        self._file.seek(0)
        return np.frombuffer(self._file.read(), np.uint8)


def fuse(model: ir.Model, constants: Constants | None = None) -> ir.Model:
    """A copy of a lowered network in which every run of our operators is one Program.

    All programs share one constant, so that a weight that several of them use is stored once; so do networks that are
    given the same `constants`, the last of which holds all of them.
    """
    constants = constants or Constants()
    fused = model.clone()
    runs: list[list[ir.Node]] = [[]]
    for node in fused.graph:
        if node.domain in ("redraft", "redraft.cpu") and node.op_type in operators():
            runs[-1].append(node)
        else:
            runs.append([])
    runs = [run for run in runs if run]
    if runs:
        sources = dict.fromkeys(value for run in runs for node in run for value in inputs_of(node))
        declarations = {
            value: constants.declare(tensor.numpy())
            for value in sources
            if (tensor := ir.convenience.get_const_tensor(value)) is not None
        }
        tensor = ir.LazyTensor(lambda: ir.tensor(constants.stored()), ir.DataType.UINT8, ir.Shape([constants.size]))
        stored = ir.val(CONSTANTS, const_value=tensor)
        fused.graph.register_initializer(stored)
        for run in runs:
            _join(fused.graph, run, stored, declarations)
        for value in declarations:
            if value.is_initializer() and not value.uses() and not value.is_graph_output():
                del fused.graph.initializers[str(value.name)]
    return fused


def detach_constants(model: ir.Model) -> None:
    """Make the programs' constant an input of the network, if there is a program.

    OpenVINO copies constants at load; an input stays where the engine puts it. Its size is left open, since OpenVINO
    allocates every input whose size it knows.
    """
    value = model.graph.initializers.pop(CONSTANTS, None)
    if value is not None:
        value.shape, value.type, value.const_value = ir.Shape(["bytes"]), ir.TensorType(ir.DataType.UINT8), None
        model.graph.inputs.append(value)


def _join(graph: ir.Graph, run: list[ir.Node], stored: ir.Value, declarations: dict[ir.Value, str]) -> None:
    made = {output for node in run for output in node.outputs}
    sources = list(dict.fromkeys(value for node in run for value in inputs_of(node) if value not in made))
    constants = [value for value in sources if value in declarations]
    inputs = [*(value for value in sources if value not in declarations), stored]
    results = [output for node in run for output in node.outputs if _used_outside(output, run)]
    lines = [declarations[value] for value in constants]
    number = {value: i for i, value in enumerate([*inputs, *constants])}
    for node in run:
        arguments = " ".join(str(number[value]) for value in inputs_of(node))
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


def _used_outside(value: ir.Value, run: list[ir.Node]) -> bool:
    return value.is_graph_output() or any(use.node not in run for use in value.uses())
