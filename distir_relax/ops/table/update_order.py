"""Order of ops that update values in place."""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.ir import Op
from distir_relax.ops.table.table import lookup


def update_after_reads(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Move updates in place to the end if later ops read the old value, such as a state in a block's recomputation.

    An update whose result is used stays.
    """
    last_read = {v.name: number for number, op in enumerate(ops) for v in op.operands}
    late = {
        number
        for number, op in enumerate(ops)
        if not op.callee
        and lookup(op.name, op.location).code.in_place
        and last_read[op.operands[0].name] > number
        and not any(v.name in last_read for v in op.results)
    }
    return (*(op for n, op in enumerate(ops) if n not in late), *(ops[n] for n in sorted(late)))
