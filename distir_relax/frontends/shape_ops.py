"""Ops on shapes that a model's own program runs beside those that compute.

An ONNX program computes the sizes of a reshape by ops, `Shape`, `Gather`, `Concat`. They are folded at import, so no
rank runs them; a runtime that executes the program op by op does. Where a profile prices them
(`Profile.shape_op`), they stand in a simulated program as ops ``shape_ops {count}``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.imported_model import Imported
from distir_relax.ir import Op, Value
from distir_relax.support.torch_compat import graph_op

if TYPE_CHECKING:
    import torch

SUFFIX = ".shape_ops"


def annotate_shape_ops(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return `x`, and note that the program that this model stands for runs `count` ops on shapes here.

    Only simulations on a profile with a `shape_op` take notice. Raises `ImportModelError` for a negative count.
    """
    import torch

    if count < 0:
        raise ImportModelError(f"expected a number of ops on shapes of at least 0, found {count}")
    if not torch.compiler.is_exporting():
        return x
    result: torch.Tensor = custom_op()(x, count)
    return result


def is_shape_ops(target: Any) -> bool:
    """Whether the target of a node of an exported graph is the op of `annotate_shape_ops`."""
    return str(target) == "distir.shape_ops.default"


@cache
def custom_op() -> Any:
    """Return the op of `annotate_shape_ops` in an exported graph: ``distir::shape_ops``, of a tensor and a number."""
    import torch

    schema = "(Tensor x, int count) -> Tensor"
    op = graph_op("shape_ops", schema, lambda x, count: x.clone(), lambda x, count: torch.empty_like(x))
    op.register_autograd(lambda context, gradient: (gradient, None))
    return op


def with_shape_ops(imported: Imported) -> Imported:
    """Return the model with an op ``shape_ops`` after each value for which it counts some (`Imported.shape_ops`)."""
    counts = imported.shape_ops
    if not counts:
        return imported
    module, main = imported.module, imported.module.main
    renamed: dict[str, Value] = {}
    scopes = dict(imported.scopes)
    ops: list[Op] = []

    def count_at(value: Value, where: str) -> None:
        if counts.get(value.name):
            result = renamed[value.name] = replace(value, name=value.name + SUFFIX)
            ops.append(Op("shape_ops", (value,), (result,), {"count": counts[value.name]}, where))
            if value.name in scopes:
                scopes[result.name] = scopes[value.name]

    for item in main.inputs:
        count_at(item.value, item.location)
    for op in main.ops:
        ops.append(replace(op, operands=tuple(renamed.get(v.name, v) for v in op.operands)))
        for value in op.results:
            count_at(value, op.location)
    outputs = tuple(replace(item, value=renamed.get(item.value.name, item.value)) for item in main.outputs)
    changed = replace(main, ops=tuple(ops), outputs=outputs)
    functions = (changed, *(f for f in module.functions if f.name != main.name))
    return replace(imported, module=replace(module, functions=functions), scopes=scopes, shape_ops={})
