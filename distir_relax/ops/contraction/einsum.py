"""Einsum and bilinear forms, decomposed into matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, aten, broadcast_to, onnx, promote, relax, reshape_to

# ATen spellings


@aten("einsum.default")
def _einsum(g: Builder, equation: str, tensors: list[Any], *, path: Any = None) -> Any:
    """Contract the operands pairwise from the left; letters of a single operand are summed before."""
    terms, right = _einsum_terms(equation, [len(t.tensor.shape) for t in tensors])
    if any(len(set(t)) != len(t) for t in (*terms, right)):
        raise NotImplementedError(f"einsum {equation!r}: a letter twice in one operand")
    values = _of_one_size(g, terms, promote(g, *tensors))
    for i, (term, value) in enumerate(zip(terms, values, strict=True)):
        used = set(right).union(*(other for j, other in enumerate(terms) if j != i))
        if alone := [d for d, letter in enumerate(term) if letter not in used]:
            values[i] = g.emit("sum", value, axis=tuple(alone), keepdims=False)
            terms[i] = "".join(letter for letter in term if letter in used)
    (a, *rest), (x, *others) = terms, values
    for i, (b, y) in enumerate(zip(rest, others, strict=True)):
        used = set(right).union(*rest[i + 1 :])
        common = "".join(dict.fromkeys(letter for letter in a + b if letter in used))
        x, a = _contract(g, a, b, common, x, y), common
    return g.aten("permute.default", x, [a.index(c) for c in right])


def _of_one_size(g: Builder, terms: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """Return the operands with one size per letter: a dim of size 1 is broadcast."""
    sizes: dict[str, int] = {}
    for term, value in zip(terms, values, strict=True):
        for letter, size in zip(term, value.tensor.shape, strict=True):
            sizes[letter] = size if size != 1 else sizes.get(letter, 1)
    return [broadcast_to(g, x, tuple(sizes[c] for c in term)) for term, x in zip(terms, values, strict=True)]


def _einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result; an ellipsis becomes unused capital letters."""
    operands, arrow, right = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    spare = [letter for letter in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if letter not in equation]
    widths = [rank - len(term) + 3 for term, rank in zip(terms, ranks, strict=True) if "..." in term]
    if len(set(widths)) > 1:
        raise NotImplementedError(f"einsum {equation!r}: dims in ... that broadcast")
    dots = "".join(spare[: widths[0]]) if widths else ""
    terms = [term.replace("...", dots) for term in terms]
    if not arrow:
        letters = "".join(terms)
        right = "..." + "".join(sorted(c for c in set(letters) - set(dots) if letters.count(c) == 1))
    return terms, right.replace("...", dots)


def _contract(g: Builder, a: str, b: str, right: str, x: Value, y: Value) -> Any:
    """Reshape two operands to (batch, free, summed) dims and multiply them as matrices."""
    batch = [c for c in a if c in b and c in right]
    summed = [c for c in a if c in b and c not in right]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    size = dict(zip(a + b, (*x.tensor.shape, *y.tensor.shape), strict=True))
    lead = tuple(size[c] for c in batch)
    x = g.aten("permute.default", x, [a.index(c) for c in (*batch, *rows, *summed)])
    y = g.aten("permute.default", y, [b.index(c) for c in (*batch, *summed, *columns)])
    row_count, sum_count, column_count = (math.prod(size[c] for c in group) for group in (rows, summed, columns))
    x = reshape_to(g, x, (*lead, row_count, sum_count))
    y = reshape_to(g, y, (*lead, sum_count, column_count))
    z = reshape_to(g, g.aten("matmul.default", x, y), tuple(size[c] for c in (*batch, *rows, *columns)))
    order = [*batch, *rows, *columns]
    return g.aten("permute.default", z, [order.index(c) for c in right])


@aten("bilinear.default")
def _bilinear(g: Builder, a: Value, b: Value, weight: Value, bias: Value | None = None) -> Any:
    """Emit ``y[k] = a W[k] b`` as a linear layer on the products of all pairs of elements."""
    *lead, n = a.tensor.shape
    out, _, m = weight.tensor.shape
    a, b = reshape_to(g, a, (*lead, n, 1)), reshape_to(g, b, (*lead, 1, m))
    pairs = reshape_to(g, g.emit("multiply", a, b), (*lead, n * m))
    return g.aten("linear.default", pairs, reshape_to(g, weight, (out, n * m)), bias)


# Relax spellings


@relax("relax.einsum")
def _relax_einsum(g: Builder, args: Any, attrs: Attrs) -> Any:
    return g.aten("einsum.default", attrs["subscripts"], args[0])


# ONNX spellings


@onnx("Einsum")
def _onnx_einsum(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return g.aten("einsum.default", attrs["equation"], [x[i] for i in range(len(x))])
