"""What is said beside each value in the text of a program of the sharded stage."""

from __future__ import annotations

from collections.abc import Callable

from distir_relax.ir import Gather, Module, Reason, Value
from distir_relax.sharding.reshard_cost import redistributions


def remarks(module: Module) -> Callable[[str, Value], str]:
    """For `print_module`: why a value lies so, what a `redistribute` sends, and whether nobody asked for it."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in module.records:
        if isinstance(record, Reason):
            found.setdefault((record.function, record.value), []).append(str(record))
    for moved in redistributions(module):
        found.setdefault((moved.function, moved.result), []).append(str(moved))
    for record in module.records:
        if isinstance(record, Gather):
            found.setdefault((record.function, record.value), []).append("unasked")
    texts = {name: "; ".join(parts) for name, parts in found.items()}
    return lambda function, value: texts.get((function, value.name), "")
