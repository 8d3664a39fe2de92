"""Annotations in a model: `annotate_sharding` marks a value where it stands.

From outside, `sharding.apply` marks inputs and parameters by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.layout import DeviceMesh, as_mesh, print_placements
from distir_relax.layout.validate import fit_annotation

if TYPE_CHECKING:
    import torch


def annotate_sharding(x: torch.Tensor, mesh: DeviceMesh | int | Sequence[int], placement: object) -> torch.Tensor:
    """Mark `x` to lie on `mesh` (or on as many devices, or a mesh of this shape) as `placement` says, axis by axis.

    `placement` is text (``"S[0]"``, ``"S[1: 64|63]"``, on a 2-D mesh ``"S[0], R"``), a placement object of ours or of
    torch, or a list of those. `x` itself is returned: the mark does nothing until the model is compiled.

    Raises `PlacementError` at the caller's line when the text is no placement, does not fit `x` or `mesh`, or is
    ``At[i]``.
    """
    import torch

    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return x
    # A frame more than this one would be a library's, not the user's.
    caller = sys._getframe(1)
    where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    grid = as_mesh(mesh)
    text = print_placements(fit_annotation(placement, grid, tuple(x.shape), where))
    if not torch.compiler.is_exporting():
        return x
    marked: torch.Tensor = custom_op()(x, list(grid.shape), list(grid.axes), text, where)
    return marked


def is_mark(target: Any) -> bool:
    """Whether what a node of an exported graph calls is the op that stands for `annotate_sharding`."""
    return str(target) == "distir.annotate_sharding.default"


@cache
def custom_op() -> Any:
    """The op that stands for `annotate_sharding` in an exported graph: ``distir::annotate_sharding``.

    Its arguments are the tensor, the mesh's shape and axis names, the placements as text, and the user's file:line.
    """
    import torch

    schema = "(Tensor x, int[] mesh_shape, str[] mesh_axes, str placements, str location) -> Tensor"

    def mark(x: torch.Tensor, mesh_shape: Any, mesh_axes: Any, placements: str, location: str) -> torch.Tensor:
        return x.clone()

    op = torch.library.custom_op("distir::annotate_sharding", mark, mutates_args=(), schema=schema)
    op.register_fake(lambda x, mesh_shape, mesh_axes, placements, location: torch.empty_like(x))
    op.register_autograd(lambda context, gradient: (gradient, None, None, None, None))
    return op
