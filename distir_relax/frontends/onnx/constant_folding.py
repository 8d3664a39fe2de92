"""Constant folding of ONNX nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distir_relax.errors import ImportModelError, UnsupportedOpError
from distir_relax.frontends.onnx.tensors import as_numpy, as_torch, type_of
from distir_relax.interpret.size_interpreter import interpret_sizes
from distir_relax.ir import Value
from distir_relax.layout import is_symbolic
from distir_relax.ops import Builder, OnnxOperands, SizeArray

MOST_FOLDED = 1 << 31
"""Maximum size in bytes of folded tensors; larger ones must be weights or inputs."""


def fold_by_table(
    convert: Callable[..., Any], operands: list[Any], attrs: Mapping[str, Any], where: str
) -> Sequence[Any]:
    """Run the conversion of a node on known operands as a program of its own; return the results as numpy arrays.

    Operands and results with symbolic elements are `SizeArray`. So folding does not change a node's meaning. Raises
    NotImplementedError and `UnsupportedOpError` if the op table cannot express the node, if a result has a symbolic
    shape, and if an element is neither a number nor a size.
    """
    builder = Builder()
    builder.location = where
    known: dict[str, Any] = {}

    def place(array: Any) -> Value:
        value = builder.input("known", type_of(array), "constant")
        if isinstance(array, SizeArray):
            known[value.name] = array
        else:
            known[value.name] = builder.constants[value.name] = as_torch(array, where)
        return value

    result = convert(builder, OnnxOperands(operands, place, builder.constants), attrs)
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    outputs = [(str(i), item) for i, item in enumerate(results) if isinstance(item, Value)]
    for value in (value for op in builder.ops for value in op.results):
        if is_symbolic(value.tensor.shape):
            raise NotImplementedError(f"a tensor of symbolic shape: {value.type}")
        _check_bytes(value.tensor.bytes, str(value.type), where)
    values = interpret_sizes(builder.function("main", outputs), {**builder.tensors, **known})
    for number, item in values.items():
        results[int(number)] = item if isinstance(item, SizeArray) else as_numpy(item)
    return results


def fold_by_onnx(node: Any, operands: list[Any], opsets: Mapping[str, int], where: str) -> Sequence[Any]:
    """Run a node by ONNX's reference evaluator; return the results as numpy arrays.

    Raises `UnsupportedOpError` if the evaluator does not support the op, or cannot run it on these operands;
    `ImportModelError` for a result larger than `MOST_FOLDED`.
    """
    import numpy as np
    from onnx.reference import ReferenceEvaluator

    _check_size(node, operands, opsets, where)
    names = {name: x for name, x in zip(node.input, operands, strict=True) if x is not None}
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(node, opsets=dict(opsets)).run(None, names)
    except Exception as error:  # the evaluator raises any error of numpy
        problem = f"cannot be computed at import: {type(error).__name__}: {error}"
        raise UnsupportedOpError(f"the ONNX op {node.op_type} {problem}", where) from error
    return [np.asarray(x) if x is not None else None for x in results]


def _check_size(node: Any, operands: list[Any], opsets: Mapping[str, int], where: str) -> None:
    """Raise `ImportModelError` for a huge result, according to ONNX's shape inference with the operands' values."""
    import onnx

    present = [(name, x) for name, x in zip(node.input, operands, strict=True) if x is not None]
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
        types = {n: onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
                 for n, x in present}  # fmt: skip
        small = {n: onnx.numpy_helper.from_array(x, n) for n, x in present if x.nbytes < _FEW_BYTES}
        imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        inferred = onnx.shape_inference.infer_node_outputs(schema, node, types, small, opset_imports=imports)
    except Exception:  # unknown or invalid op: the evaluator reports it
        return
    for kind in inferred.values():
        dims = [dim.dim_value for dim in kind.tensor_type.shape.dim]
        _check_bytes(math.prod(dims), f"a tensor of {dims}", where)


_FEW_BYTES = 4096
"""Maximum size in bytes of operands that may determine shapes."""


def _check_bytes(size: int, description: str, where: str) -> None:
    if size > MOST_FOLDED:
        raise ImportModelError(
            f"{description} is computed during import, and has more than {MOST_FOLDED:,} bytes",
            where,
            "make it an input of the model",
        )
