"""Dispatch of an op to the most precise implementation that its operands allow.

Operands are tensors (`torch.Tensor`) where their values are constant, and types (`TensorType`) otherwise:

1. all values constant: the reference semantics, if the op has one on a single device;
2. some values constant: the entry's `partial_eval` implementation, if it accepts this combination;
3. otherwise: type inference alone.
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

LocalTensor = Union[TensorType, "torch.Tensor"]
"""A local tensor at compile time: its type, or its value if constant."""


def dispatch(op: Op, operands: Sequence[LocalTensor]) -> tuple[LocalTensor, ...]:
    """Return the results of a local op (with the attributes of one device) on operands of which some are constant.

    Raises `VerificationError` if the operands do not fit the op, or if it needs the values of more operands.
    """
    entry = lookup(op.name, op.location)
    if Trait.ON_COMMUNICATOR not in entry.traits and all(not isinstance(x, TensorType) for x in operands):
        values = tuple(Value(f"x{i}", type_of(x)) for i, x in enumerate(operands))
        return evaluate(Op(op.name, values, (), op.attrs, op.location), operands)  # type: ignore[arg-type]
    if entry.semantics.partial_eval:
        try:
            results = entry.semantics.partial_eval(operands, op.attrs)
        except DistIRError:
            raise
        except (ValueError, IndexError, TypeError) as error:
            raise VerificationError(f"{op.name}: {error}", op.location) from None
        if results is not None:
            return tuple(results)
    return infer(op.name, [type_of(x) for x in operands], op.attrs, op.location)


def type_of(tensor: LocalTensor) -> TensorType:
    """Return the type of a tensor, or the type itself."""
    if isinstance(tensor, TensorType):
        return tensor
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
