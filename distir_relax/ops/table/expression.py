"""An op as an expression: the one text that is both its reference semantics and the code of a backend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from distir_relax.ir import Op
from distir_relax.ops.table.builder import infer
from distir_relax.ops.table.entry import Expression, Trait
from distir_relax.ops.table.table import lookup

if TYPE_CHECKING:
    import torch


def torch_expression(op: Op, operands: Sequence[str]) -> str:
    """The torch code of `op` applied to the given operand expressions."""
    entry = lookup(op.name, op.location)
    if is_zero(op):
        (result,) = infer(op.name, [v.tensor for v in op.operands], op.attrs, op.location)
        kind = "" if result.dtype == op.operands[0].tensor.dtype else f", dtype=torch.{result.dtype}"
        return f"{operands[0]}.new_zeros({_literal(result.shape)}{kind})"
    return _fill(entry.semantics.torch, op.attrs, operands)


def torch_in_place(op: Op, operands: Sequence[str]) -> str:
    """The torch code that writes the result of `op` where its operand 0 is, and gives that back; "" if it has none."""
    return _fill(lookup(op.name, op.location).code.in_place, op.attrs, operands)


def is_zero(op: Op) -> bool:
    """Whether the result of a local op is zero because it is made from nothing, or has no elements itself."""
    if Trait.ZERO_IF_EMPTY not in lookup(op.name, op.location).traits:
        return False
    types = [v.tensor for v in op.operands]
    return any(t.elements == 0 for t in (*types, *infer(op.name, types, op.attrs, op.location)))


def relax_expression(op: Op, operands: Sequence[str]) -> str:
    """The Relax code of `op`, with the namespace of Relax ops as `R`."""
    entry = lookup(op.name, op.location)
    if entry.code.relax:
        return _fill(entry.code.relax, op.attrs, operands)
    arguments = [*operands, *(f"{key}={_literal(value)}" for key, value in op.attrs.items())]
    return f"R.{op.name}({', '.join(arguments)})"


def evaluate(op: Op, operands: Sequence[torch.Tensor], comm: Any = None) -> tuple[torch.Tensor, ...]:
    """Run `op` on tensors: its reference semantics. An op of the communicator runs on `comm`, a rank's own."""
    import torch
    import torch.nn.functional as F

    from distir_relax.kernels import foreign, recurrent, resample

    names = [f"a{i}" for i in range(len(operands))]
    scope: dict[str, Any] = {"torch": torch, "F": F, "comm": comm}
    scope |= {"foreign": foreign, "recurrent": recurrent, "resample": resample}
    scope |= zip(names, operands, strict=True)
    result = eval(_compiled(torch_expression(op, names)), scope)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@lru_cache(maxsize=65536)
def _compiled(text: str) -> CodeType:
    return compile(text, text, "eval")


class _Attribute:
    """An attribute in a template: ``{shape}`` is a literal, ``{dtype!s}`` the bare text."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return _literal(self.value)


def _fill(template: Expression, attrs: Mapping[str, Any], operands: Sequence[str]) -> str:
    text = template if isinstance(template, str) else template(attrs)
    if "{*}" in text:
        text = text.replace("{*}", ", ".join(operands))
    return text.format(*operands, **{key: _Attribute(value) for key, value in attrs.items()})


def _literal(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return repr(value)
