"""Inlining of the subgraphs that `torch.export` creates for code under disabled gradients or autocast."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, GraphModule, Node

# Number of arguments of such a call before the subgraph.
_CALLS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
AUTOCAST = "autocast"
"""The metadata of nodes under an autocast of their own: the dtype, and "" where it is disabled."""


def inline_subgraphs(program: ExportedProgram) -> None:
    """Inline the graphs that `program` calls, in place.

    A write is then visible wherever the memory is used. Nodes of a part under autocast have it in their metadata.
    """
    if _inline_calls(program.graph_module):
        program.graph_module.recompile()
        name_outputs(program)


def name_outputs(program: ExportedProgram) -> None:
    """Name the nodes that are the program's outputs in its signature, after they were replaced."""
    results: Any = program.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if hasattr(node, "name") and hasattr(spec.arg, "name"):
            spec.arg.name = node.name


def _inline_calls(module: GraphModule) -> bool:
    """Inline all calls of `module`; return whether there were any."""
    calls = [node for node in module.graph.nodes if getattr(node.target, "__name__", "") in _CALLS]
    for node in calls:
        _inline_call(module.graph, node)
    return bool(calls)


def _detach_results(graph: Graph) -> None:
    """Detach the results of code that runs without gradients."""
    import torch

    output: Any = graph.output_node()
    for node in dict.fromkeys(output.all_input_nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, torch.Tensor) or not val.is_floating_point():
            continue
        with graph.inserting_after(node):
            detached = graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta = dict(node.meta)
        output.replace_input_with(node, detached)


def _inline_call(graph: Graph, call: Node) -> None:
    name = call.target.__name__  # type: ignore[union-attr]
    count = _CALLS[name]
    reference: Any = call.args[count]
    subgraph = operator.attrgetter(reference.target)(graph.owning_module)
    _inline_calls(subgraph)
    if name == "wrap_with_autocast" and call.args[0] == "cpu":
        dtype = str(call.args[1]).removeprefix("torch.") if call.args[2] else ""
        for node in subgraph.graph.nodes:
            node.meta.setdefault(AUTOCAST, dtype)
    if name == "wrap_with_set_grad_enabled" and not call.args[0]:
        _detach_results(subgraph.graph)
    inputs = [node for node in subgraph.graph.nodes if node.op == "placeholder"]
    values: dict[Node, Any] = dict(zip(inputs, call.args[count + 1 :], strict=True))
    with graph.inserting_before(call):
        results = graph.graph_copy(subgraph.graph, values)
    for node in subgraph.graph.nodes:
        if node.op == "get_attr" and node in values:
            values[node].target = f"{reference.target}.{node.target}"
    if isinstance(results, (tuple, list)):
        for user in list(call.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    else:
        call.replace_all_uses_with(results)  # type: ignore[arg-type]
    graph.erase_node(call)
    if not reference.users:
        graph.erase_node(reference)
