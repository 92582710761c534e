"""A network's graph under a pass: its edits, and what its nodes and values are to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from redraft.plugins.operators.linear.blocks import ROUNDED, BlockRows, RoundedRows
from redraft.plugins.operators.linear.pack import PackedWeight, cut, dtype_of, pack, pack_blocks, packed_bytes

DOMAIN = "redraft.cpu"


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """A node's inputs, without those that it leaves out."""
    return [value for value in node.inputs if value is not None]


BlocksOf = Callable[[str], Sequence[Sequence[BlockRows]] | None]
"""A constant's matrices [N, K] in blocks, from its name; a stack has several. None: they are packed in the precision
that the others have."""


class WeightOperand(NamedTuple):
    """A weight as an operator takes it."""

    weight: ir.Value
    """Its bytes"""
    dtype: str
    """The operator's attribute"""
    feature_order: ir.Value | None = None
    """The feature that each column is of, int32 [K], where they are not in order"""


class Editor:
    """Adds nodes and constants to a graph."""

    def __init__(self, graph: ir.Graph, precision: str, blocks_of: BlocksOf | None = None):
        self.graph, self.precision, self.blocks_of = graph, precision, blocks_of
        self.packed: dict[tuple[str, bool, bool], WeightOperand] = {}

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self.graph.initializers:
            self.graph.register_initializer(ir.val(name, const_value=ir.tensor(array, name=name)))
        return self.graph.initializers[name]

    def packed_weight(self, weight: ir.Value, transposed: bool, gated: bool = False) -> WeightOperand:
        """The packed weight, or those of a stack one after the other. It is packed whenever it is read, so that none is
        kept in memory."""
        key = (str(weight.name), transposed, gated)
        if key not in self.packed:
            make, size, dtype, order = self._packing(weight, transposed, "swiglu" if gated else "none")
            name = f"{weight.name}.{dtype}{'.gated' if gated else ''}"
            if name not in self.graph.initializers:
                lazy = ir.LazyTensor(
                    lambda: ir.tensor(make(), name=name), ir.DataType.UINT8, ir.Shape([size]), name=name
                )
                self.graph.register_initializer(ir.val(name, const_value=lazy))
            feature_order = None if order is None else self.constant(f"{name}.order", order)
            self.packed[key] = WeightOperand(self.graph.initializers[name], dtype, feature_order)
        return self.packed[key]

    def _packing(
        self, weight: ir.Value, transposed: bool, activation: str
    ) -> tuple[Callable[[], np.ndarray], int, str, np.ndarray | None]:
        """What packs a weight, the bytes that it gives, the operator's attribute, and the order of its features where
        they are not in order."""
        stored = constant_of(weight)
        assert stored is not None
        stack = stored if stored.ndim == 3 else stored[None]
        matrices = [matrix.T if transposed else matrix for matrix in stack]
        blocks = self.blocks_of(str(weight.name)) if self.blocks_of else None
        if blocks is None and self.precision in ROUNDED:
            blocks = [[RoundedRows(matrix, self.precision)] for matrix in matrices]
        if blocks is None:
            pack_all = partial(_joined_packs, partial(pack, precision=self.precision, activation=activation), matrices)
            return pack_all, len(matrices) * packed_bytes(matrices[0].shape, self.precision), self.precision, None
        segments = [cut(each, activation) for each in blocks]
        dtypes = {dtype_of(each): sum(segment.nbytes for segment in each) for each in segments}
        if len(dtypes) > 1:
            raise ValueError(f"{weight.name} has matrices in {', '.join(dtypes)}: expected the same forms in all")
        ((dtype, size),) = dtypes.items()
        pack_all = partial(_joined_packs, partial(pack_blocks, activation=activation), blocks)
        return pack_all, len(blocks) * size, dtype, blocks[0][0].feature_order

    def node(
        self,
        before: ir.Node,
        op: str,
        inputs: list[ir.Value],
        attributes: dict[str, Any] | None = None,
        domain: str = "",
        outputs: int = 1,
    ) -> list[ir.Value]:
        node = ir.node(op, inputs, attributes, domain=domain, num_outputs=outputs, name=f"{before.name}.{op}")
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}.{i}"
        self.graph.insert_before(before, node)
        return list(node.outputs)

    def reshape(self, before: ir.Node, x: ir.Value, shape: list[int]) -> ir.Value:
        if rank_of(x) == len(shape):
            return x
        constant = self.constant("shape." + ".".join(map(str, shape)), np.array(shape, dtype=np.int64))
        return self.node(before, "Reshape", [x, constant])[0]

    def replace(self, before: ir.Node, old: ir.Value, new: ir.Value) -> None:
        """`new` [rows, ...] takes the place, shape and name of `old` [..., the same]."""
        assert old.shape is not None
        if rank_of(old) != rank_of(new, default=min(rank_of(old), 2)):
            variable = [d for d in old.shape if not isinstance(d, int)]
            if len(variable) > 1:
                raise ValueError(f"{old.name} has shape {old.shape}: expected at most one variable dimension")
            shape = [d if isinstance(d, int) else -1 for d in old.shape]
            new = self.node(before, "Reshape", [new, self.constant(f"{old.name}.shape", np.array(shape, np.int64))])[0]
        name, new.shape, new.type = old.name, old.shape, old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}.unfused", name


def gated_product(node: ir.Node) -> tuple[ir.Node, str] | None:
    """The last node of act(gate) * up, where gate and up are the halves of `node`'s output, and the activation."""
    split = only_user(node.outputs[0], "Split")
    if not split or len(split.outputs) != 2 or shape_of(split.outputs[0])[-1] != shape_of(split.outputs[1])[-1]:
        return None
    gate, up = split.outputs
    silu, gelu = silu_product(gate), only_user(gate, "Gelu")
    if gelu and gelu.attributes.get_string("approximate", "none") != "tanh":
        return None
    activated = silu or gelu
    gated = only_user(activated.outputs[0], "Mul") if activated else None
    return (gated, "swiglu" if silu else "geglu") if gated and up in gated.inputs else None


def silu_product(x: ir.Value) -> ir.Node | None:
    """The last node of x * sigmoid(x), if nothing else takes x."""
    users = [use.node for use in x.uses()]
    sigmoid = next((node for node in users if node.op_type == "Sigmoid"), None)
    product = only_user(sigmoid.outputs[0], "Mul") if sigmoid and not x.is_graph_output() else None
    return product if product and set(users) == {sigmoid, product} else None


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node that takes `value`, if it is the only one and of this type."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type != op_type:
        return None
    return uses[0].node


def other_input(node: ir.Node, producer: ir.Node) -> ir.Value:
    return next(value for value in node.inputs if value is not None and value is not producer.outputs[0])


def input_of(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def constant_of(value: ir.Value) -> np.ndarray | None:
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def shape_of(value: ir.Value) -> tuple[Any, ...]:
    return tuple(value.shape) if value.shape is not None else ()


def rank_of(value: ir.Value, default: int = -1) -> int:
    return len(value.shape) if value.shape is not None else default


def _joined_packs(pack: Callable[[Any], PackedWeight], matrices: Sequence[Any]) -> np.ndarray:
    """Packed matrices, one after the other."""
    arrays = [pack(matrix).data for matrix in matrices]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
