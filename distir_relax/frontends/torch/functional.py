"""Exported programs that write into memory, as programs that only make new values.

A write through a view (``x[:, 1:] = y``) changes every other view of the same memory. torch's own functionalisation
follows them; it costs about as much as the export, so that a program is only taken through it where a write could be
seen. Other writes (``relu_`` of a fresh tensor) are read as ops that give a new value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node


def functional(program: ExportedProgram) -> ExportedProgram:
    """`program`, or one equal to it in which no write is seen through another name of the same memory.

    Buffers and inputs that the model changes are then outputs of the program, by its `graph_signature`.
    """
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    last_use = {used: i for node, i in order.items() for used in node.all_input_nodes}
    if any(_is_seen(write, order, last_use) for write in _writes(program.graph)):
        changed: ExportedProgram = program.run_decompositions({})
        return changed
    return program


def changed_buffers(program: ExportedProgram) -> set[str]:
    """The names of the buffers that a functional `program` gives new values."""
    from torch.export.graph_signature import OutputKind

    specs = program.graph_signature.output_specs
    return {str(spec.target) for spec in specs if spec.kind is OutputKind.BUFFER_MUTATION}


def is_in_place(target: Any) -> bool:
    """Whether an ATen op writes to its first argument."""
    schema = getattr(target, "_schema", None)
    return bool(schema and schema.is_mutable and "detach_" not in schema.name)


def _writes(graph: Graph) -> Iterator[Node | None]:
    """The nodes that write into memory; None for those of a graph that another op calls."""
    for node in graph.nodes:
        if node.op == "call_function" and is_in_place(node.target):
            yield node
        elif node.op == "get_attr":
            inner = getattr(getattr(node.graph.owning_module, str(node.target), None), "graph", None)
            if inner is not None and any(True for _ in _writes(inner)):
                yield None


def _is_seen(write: Node | None, order: Mapping[Node, int], last_use: Mapping[Node, int]) -> bool:
    """Whether memory that `write` changes is an input, or is used afterwards through another node.

    `order` numbers all nodes, `last_use` says at which of them each is used for the last time.
    """
    if write is None or not _writes_only_its_first(write):
        return True
    changed = write.args[0]
    for other, number in order.items():
        if number >= order[write]:
            return False
        is_used = other is not changed and last_use.get(other, -1) >= order[write]
        if (other.op == "placeholder" or is_used) and _share(other, changed):
            return True
    return False


def _writes_only_its_first(node: Node) -> bool:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return written == [0]


def _share(a: Any, b: Any) -> bool:
    if a is b:
        return True
    x, y = a.meta.get("val"), b.meta.get("val")
    if not (hasattr(x, "untyped_storage") and hasattr(y, "untyped_storage")):
        return False
    try:
        return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)
    except NotImplementedError:
        # Tensors of torch.vmap do not tell.
        return True
