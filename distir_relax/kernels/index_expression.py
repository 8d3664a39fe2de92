"""Expressions over the indices of an element, such as ``i1 <= i0 + past``: read as data, and never run as code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from typing import Any, TypeVar

T = TypeVar("T")

_OPS: Mapping[type, str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.FloorDiv: "floor_divide", ast.USub: "negative",
    ast.LtE: "less_equal", ast.Eq: "equal", ast.NotEq: "not_equal", ast.And: "logical_and", ast.Or: "logical_or",
}  # fmt: skip
_FUNCTIONS = {"min": "minimum", "max": "maximum"}
_MOST_LENGTH = 4000
"""Characters of an expression."""


def compute(value: str, name: Callable[[str], T], number: Callable[[int], T], op: Callable[..., T]) -> T:
    """Return the `value`, from what its names and numbers are, and an op on these: ``op("less_equal", a, b)``.

    Ops are add, subtract, multiply, floor_divide, negative, minimum, maximum, less_equal, equal, not_equal, logical_and
    and logical_or. Raises ValueError for another expression.
    """
    return _compute(_parsed(value), name, number, op)


def _compute(node: ast.AST, name: Callable[[str], T], number: Callable[[int], T], op: Callable[..., T]) -> T:
    def inner(child: ast.AST) -> T:
        return _compute(child, name, number, op)

    match node:
        case ast.Constant(value=int() as value):
            return number(value)
        case ast.Name(id=value):
            return name(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return op("negative", inner(operand))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPS:
            return op(_OPS[type(kind)], inner(left), inner(right))
        case ast.Compare(left=left, ops=[kind], comparators=[right]) if type(kind) in _OPS:
            return op(_OPS[type(kind)], inner(left), inner(right))
        case ast.BoolOp(op=kind, values=values):
            return reduce(lambda a, b: op(_OPS[type(kind)], a, b), map(inner, values))
        case ast.Call(func=ast.Name(id=value), args=[_, _, *_] as operands, keywords=[]) if value in _FUNCTIONS:
            return reduce(lambda a, b: op(_FUNCTIONS[value], a, b), map(inner, operands))
    raise ValueError(f"expected an expression of indices, found {ast.unparse(node)[:60]!r}")


@lru_cache(maxsize=256)
def _parsed(value: str) -> ast.AST:
    try:
        if not isinstance(value, str):
            raise ValueError("no text")
        if len(value) > _MOST_LENGTH:
            raise ValueError(f"more than {_MOST_LENGTH:,} characters")
        return ast.parse(value, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as wrong:
        raise ValueError(f"expected an expression of indices, found {str(value)[:60]!r}: {wrong}") from None


def dim_of(name: str, rank: int) -> Any:
    """Return the dim whose index a name is, of a tensor of `rank` dims; None for another name."""
    digits = name.removeprefix("i")
    is_index = name.startswith("i") and digits.isascii() and digits.isdigit() and len(digits) < 3
    return int(digits) if is_index and int(digits) < rank else None
