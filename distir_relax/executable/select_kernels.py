"""Which kernel of its entry runs each op (`ops.table.kernel`): the attribute ``by`` (`ir.EXECUTION`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import VerificationError
from distir_relax.ir import Module, Op
from distir_relax.ops import select_kernel


@dataclass(frozen=True, slots=True)
class SelectKernels:
    """Pass: executable stage, in and out. An op takes the first kernel of its entry that its operands and memory fit.

    One without runs by its reference expression. Whether the code that a kernel calls is native or torch's is decided
    where it runs, by the processor (`distir_relax.kernels.native`).
    """

    takes: ClassVar[tuple[str, ...]] = ("executable",)
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Name the kernels of all ops."""
        functions = (replace(f, ops=tuple(map(_with_kernel, f.ops))) for f in module.functions)
        return replace(module, functions=tuple(functions))


def check_kernels(module: Module) -> None:
    """Raise `VerificationError` for an op that names another kernel than its operands and memory need."""
    for function in module.functions:
        for op in function.ops:
            kernel, found = None if op.callee else select_kernel(op), op.attrs.get("by")
            expected = kernel.name if kernel else None
            if found != expected:
                raise VerificationError(
                    f"{op.name} runs by {expected or 'its expression'}, found {found!r}", op.location
                )


def _with_kernel(op: Op) -> Op:
    kernel = None if op.callee else select_kernel(op)
    return op if kernel is None else replace(op, attrs={**op.own_attrs, "by": kernel.name, **op.execution})
