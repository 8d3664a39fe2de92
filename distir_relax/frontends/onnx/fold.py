"""The results of ONNX nodes whose operands are all known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distir_relax.analysis.interpret import interpret
from distir_relax.errors import UnsupportedOpError
from distir_relax.frontends.onnx.tensors import as_numpy, as_torch, type_of
from distir_relax.ir import Value
from distir_relax.ops import Builder, OnnxOperands


def evaluate_known(
    convert: Callable[..., Any], operands: list[Any], attrs: Mapping[str, Any], where: str
) -> Sequence[Any]:
    """The results of a conversion on known operands: a program of its own, run at once, as numpy arrays.

    So a node means the same whether it is folded or not. Raises NotImplementedError and `UnsupportedOpError` where
    the op table cannot express the node.
    """
    builder = Builder()
    builder.location = where

    def place(array: Any) -> Value:
        value = builder.input("known", type_of(array), "constant")
        builder.tensors[value.name] = builder.known[value.name] = as_torch(array, where)
        return value

    result = convert(builder, OnnxOperands(operands, place, builder.known), attrs)
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    wanted = [(str(i), item) for i, item in enumerate(results) if isinstance(item, Value)]
    found = interpret(builder.function("main", wanted), builder.tensors)
    return [as_numpy(found[str(i)]) if str(i) in found else item for i, item in enumerate(results)]


def evaluate_reference(node: Any, operands: list[Any], opsets: Mapping[str, int], where: str) -> Sequence[Any]:
    """The results of a node by ONNX's reference evaluator, as numpy arrays.

    Raises `UnsupportedOpError` when it does not know the op, or cannot run it on these operands.
    """
    import numpy as np
    from onnx.reference import ReferenceEvaluator

    names = {name: x for name, x in zip(node.input, operands, strict=True) if x is not None}
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(node, opsets=dict(opsets)).run(None, names)
    except Exception as error:  # the evaluator raises whatever numpy does
        problem = f"cannot be computed at import: {type(error).__name__}: {error}"
        raise UnsupportedOpError(f"the ONNX op {node.op_type} {problem}", where) from error
    return [np.asarray(x) if x is not None else None for x in results]
