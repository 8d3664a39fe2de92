"""In-place ops in an exported graph: which of them may be written as ops that give a new value.

That is so when nothing else that shares the tensor's memory is used afterwards. A graph's nodes carry fake tensors
whose storages are shared as those of the real tensors are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError, UnsupportedOpError

if TYPE_CHECKING:
    from torch.fx import Node


def is_in_place(target: Any) -> bool:
    """Whether an ATen op writes to its first argument."""
    schema = getattr(target, "_schema", None)
    return bool(schema and schema.is_mutable and "detach_" not in schema.name)


def check_in_place(node: Node, constant: bool, location: str) -> None:
    """Raise unless in-place `node` can be written as an op that gives a new value.

    `ImportModelError` where it changes an input, a parameter or a buffer; `UnsupportedOpError` where another view of
    the same memory is used later. A `constant` op runs on real memory, where other views are no concern.
    """
    target = node.args[0]
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    name = str(node.target).removeprefix("aten.")
    for other in node.graph.nodes:
        if order[other] >= order[node] or not _share(other, target):
            continue
        if other.op == "placeholder":
            raise ImportModelError(
                f"the model changes {other.name} in place (aten.{name}), which a program cannot do",
                location,
                "work on a copy: x = x.clone()",
            )
        if other is not target and not constant and any(order[user] > order[node] for user in other.users):
            raise UnsupportedOpError(
                f"aten.{name} changes memory that is used later through another view", location, "write it out of place"
            )


def _share(a: Any, b: Any) -> bool:
    if a is b:
        return True
    x, y = a.meta.get("val"), b.meta.get("val")
    if not (hasattr(x, "untyped_storage") and hasattr(y, "untyped_storage")):
        return False
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)
