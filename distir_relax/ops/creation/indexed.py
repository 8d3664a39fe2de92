"""Tensors whose elements are functions of their indices, such as masks and positions: `lowering.IndexPositions`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.kernels.index_expression import compute, dim_of
from distir_relax.layout.symbolic_size import Size
from distir_relax.ops.table import FREE, Attrs, Code, Element, Rule, Semantics, Split, Types, define
from distir_relax.ops.table.index_expression import all_of, any_of, compared, index_of


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    names, rank = attrs["names"], len(attrs["shape"])
    if len(names) != len(attrs["sizes"]):
        raise ValueError(f"expected a size for each of the names {names}, found {attrs['sizes']}")

    def check(name: str) -> None:
        if name not in names and dim_of(name, rank) is None:
            raise ValueError(f"expected an index below i{rank}, or a name among {names}, found {name!r}")

    compute(attrs["value"], check, lambda number: None, lambda op, *operands: None)
    if attrs["dtype"] != "bool" and "int" not in attrs["dtype"]:
        raise ValueError(f"expected bool or an integer dtype, found {attrs['dtype']!r}")
    return (TensorType(tuple(attrs["shape"]), attrs["dtype"]),)


def _element(
    elements: Sequence[Element], shapes: Sequence[Sequence[Size]], attrs: Mapping[str, Any], shape: Sequence[Size]
) -> Element:
    """Return the expression. Raises NotImplementedError for one with `min` or `max`, which no `Element` has."""
    known = dict(zip(attrs["names"], attrs["sizes"], strict=True))

    def named(name: str) -> Element:
        if name in known:
            return known[name]  # type: ignore[no-any-return]
        dim = dim_of(name, len(shape))
        return index_of(dim) if shape[dim] != 1 else 0

    def computed(op: str, *operands: Any) -> Element:
        if op not in _OPS:
            raise NotImplementedError(f"{op} of elements")
        return _OPS[op](*operands)

    return compute(attrs["value"], named, lambda number: number, computed)


def _array(attrs: Attrs) -> Any:
    import numpy as np

    shape, known = attrs["shape"], dict(zip(attrs["names"], attrs["sizes"], strict=True))

    def named(name: str) -> Any:
        return known[name] if name in known else np.indices(shape, sparse=True)[dim_of(name, len(shape))]

    found = compute(attrs["value"], named, lambda number: number, lambda op, *operands: getattr(np, op)(*operands))
    return np.broadcast_to(np.asarray(found, attrs["dtype"]), shape)


_OPS: Mapping[str, Callable[..., Element]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "floor_divide": operator.floordiv,
    "negative": lambda x: -1 * x, "less_equal": lambda x, y: compared(x, "<=", y, ()),
    "equal": lambda x, y: compared(x, "==", y, ()), "not_equal": lambda x, y: compared(x, "!=", y, ()),
    "logical_and": lambda *parts: all_of(parts), "logical_or": lambda *parts: any_of(parts),
}  # fmt: skip


define(
    "indexed",
    Semantics(
        infer=_infer,
        torch="positions.indexed({value}, {names}, {sizes}, {shape}, torch.{dtype!s}, comm.device)",
        attributes={
            "value": "an element over its indices i0, i1, …, and names of sizes",
            "names": "names of sizes",
            "sizes": "the sizes of these names",
            "shape": "the shape",
            "dtype": "bool or an integer dtype",
        },
        element=_element,
        array=_array,
    ),
    # As of other positions, every device computes all of it.
    Split(lambda types, attrs, results: Rule((), (), (((),) * len(results[0].shape),))),
    cost=FREE,
    code=Code(relax="positions.indexed({value}, {names}, {sizes}, {shape}, {dtype})"),
)
