"""Functionalization of exported programs: in-place writes become new values.

A write through a view (``x[:, 1:] = y``) changes every other view of the same memory. torch's own functionalization
handles this; it costs about as much as the export, so it only runs if a write is visible through another name. Other
writes (``relu_`` of a fresh tensor) are converted to ops that return a new value.

`annotate_sharding` returns its operand, which no op of an exported graph may do: its op copies. Here the result counts
as an alias of the operand.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_in_stack
from distir_relax.sharding.annotate import is_mark
from distir_relax.support.torch_compat import COMPOSITE_OPS, IS_COMPOSITE, private, replaced

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import OutputSpec
    from torch.fx import Graph, Node

_MUTATED_CONSTANT = re.compile(r"Constant (\S+) is mutated in the forward method")


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return `program`, or an equal one in which no write is visible through another name of the same memory.

    Mutated buffers and inputs are then outputs of the program, by its `graph_signature`. `program` must not call
    subgraphs. Raises `ImportModelError` for an annotated tensor with a write that cannot be functionalized.
    """
    import torch

    writes = list(_writes(program.graph))
    if not writes:
        return program
    aliases = _Aliases(program.graph)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    last_use = {used: i for node, i in order.items() for used in node.all_input_nodes}
    if not any(_is_visible(write, aliases, order, last_use) for write in writes):
        return program
    marks = _make_annotations_writes(program.graph, writes, aliases)
    program.graph_module.recompile()
    try:
        # The program only has values, whether or not the model requires gradients; without them more writes are valid.
        with torch.no_grad(), warnings.catch_warnings(), replaced(COMPOSITE_OPS, lambda: _composites(program)):
            # Torch copies its own trees in a way that it says is deprecated.
            warnings.simplefilter("ignore", FutureWarning)
            functionalized: ExportedProgram = program.run_decompositions({})
    except Exception as error:  # torch raises errors of many types for unsupported writes
        raise _unsupported_write(program, marks, error) from error
    return functionalized


def _composites(program: ExportedProgram) -> list[Any]:
    """Return the ops of a program that torch could decompose into others: these stay as they are."""
    is_composite = private(IS_COMPOSITE)
    targets = {node.target for node in program.graph.nodes if hasattr(node.target, "_schema")}
    return [target for target in targets if is_composite(target)]


def mutated_state(program: ExportedProgram) -> set[str]:
    """Return the names of the buffers and parameters that a functionalized `program` gives new values."""
    return {str(spec.target) for spec in program.graph_signature.output_specs if is_state_mutation(spec)}


def is_state_mutation(spec: OutputSpec) -> bool:
    """Return whether an output of a program is the new value of a buffer or a parameter."""
    from torch.export.graph_signature import OutputKind

    return spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


def mutated_inputs(program: ExportedProgram) -> set[str]:
    """Return the names of the placeholders of a flat `program` whose memory it writes to."""
    writes = list(_writes(program.graph))
    if not writes:
        return set()
    aliases = _Aliases(program.graph)
    targets = [used for write in writes for used in _mutated_arguments(write)]
    inputs = (node for node in program.graph.nodes if node.op == "placeholder")
    return {node.name for node in inputs if any(aliases.may_alias(node, used) for used in targets)}


def is_in_place(target: Any) -> bool:
    """Return whether an ATen op writes to its first argument."""
    schema = getattr(target, "_schema", None)
    return bool(schema and schema.is_mutable and "detach_" not in schema.name)


