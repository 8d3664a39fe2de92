"""Tensors whose elements are functions of their indices, such as masks and positions: `lowering.IndexPositions`."""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.kernels.index_expression import compute, dim_of
from distir_relax.ops.table import FREE, Attrs, Code, Rule, Semantics, Split, Types, define


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
    ),
    # As of other positions, every device computes all of it.
    Split(lambda types, attrs, results: Rule((), (), (((),) * len(results[0].shape),))),
    cost=FREE,
    code=Code(relax="positions.indexed({value}, {names}, {sizes}, {shape}, {dtype})"),
)
