"""An op that the table lacks, added from outside: its entry, how torch and Relax spell it, and samples that try it.

``outer`` is the product of each element of one vector with each of another. With its entry alone, it propagates
placements, runs on shards of any size on both backends, and is simulated. Run me::

    python examples/extend/add_op.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import distir_relax as dr
from distir_relax.ir import TensorType, Value
from distir_relax.ops import Attrs, Builder, Code, Cost, Semantics, Split, Types, aten, operands, relax


def infer_outer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """The result types; a ValueError is shown to the user with the op and its place in the model."""
    a, b = types
    if len(a.shape) != 1 or len(b.shape) != 1 or a.dtype != b.dtype:
        raise ValueError("two vectors of one dtype make an outer product")
    return (TensorType((*a.shape, *b.shape), a.dtype),)


dr.define_op(
    "outer",  # Relax's name, without "relax."
    Semantics(
        infer=infer_outer,
        torch="torch.outer({0}, {1})",  # the reference, and the torch backend's code
        linear=(operands(0), operands(1)),  # a pending sum may pass through either operand
    ),
    Split("m, n -> m n"),  # the factor rule: how dims relate
    cost=Cost(flops=lambda types, attrs, results: float(results[0].elements)),
    code=Code(relax="R.outer({0}, {1})"),  # the tvm backend's code
)


@aten("outer.default")  # how torch.export spells it
def aten_outer(g: Builder, a: Value, b: Value) -> Any:
    """The builder `g` writes the op; tensors come as values."""
    return g.emit("outer", a, b)


@relax("relax.outer")  # how a Relax module spells it
def relax_outer(g: Builder, args: Sequence[Any], attrs: Attrs) -> Any:
    """Relax has its operands in `args`, and further arguments by name in `attrs`."""
    return g.emit("outer", *args)


class Outer(torch.nn.Module):
    """A model in torch that uses the op."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.outer(a, b)


@I.ir_module(s_tir=True)
class RelaxOuter:
    """The same model in Relax."""

    @R.function
    def main(a: R.Tensor((7,), "float32"), b: R.Tensor((5,), "float32")) -> R.Tensor((7, 5), "float32"):
        return R.outer(a, b)


# Placements of the operands, and what each of three devices holds of the result.
SAMPLES = [
    ({"a": "S[0]"}, "f32[3|2|2,5]"),
    ({"b": "S[0]"}, "f32[7,2|2|1]"),
    ({"a": "S[0: 4|0|3]"}, "f32[4|0|3,5]"),
]


def main() -> None:
    """Compile both models for three devices, and compare what they give with torch."""
    a, b, mesh = torch.randn(7), torch.randn(5), dr.DeviceMesh((3,), ("tp",))
    for shardings, held in SAMPLES:
        for model, example in ((Outer(), (a, b)), (RelaxOuter, None)):
            plan = dr.compile(model, example, shardings=shardings, mesh=mesh)
            assert held in plan.text("distributed"), plan.text("distributed")
            for backend in ("torch", "tvm"):
                torch.testing.assert_close(plan(a, b, backend=backend), torch.outer(a, b))
        print(f"{shardings}: each device holds {held}")


if __name__ == "__main__":
    main()
