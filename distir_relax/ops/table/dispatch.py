"""Which implementation of an op runs: the most precise one that its operands allow.

Operands are numbers (torch tensors) where they are known, and types (`TensorType`) where they are not:

1. all known: the reference semantics, if the op has some on one device;
2. some known: the entry's `mixed` implementation, if it has one that needs no more;
3. otherwise the types alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import Op, TensorType, Value
from distir_relax.ops.table.builder import infer
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.expression import evaluate
from distir_relax.ops.table.table import lookup

if TYPE_CHECKING:
    import torch

Known = Union[TensorType, "torch.Tensor"]
"""What is known of a local tensor: its type, or its numbers."""


def dispatch(op: Op, operands: Sequence[Known]) -> tuple[Known, ...]:
    """The results of a local op (its attributes those of one device) on operands of which some are known.

    Raises `VerificationError` when the operands do not fit the op, or it cannot do with so little known.
    """
    entry = lookup(op.name, op.location)
    if Trait.ON_COMMUNICATOR not in entry.traits and all(not isinstance(x, TensorType) for x in operands):
        values = tuple(Value(f"x{i}", type_of(x)) for i, x in enumerate(operands))
        return evaluate(Op(op.name, values, (), op.attrs, op.location), operands)  # type: ignore[arg-type]
    if entry.semantics.mixed:
        try:
            found = entry.semantics.mixed(operands, op.attrs)
        except DistIRError:
            raise
        except (ValueError, IndexError, TypeError) as error:
            raise VerificationError(f"{op.name}: {error}", op.location) from None
        if found is not None:
            return tuple(found)
    return infer(op.name, [type_of(x) for x in operands], op.attrs, op.location)


def type_of(known: Known) -> TensorType:
    """The type of what is known of a tensor."""
    if isinstance(known, TensorType):
        return known
    return TensorType(tuple(known.shape), str(known.dtype).removeprefix("torch."))
