"""Order of ops that update values in place."""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.ir import Op
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.table import lookup


def update_after_reads(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Move updates in place to the end if later ops read the old value, such as a state in a block's recomputation.

    A view of it is the old value, too. An update whose result is used stays.
    """
    used = {v.name for op in ops for v in op.operands}
    storage: dict[str, str] = {}
    """The value whose memory each view has."""
    last_read: dict[str, int] = {}
    for number, op in enumerate(ops):
        names = [storage.get(v.name, v.name) for v in op.operands]
        last_read.update(dict.fromkeys(names, number))
        if op.operands and not op.callee and _is_view(op):
            storage.update((v.name, names[0]) for v in op.results)
    late = {
        number
        for number, op in enumerate(ops)
        if not op.callee
        and lookup(op.name, op.location).updates
        and last_read[storage.get(op.operands[0].name, op.operands[0].name)] > number
        and not any(v.name in used for v in op.results)
    }
    return (*(op for n, op in enumerate(ops) if n not in late), *(ops[n] for n in sorted(late)))


def _is_view(op: Op) -> bool:
    entry = lookup(op.name, op.location)
    return Trait.VIEW in entry.traits or Trait.MAY_SHARE in entry.traits or entry.is_identity(op.operands, op.results)
