"""Functions of indices in Relax: ranges of numbers, and ops on them (`kernels.positions.indexed`)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

_OPS: Mapping[type, str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.FloorDiv: "floor_divide", ast.LtE: "less_equal",
    ast.Eq: "equal", ast.NotEq: "not_equal", ast.And: "logical_and", ast.Or: "logical_or", ast.USub: "negative",
}  # fmt: skip
_EXTREMA = {"min": "minimum", "max": "maximum"}


def indexed_tensor(constant: Callable[[Any, str], Any], emit: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the composition of `kernels.positions.indexed`, with the functions for scalars and for emitted values."""
    from tvm import relax

    def indexed(value: str, names: Sequence[str], sizes: Sequence[Any], shape: Sequence[Any], dtype: str) -> Any:
        known = dict(zip(names, sizes, strict=True))

        def call(op: str, *operands: Any) -> Any:
            return emit(getattr(relax.op, op)(*operands))

        def compute(node: Any) -> Any:
            match node:
                case ast.Constant(value=bool() as number):
                    return constant(number, "bool")
                case ast.Constant(value=number):
                    return constant(number, "int64")
                case ast.Name(id=name) if name in known:
                    return constant(known[name], "int64")
                case ast.Name(id=name):
                    dim = int(name[1:])
                    dims = [n if d == dim else 1 for d, n in enumerate(shape)]
                    return call("reshape", emit(relax.op.arange(0, shape[dim], 1, "int64")), dims)
                case ast.UnaryOp(op=op, operand=operand):
                    return call(_OPS[type(op)], compute(operand))
                case ast.BinOp(left=left, op=op, right=right):
                    return call(_OPS[type(op)], compute(left), compute(right))
                case ast.Compare(left=left, ops=[op], comparators=[right]):
                    return call(_OPS[type(op)], compute(left), compute(right))
                case ast.BoolOp(op=op, values=values):
                    return reduce(lambda a, b: call(_OPS[type(op)], a, b), map(compute, values))
                case ast.Call(func=ast.Name(id=name), args=numbers):
                    return reduce(lambda a, b: call(_EXTREMA[name], a, b), map(compute, numbers))
            raise NotImplementedError(f"{ast.dump(node)} in a function of indices")

        found = compute(ast.parse(value, mode="eval").body)
        if str(found.ty.dtype) != dtype:
            found = call("astype", found, dtype)
        return call("broadcast_to", found, list(shape))

    return indexed