def _writes(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function" and is_in_place(node.target))


class _Aliases:
    """Alias analysis of a graph's nodes, including tensors and their annotated results."""

    def __init__(self, graph: Graph) -> None:
        self._alias_of: dict[int, int] = {}
        for node in graph.nodes:
            if is_mark(node.target) or _returns_itself(node):
                annotated, operand = self._storage(node), self._storage(node.args[0])
                if annotated is not None and operand is not None and annotated != operand:
                    self._alias_of[annotated] = operand

    def may_alias(self, a: Any, b: Any) -> bool:
        """Return whether two nodes, or a node and another argument, may share memory."""
        if a is b:
            return True
        x, y = self._storage(a), self._storage(b)
        return x is not None and y is not None and (x == y or -1 in (x, y))

    def _storage(self, node: Any) -> int | None:
        """Return the storage of a node; None if it is not a tensor, -1 if unknown."""
        val = getattr(node, "meta", {}).get("val")
        if val is None or not hasattr(val, "untyped_storage"):
            return None
        try:
            storage: int = val.untyped_storage()._cdata
        except NotImplementedError:
            # Tensors of torch.vmap have no accessible storage.
            return -1
        while storage in self._alias_of:
            storage = self._alias_of[storage]
        return storage


def _returns_itself(node: Node) -> bool:
    """Return whether a node converts a tensor to its own dtype: an alias, except in fake tensors."""
    if not str(node.target).startswith("aten.to.") or node.kwargs.get("copy"):
        return False
    before, after = (getattr(n, "meta", {}).get("val") for n in (node.args[0], node))
    return before is not None and after is not None and (before.dtype, before.device) == (after.dtype, after.device)


def _is_visible(write: Node, aliases: _Aliases, order: Mapping[Node, int], last_use: Mapping[Node, int]) -> bool:
    """Return whether memory that `write` changes is an input, or is used afterwards through another node.

    `order` numbers all nodes, `last_use` has the number of each node's last user.
    """
    if not _writes_only_first(write):
        return True
    changed = write.args[0]
    for other, number in order.items():
        if number >= order[write]:
            return False
        is_used = other is not changed and last_use.get(other, -1) >= order[write]
        if (other.op == "placeholder" or is_used) and aliases.may_alias(other, changed):
            return True
    return False


def _writes_only_first(node: Node) -> bool:
    return _mutated_arguments(node) == [node.args[0]]


def _mutated_arguments(node: Node) -> list[Any]:
    """Return the arguments that an op writes to, with lists flattened."""
    arguments: list[Any] = []
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            arguments += value if isinstance(value, (list, tuple)) else [value]
    return arguments


def _make_annotations_writes(graph: Graph, writes: list[Node], aliases: _Aliases) -> list[Node]:
    """Turn annotations of mutated memory into writes of the annotated tensor to the operand; return the annotations.

    All aliases then hold the annotated tensor, as in eager execution.
    """
    import torch

    marks: list[Any] = []
    for mark in [node for node in graph.nodes if is_mark(node.target)]:
        if any(aliases.may_alias(mark, node) for write in writes for node in _mutated_arguments(write)):
            with graph.inserting_after(mark):
                copy = graph.call_function(torch.ops.aten.copy_.default, (mark.args[0], mark))
            copy.meta = dict(mark.meta)
            users = [user for user in mark.users if user is not copy]
            for user in users:
                user.replace_input_with(mark, mark.args[0])
            marks.append(mark)
    return marks


def _unsupported_write(program: ExportedProgram, marks: list[Node], error: Exception) -> ImportModelError:
    """Return the user-level error for torch's error about an unsupported write."""
    cause = next((line for line in str(error).splitlines() if line.strip()), "no message")
    match = _MUTATED_CONSTANT.match(cause)
    if match:
        return ImportModelError(
            f"the model writes to its attribute {match[1]!r}, a tensor that is not a buffer",
            _first_write(program, match[1]),
            "register it: self.register_buffer(name, tensor)",
        )
    return ImportModelError(
        f"the model writes to memory in a way that torch cannot functionalize: {cause}",
        str(marks[0].args[4]) if marks else "",
        "annotate a copy: annotate_sharding(x.clone(), ...)" if marks else "make a new tensor instead: y = y + 1",
    )


def _first_write(program: ExportedProgram, constant: str) -> str:
    aliases = _Aliases(program.graph)
    names = {spec.arg.name for spec in program.graph_signature.input_specs if spec.target == constant}
    inputs = [node for node in program.graph.nodes if node.name in names]
    for write in _writes(program.graph):
        if any(aliases.may_alias(node, used) for node in inputs for used in _mutated_arguments(write)):
            return location_in_stack(write.meta.get("stack_trace"))
    return ""
