"""Registers declared kernels as TensorRT's quick deployable plugins, ahead of time: an engine holds their PTX.

Tests register these plugins through TensorRT's Python layer, `tensorrt.plugin` of 10.16 and of 11.4, with integers for
the builder's expressions.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from redraft.plugins.cuda.compile import ptx
from redraft.plugins.cuda.declaration import ALIAS, NAMESPACE, Kernel, Sizes, entry_ptx
from redraft.plugins.library import BuildError


def register(kernel: Kernel, architecture: str = "sm_90") -> None:
    """Make `tensorrt.plugin.op.redraft.<name>(*inputs, **attributes)`, for networks that are created with
    `PREFER_AOT_PYTHON_PLUGINS`. PTX for an architecture also runs on later ones.

    A kernel with in-place outputs has one more attribute, `alias`. With 1 it declares these as aliases, which
    takes networks with aliased plugin I/O enabled. With 0 it does not: whoever executes the engine binds both names to
    one address.

    Raises BuildError without TensorRT or nvcc, ValueError for a declaration that breaks a rule.
    """
    try:
        import tensorrt as trt
        import tensorrt.plugin as trtp
    except ImportError as error:
        raise BuildError(
            f"TensorRT cannot be imported ({error}): plugins need the package tensorrt, 10.16 or newer"
        ) from error
    kernel.check()
    dtypes = {"bf16": trt.DataType.BF16, "int32": trt.DataType.INT32, "float32": trt.DataType.FLOAT}
    names = [argument.name for argument in kernel.inputs]

    class SymbolicSizes(Sizes):
        def least(self, a: Any, b: Any) -> Any:
            return trtp.min(a, b)

        def most(self, a: Any, b: Any) -> Any:
            return trtp.max(a, b)

        def quotient(self, a: Any, b: Any) -> Any:
            return (trtp.ShapeExpr(a) if isinstance(a, int) else a) // b

    def sizes(arguments: tuple[Any, ...], attributes: dict[str, int]) -> Sizes:
        return kernel.sizes([inp.shape_expr for inp in arguments[: len(names)]], attributes, SymbolicSizes)

    def describe(*inputs: Any, **attributes: int) -> tuple[Any, ...]:
        for argument, inp in zip(kernel.inputs, inputs, strict=True):
            if inp.dtype != dtypes[argument.dtype]:
                raise ValueError(f"{kernel.name}: {argument.name} is {inp.dtype}: expected {argument.dtype}")
        values = sizes(inputs, attributes)
        return tuple(
            inputs[names.index(output.in_place_of)].aliased()
            if output.in_place_of and attributes[ALIAS]
            else trtp.from_shape_expr(tuple(values[size] for size in output.shape), dtypes[output.dtype])
            for output in kernel.outputs
        )

    def implement(*arguments: Any) -> tuple[str, str, Any, Any]:
        attributes = dict(zip(kernel.attributes, arguments[len(names) :], strict=False))
        values = sizes(arguments, attributes)
        launch = trtp.KernelLaunchParams(*(values[size] for size in kernel.grid), block_x=kernel.threads)
        scalars = trtp.SymIntExprs.from_tuple(tuple(trtp.SymInt32(values[name]) for name in kernel.scalars))
        text = ptx(kernel.source, architecture)
        kernel.check_ptx(text, attributes)
        entry = kernel.entry_for(attributes)
        return entry, entry_ptx(text, entry), launch, scalars

    inputs = [(argument.name, trtp.TensorDesc) for argument in kernel.inputs]
    in_place = [ALIAS] * any(output.in_place_of for output in kernel.outputs)
    parameters = [*inputs, *((name, int) for name in (*kernel.attributes, *in_place))]
    results = types.GenericAlias(tuple, (trtp.TensorDesc,) * len(kernel.outputs))
    outputs = ("outputs", results)
    kernel_returns = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    trtp.register(kernel.plugin_id)(_signed(describe, parameters, results))
    trtp.aot_impl(kernel.plugin_id)(_signed(implement, [*parameters, outputs, ("tactic", int)], kernel_returns))
    _unpack_attributes(trt.get_plugin_registry().get_creator(kernel.name, "1", NAMESPACE))


def _unpack_attributes(creator: Any) -> None:
    """Let a plugin's creator take attributes as numbers: TensorRT gives it arrays of one, on which the Python layers of
    10.16 and 11.0 call `int`, and NumPy since 2.4 refuses that."""
    create = creator.create_plugin

    def create_plugin(name: str, namespace: str, fields: Any, *request: Any) -> Any:
        numbers = [types.SimpleNamespace(name=field.name, data=field.data.item()) for field in fields]
        return create(name, namespace, numbers, *request)

    creator.create_plugin = create_plugin


def _signed(function: Callable[..., Any], parameters: list[tuple[str, Any]], returns: Any) -> Callable[..., Any]:
    """The function with a signature that names its arguments: tensorrt.plugin reads it."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters]
    function.__signature__ = inspect.Signature(listed, return_annotation=returns)  # type: ignore[attr-defined]
    return function
