"""Tensors whose elements are functions of their indices, such as masks and positions: `lowering.IndexPositions`."""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.ops.table import FREE, Attrs, Code, Rule, Semantics, Split, Types, define


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
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
