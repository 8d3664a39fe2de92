"""Updates in place that depend on a condition, which is computed in the step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from distir_relax.ir import Value
from distir_relax.ops import Builder, lookup


class ConditionalUpdate:
    """Updates that are emitted with `g`, and made if the `condition` holds, a scalar bool."""

    def __init__(self, g: Builder, condition: Value) -> None:
        self._g, self._condition = g, condition

    def assign(self, old: Value, new: Value) -> Value:
        """Emit the update of a tensor in place, which keeps its old value without the condition."""
        result: Value = self._g.emit("assign_where", old, new, self._condition)
        return result

    def keep(self, start: int, old: Collection[Value]) -> None:
        """Let ops from number `start` on update copies of the values `old`, which are kept without the condition."""
        ops = self._g.ops[start:]
        del self._g.ops[start:]
        for op in ops:
            first = op.operands[0] if op.operands else None
            if first in old and lookup(op.name).updates:
                assert first is not None, "an op in place has an operand"
                # An op of one operand that does not change its type may share its storage.
                copied = self._g.emit("multiply", first, self._g.constant(1, first.tensor.dtype))
                op = replace(op, operands=(copied, *op.operands[1:]))
            self._g.ops.append(op)
