"""Sums over a batch in a fixed order, whatever the number of data-parallel ranks.

The batch is cut into a fixed number of pieces of equal size. A rank computes its part of each microbatch, one piece, by
the same ops on the same shapes as any other number of ranks would. Instead of reducing over ranks, it gathers the
pieces, and adds those of all ranks and microbatches one after the other, in the order of the samples::

    %s0 = all_reduce(%p0)               %g0 = all_gather(%p0)         pieces 0, 1 of ranks 0, 1
    %s1 = all_reduce(%p1)          =>   %g1 = all_gather(%p1)         pieces 2, 3
    %s = ordered_sum(%s0, %s1)          %s = ordered_sum(the parts of %g0 and of %g1)

So the result has the same bits on 1, 2, 3 or 6 ranks with 6 pieces. A rank receives as many tensors as there are
pieces, where a ring of an all-reduce passes two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.ir import Function, Module, Op, Value, value_names
from distir_relax.layout import Collective
from distir_relax.lowering.distributed_builder import SpmdBuilder
from distir_relax.ops import Trait, lookup

SUM = "ordered_sum"
"""The op that adds its operands from the first to the last."""


@dataclass(frozen=True, slots=True)
class OrderSums:
    """Pass: distributed stage in and out. Replace sums over the ranks along `axis` by sums of `pieces` in order.

    Raises `DistIRError` for other communication than sums over the batch, and for a sum of fewer pieces, such as one
    over each microbatch alone.
    """

    takes: ClassVar[tuple[str, ...]] = ("distributed",)
    gives: ClassVar[str] = "distributed"
    pieces: int
    axis: str = "data"

    def run(self, module: Module) -> Module:
        """Return the module with ordered sums."""
        return replace(module, functions=(_Rewriter(module, self).function(), *module.functions[1:]))


@dataclass(slots=True)
class _Rewriter:
    module: Module
    options: OrderSums
    builder: SpmdBuilder = field(init=False)
    values: dict[str, Value] = field(default_factory=dict)
    """Sums by the names that they had before."""
    parts: dict[str, tuple[Op, tuple[Value, ...]]] = field(default_factory=dict)
    """The pieces of each sum over ranks that is a term of an ordered sum, with the collective."""

    def __post_init__(self) -> None:
        self.builder = SpmdBuilder(self.module.meshes[0], value_names(self.module.main))

    def function(self) -> Function:
        """Return the entry function with ordered sums."""
        main = self.module.main
        terms = {v.name for op in main.ops if _adds_in_order(op) for v in op.operands}
        for op in main.ops:
            if op.callee:
                self._append(op)
            elif lookup(op.name, op.location).cost.collective is Collective.ALL_REDUCE:
                pieces = self._gather(op)
                self.parts[op.results[0].name] = op, pieces
                if op.results[0].name not in terms:
                    self._sum(op, pieces)
            elif _adds_in_order(op):
                self._sum(op, tuple(piece for v in op.operands for piece in self._pieces(v)))
            elif Trait.COMMUNICATES in lookup(op.name, op.location).traits:
                raise self._refused(op, f"{op.name} exchanges other values")
            else:
                self._append(op)
        outputs = tuple(replace(o, value=self._new(o.value)) for o in main.outputs)
        return replace(main, ops=tuple(self.builder.ops), outputs=outputs)

    def _append(self, op: Op) -> None:
        if any(v.name in self.parts and v.name not in self.values for v in op.operands):
            raise self._refused(op, "it needs a sum over one microbatch alone")
        self.builder.ops.append(replace(op, operands=tuple(map(self._new, op.operands))))

    def _new(self, value: Value) -> Value:
        return self.values.get(value.name, value)

    def _pieces(self, value: Value) -> tuple[Value, ...]:
        return self.parts[value.name][1] if value.name in self.parts else (self._new(value),)

    def _gather(self, op: Op) -> tuple[Value, ...]:
        """Emit the gathering of the terms that ranks add to a sum; return them in the order of the ranks."""
        if op.attrs["op"] != "sum" or op.attrs["axis"] != self.options.axis:
            raise self._refused(op, f"it needs the {op.attrs['op']} over ranks")
        g, (operand,) = self.builder, map(self._new, op.operands)
        count = self.module.meshes[0].shape[self.module.meshes[0].axes.index(self.options.axis)]
        shape = operand.placed.local(0).shape
        g.location, g.hint = op.location, op.results[0].name
        row = g.one("reshape", operand, shape=(1, *shape))
        rows = g.one("all_gather", row, axis=self.options.axis, dim=0, sizes=(1,) * count)
        split = g.emit("split", rows, sizes=(1,) * count, axis=0)
        parts = split if isinstance(split, tuple) else (split,)
        return tuple(g.one("reshape", part, shape=shape) for part in parts)

    def _sum(self, op: Op, pieces: tuple[Value, ...]) -> None:
        if len(pieces) != self.options.pieces:
            raise self._refused(op, f"it adds {len(pieces)} pieces alone")
        self.builder.location, self.builder.hint = op.location, op.results[0].name
        self.values[op.results[0].name] = self.builder.one(SUM, *pieces)

    def _refused(self, op: Op, reason: str) -> DistIRError:
        return DistIRError(
            f"the model cannot be trained deterministically in {self.options.pieces} pieces: {reason}", op.location,
            "compile it without deterministic=",
        )  # fmt: skip


def _adds_in_order(op: Op) -> bool:
    return not op.callee and Trait.ADDS_IN_ORDER in lookup(op.name, op.location).traits
