"""`annotate_sharding`: annotate a tensor inside a model.

Inputs and parameters can also be annotated by name from outside of it (`sharding.named_annotations`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.layout import DeviceMesh, Symbol, as_mesh, print_placements, size_of
from distir_relax.layout.validate import validate_annotation
from distir_relax.support.torch_compat import graph_op

if TYPE_CHECKING:
    import torch


def annotate_sharding(x: torch.Tensor, mesh: DeviceMesh | int | Sequence[int], placement: object) -> torch.Tensor:
    """Annotate `x` with a `placement` on `mesh`: a mesh, its shape, or its number of devices.

    `placement` is text (``"S[0]"``, ``"S[1: 64|63]"``, on a 2-D mesh ``"S[0], R"``), a placement object of ours or of
    torch, or a list of those. Returns `x`: an annotation has no effect until the model is compiled.

    Raises `PlacementError` with the caller's line if the text is not a placement, does not fit `x` or `mesh`, or is
    ``At[i]``.
    """
    import torch

    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return x
    # The direct caller's frame is the user's code.
    caller = sys._getframe(1)
    where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    device_mesh = as_mesh(mesh)
    # While a model is exported, symbolic dims have torch's own sizes, which stand for any number.
    shape = tuple(n if isinstance(n, int) else size_of(Symbol(f"dim{i}")) for i, n in enumerate(x.shape))
    text = print_placements(validate_annotation(placement, device_mesh, shape, where))
    if not torch.compiler.is_exporting():
        return x
    result: torch.Tensor = custom_op()(x, list(device_mesh.shape), list(device_mesh.axes), text, where)
    return result


def is_mark(target: Any) -> bool:
    """Whether the target of a node of an exported graph is the op of `annotate_sharding`."""
    return str(target) == "distir.annotate_sharding.default"


@cache
def custom_op() -> Any:
    """Return the op of `annotate_sharding` in an exported graph: ``distir::annotate_sharding``.

    Its arguments are the tensor, the mesh's shape and axis names, the placements as text, and the user's file:line.
    """
    import torch

    schema = "(Tensor x, int[] mesh_shape, str[] mesh_axes, str placements, str location) -> Tensor"

    def mark(x: torch.Tensor, mesh_shape: Any, mesh_axes: Any, placements: str, location: str) -> torch.Tensor:
        return x.clone()

    op = graph_op("annotate_sharding", schema, mark, lambda x, *described: torch.empty_like(x))
    op.register_autograd(lambda context, gradient: (gradient, None, None, None, None))
    return op
