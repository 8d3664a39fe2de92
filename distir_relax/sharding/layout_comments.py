"""Comments on values in the text of sharded programs."""

from __future__ import annotations

from collections.abc import Callable

from distir_relax.ir import Gather, Module, Reason, Value
from distir_relax.sharding.reshard_cost import list_reshards


def layout_comments(module: Module) -> Callable[[str, Value], str]:
    """Return a note function for `print_module`: reasons of layouts, reshard traffic, and implicit gathers."""
    parts_of: dict[tuple[str, str], list[str]] = {}
    for record in module.records:
        if isinstance(record, Reason):
            parts_of.setdefault((record.function, record.value), []).append(str(record))
    for reshard in list_reshards(module):
        parts_of.setdefault((reshard.function, reshard.result), []).append(str(reshard))
    for record in module.records:
        if isinstance(record, Gather):
            parts_of.setdefault((record.function, record.value), []).append("unasked")
    texts = {name: "; ".join(parts) for name, parts in parts_of.items()}
    return lambda function, value: texts.get((function, value.name), "")
