"""Writes to running statistics that the schema of an ATen op hides, rewritten as ops whose schema has them.

`batch_norm` and `instance_norm` update the statistics that they take as if these were plain operands. An exported batch
norm shows a write only by the counter of `torch.nn.BatchNorm*d`, which `torch.nn.functional.batch_norm` lacks, and
torch's functionalization never finds the write of an instance norm.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from distir_relax.support.torch_compat import private

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node


def expose_writes(program: ExportedProgram) -> None:
    """Rewrite the norms of a flat `program` that update running statistics, in place."""
    import torch

    aten, graph = torch.ops.aten, program.graph
    for node in list(graph.nodes):
        if node.target not in (aten.batch_norm.default, aten.instance_norm.default):
            continue
        mean, uses_batch = node.args[3], node.args[5]
        if mean is None or not uses_batch:
            continue
        with graph.inserting_before(node):
            if node.target is aten.batch_norm.default:
                _replace_batch_norm(graph, node)
            else:
                _update_instance_statistics(graph, node)
    program.graph_module.recompile()


def _replace_batch_norm(graph: Graph, node: Node) -> None:
    # The last argument allows cuDNN.
    results = _call(graph, node, private("torch.ops.aten._native_batch_norm_legit.default"), *node.args[:-1])
    normalized = _call(graph, node, operator.getitem, results, 0)
    normalized.meta = dict(node.meta)
    node.replace_all_uses_with(normalized)
    graph.erase_node(node)


def _update_instance_statistics(graph: Graph, node: Node) -> None:
    """Move the statistics towards the means over the samples of each sample's mean and unbiased variance."""
    import torch

    aten = torch.ops.aten
    x, _, _, *running, _, momentum, _, _ = node.args
    dims = list(range(2, x.meta["val"].dim()))  # type: ignore[union-attr]
    reductions: tuple[tuple[Any, dict[str, Any]], ...] = ((aten.mean.dim, {}), (aten.var.correction, {"correction": 1}))
    for statistics, (reduce, options) in zip(running, reductions, strict=True):
        wide = _call(graph, node, aten.to.dtype, x, statistics.meta["val"].dtype)  # type: ignore[union-attr]
        of_samples = _call(graph, node, reduce, wide, dims, **options)
        present = _call(graph, node, aten.mean.dim, of_samples, [0])
        new = _call(graph, node, aten.lerp.Scalar, statistics, present, momentum)
        _call(graph, node, aten.copy_.default, statistics, new)
    node.args = (*node.args[:3], None, None, *node.args[5:])


def _call(graph: Graph, origin: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call that is at the place of `origin` in the model; types are those of functionalization."""
    call = graph.call_function(target, args, kwargs)
    call.meta = {key: value for key, value in origin.meta.items() if key != "val"}
    return call
