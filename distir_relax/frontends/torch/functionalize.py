"""Exported programs that write into memory, as programs that only make new values.

A write through a view (``x[:, 1:] = y``) changes every other view of the same memory. torch's own functionalisation
follows them; it costs about as much as the export, so that a program is only taken through it where a write could be
seen. Other writes (``relu_`` of a fresh tensor) are read as ops that give a new value.

`annotate_sharding` gives its operand back, which no op of an exported graph may do: the op that stands for it copies.
Here it counts as another name of the same memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_in_stack
from distir_relax.sharding.annotate import is_mark

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

_WRITTEN_CONSTANT = re.compile(r"Constant (\S+) is mutated in the forward method")


def functional(program: ExportedProgram) -> ExportedProgram:
    """`program`, or one equal to it in which no write is seen through another name of the same memory.

    Buffers and inputs that the model changes are then outputs of the program, by its `graph_signature`. `program` must
    be flat. Raises `ImportModelError` for an annotated tensor that is written to and cannot be.
    """
    import torch

    writes = list(_writes(program.graph))
    if not writes:
        return program
    memory = _Memory(program.graph)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    last_use = {used: i for node, i in order.items() for used in node.all_input_nodes}
    if not any(_is_seen(write, memory, order, last_use) for write in writes):
        return program
    marks = _write_marks(program.graph, writes, memory)
    program.graph_module.recompile()
    try:
        # The program is one of values, whether or not the model asks for gradients; without them it may write more.
        with torch.no_grad():
            changed: ExportedProgram = program.run_decompositions({})
    except Exception as error:  # torch raises errors of many types for what it cannot follow
        raise _refused(program, marks, error) from error
    return changed


def changed_buffers(program: ExportedProgram) -> set[str]:
    """The names of the buffers that a functional `program` gives new values."""
    from torch.export.graph_signature import OutputKind

    specs = program.graph_signature.output_specs
    return {str(spec.target) for spec in specs if spec.kind is OutputKind.BUFFER_MUTATION}


def written_inputs(program: ExportedProgram) -> set[str]:
    """The names of the placeholders of a flat `program` whose memory it writes to."""
    writes = list(_writes(program.graph))
    if not writes:
        return set()
    memory = _Memory(program.graph)
    targets = [used for write in writes for used in _written(write)]
    inputs = (node for node in program.graph.nodes if node.op == "placeholder")
    return {node.name for node in inputs if any(memory.shared(node, used) for used in targets)}


def is_in_place(target: Any) -> bool:
    """Whether an ATen op writes to its first argument."""
    schema = getattr(target, "_schema", None)
    return bool(schema and schema.is_mutable and "detach_" not in schema.name)


def _writes(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function" and is_in_place(node.target))


class _Memory:
    """Which nodes of a graph are names of one memory, a tensor and its annotated self included."""

    def __init__(self, graph: Graph) -> None:
        self._same: dict[int, int] = {}
        for node in graph.nodes:
            if is_mark(node.target) or _returns_itself(node):
                annotated, given = self._of(node), self._of(node.args[0])
                if annotated is not None and given is not None and annotated != given:
                    self._same[annotated] = given

    def shared(self, a: Any, b: Any) -> bool:
        """Whether two nodes, or a node and an argument that is none, may be names of one memory."""
        if a is b:
            return True
        x, y = self._of(a), self._of(b)
        return x is not None and y is not None and (x == y or -1 in (x, y))

    def _of(self, node: Any) -> int | None:
        """The memory of a node; None where it is no tensor, -1 where torch does not tell."""
        val = getattr(node, "meta", {}).get("val")
        if val is None or not hasattr(val, "untyped_storage"):
            return None
        try:
            found: int = val.untyped_storage()._cdata
        except NotImplementedError:
            # Tensors of torch.vmap do not tell.
            return -1
        while found in self._same:
            found = self._same[found]
        return found


def _returns_itself(node: Node) -> bool:
    """Whether a node converts a tensor to its own dtype: the result is the tensor, but no longer in fake tensors."""
    if not str(node.target).startswith("aten.to.") or node.kwargs.get("copy"):
        return False
    before, after = (getattr(n, "meta", {}).get("val") for n in (node.args[0], node))
    return before is not None and after is not None and (before.dtype, before.device) == (after.dtype, after.device)


def _is_seen(write: Node, memory: _Memory, order: Mapping[Node, int], last_use: Mapping[Node, int]) -> bool:
    """Whether memory that `write` changes is an input, or is used afterwards through another node.

    `order` numbers all nodes, `last_use` says at which of them each is used for the last time.
    """
    if not _writes_only_its_first(write):
        return True
    changed = write.args[0]
    for other, number in order.items():
        if number >= order[write]:
            return False
        is_used = other is not changed and last_use.get(other, -1) >= order[write]
        if (other.op == "placeholder" or is_used) and memory.shared(other, changed):
            return True
    return False


def _writes_only_its_first(node: Node) -> bool:
    return _written(node) == [node.args[0]]


def _written(node: Node) -> list[Any]:
    """The arguments that an op writes to; those of a list, one by one."""
    found: list[Any] = []
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += given if isinstance(given, (list, tuple)) else [given]
    return found


def _write_marks(graph: Graph, writes: list[Node], memory: _Memory) -> list[Node]:
    """Let annotations of memory that is written to be writes themselves: of the annotated tensor into what was given.

    All names of the memory then hold what is annotated, as they do where the model runs by itself. Gives the marks.
    """
    import torch

    marks: list[Any] = []
    for mark in [node for node in graph.nodes if is_mark(node.target)]:
        if any(memory.shared(mark, node) for write in writes for node in _written(write)):
            with graph.inserting_after(mark):
                copy = graph.call_function(torch.ops.aten.copy_.default, (mark.args[0], mark))
            copy.meta = dict(mark.meta)
            users = [user for user in mark.users if user is not copy]
            for user in users:
                user.replace_input_with(mark, mark.args[0])
            marks.append(mark)
    return marks


def _refused(program: ExportedProgram, marks: list[Node], error: Exception) -> ImportModelError:
    """What torch says of a write that it cannot follow, in the user's terms."""
    cause = next((line for line in str(error).splitlines() if line.strip()), "no message")
    written = _WRITTEN_CONSTANT.match(cause)
    if written:
        return ImportModelError(
            f"the model writes to its attribute {written[1]!r}, a tensor that is no buffer",
            _first_write(program, written[1]),
            "register it: self.register_buffer(name, tensor)",
        )
    return ImportModelError(
        f"the model writes into memory in a way that torch cannot follow: {cause}",
        str(marks[0].args[4]) if marks else "",
        "annotate a copy: annotate_sharding(x.clone(), ...)" if marks else "make a new tensor instead: y = y + 1",
    )


def _first_write(program: ExportedProgram, constant: str) -> str:
    memory = _Memory(program.graph)
    names = {spec.arg.name for spec in program.graph_signature.input_specs if spec.target == constant}
    inputs = [node for node in program.graph.nodes if node.name in names]
    for write in _writes(program.graph):
        if any(memory.shared(node, used) for node in inputs for used in _written(write)):
            return location_in_stack(write.meta.get("stack_trace"))
    return ""
