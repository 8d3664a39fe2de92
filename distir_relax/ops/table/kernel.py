"""Kernels of an op: the ways to run it where operands have another form than tensors that it only reads.

=============  ===============================================================================================
`InPlace`      operand 0 becomes the result: an update
`Overwriting`  the result is written into the memory of a dead operand
`Packed`       constant weights are in the layout of a kernel
`Appending`    operand 0 is the beginning of a buffer, which has room for the result
`ForRequests`  the states of all requests of a step are read where they are
=============  ===============================================================================================

An op has at most one of each in its entry, besides the reference expression of its `Semantics`, which takes any
operands. Which of them runs an op of the executable stage follows from its operands and its memory (`Kernel.runs`); the
pass `executable.SelectKernels` writes it into the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from distir_relax.ir import EACH, PACKED, Op, TensorType

Types = Sequence[TensorType]
Attrs = Mapping[str, Any]
Expression = str | Callable[[Attrs], str]


@dataclass(frozen=True)
class Kernel:
    """A kernel: `torch` is its expression, as `Semantics.torch`."""

    name: ClassVar[str]
    torch: Expression

    def runs(self, op: Op) -> bool:
        """Return whether it runs an op of the executable stage, by the op's operands and memory."""
        return True


@dataclass(frozen=True)
class InPlace(Kernel):
    """Writes the result into operand 0, which is dead afterwards, and returns it."""

    name: ClassVar[str] = "in place"


@dataclass(frozen=True)
class Overwriting(Kernel):
    """Writes the result into the memory of an operand of its type, ``{out}``, and returns it.

    The operand is dead afterwards (`distir_relax.ops.table.storage_reuse`); it is one of `operands`, by default any.
    """

    name: ClassVar[str] = "overwriting"
    operands: frozenset[int] | None = None

    def runs(self, op: Op) -> bool:
        """Return whether the op writes into memory."""
        return "into" in op.attrs


@dataclass(frozen=True)
class Packed:
    """Takes constant weights that are packed, as a function of the other operands.

    `pack` is the torch expression that packs the operands between the first and the last `others`, such as the groups
    of rows: over ``{1}``, … or ``{weights}`` for all, ``{rows}``, the rows of the op's first result, and ``{dtype}``,
    its dtype. It is run once, when the program is loaded, with `distir_relax.kernels.packing` and `quantized` in scope,
    and gives that function. If it depends on the types of the weights, it is a function of them; empty if these cannot
    be packed.
    """

    name: ClassVar[str] = "packed"
    pack: str | Callable[[Types], str]
    others: int = 0

    def runs(self, op: Op) -> bool:
        """As `Kernel.runs`."""
        return any(v.local.form == PACKED for v in op.operands)

    def weights(self, op: Op) -> range:
        """Return the operands of an op that are packed, by number."""
        return range(1, len(op.operands) - self.others)

    def packing(self, weights: Types) -> str:
        """Return the expression for weights of these types; empty if they cannot be packed."""
        return self.pack(weights) if callable(self.pack) else self.pack


@dataclass(frozen=True)
class Appending(Kernel):
    """Appends to a buffer.

    Operand 0 is the beginning of it, and ``{0}`` the buffer: it has the first ``{length}`` elements along attribute
    `axis`, and room for the others of the result.
    """

    name: ClassVar[str] = "appending"

    def runs(self, op: Op) -> bool:
        """Return whether the op writes into the buffer."""
        return op.attrs.get("into") == 0


@dataclass(frozen=True)
class ForRequests(Kernel):
    """Runs an op with growing states, the operands `states`, which it extends, for all requests of a step in one call.

    Operands before the states have the rows of all requests, and those after them are lists with the value of each;
    ``{caches}`` has the arguments of a `kernels.attention.Cache` for each state, its name and its attribute ``views``.
    `attending` is a `kernels.attention.RequestsAttention`. `load` gives, from the types of operands, and the
    attributes, the expression that loads the native kernel, which may have to be compiled.
    """

    name: ClassVar[str] = "for requests"
    states: tuple[int, ...]
    load: Callable[[Types, Attrs], str]

    def runs(self, op: Op) -> bool:
        """Return whether the states are those of all requests."""
        return all(op.operands[number].local.form == EACH for number in self.states)


AnyKernel = Kernel | Packed
K = TypeVar("K", Kernel, InPlace, Overwriting, Packed, Appending, ForRequests)
