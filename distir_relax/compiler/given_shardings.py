"""Options whose `shardings` are in the words of other libraries, as placements by name."""

from __future__ import annotations

from typing import Any

from distir_relax.compiler.options import CompileOptions, complete
from distir_relax.errors import AnnotationError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch.other_shardings import is_translated, shardings_by_name
from distir_relax.layout import DeviceMesh, as_mesh
from distir_relax.strategies.strategy import as_strategy

_TENSOR_AXES = ("tensor", "tp", "model")
"""Names of the mesh axis that styles of weights are for; else it is the last one."""


def complete_for(options: CompileOptions, name: str, model: Any, imported: Imported) -> CompileOptions:
    """Return complete options for a model that was imported, whose shardings are by name.

    Parameters that its program does not use have none. Raises as `complete` and `shardings_by_name`.

    Raises `AnnotationError` for shardings in the words of other libraries without a mesh or a torch model.
    """
    completed = complete(options, name)
    shardings = completed["shardings"]
    if is_translated(shardings):
        mesh = _mesh(completed)
        if mesh is None:
            raise AnnotationError(f"expected a mesh for {_text(shardings)}, found none", hint="mesh=2 for 2 devices")
        if not hasattr(model, "named_modules"):
            raise AnnotationError(f"expected a torch.nn.Module for {_text(shardings)}, found {type(model).__name__}")
        axes = [number for number, axis in enumerate(mesh.axes) if axis in _TENSOR_AXES]
        named = shardings_by_name(shardings, model, mesh, axes[0] if axes else len(mesh.shape) - 1)
        completed["shardings"] = {key: text for key, text in named.items() if key not in imported.unused}
    return completed


def _mesh(options: CompileOptions) -> DeviceMesh | None:
    strategy, mesh = options["strategy"], options["mesh"]
    if strategy is not None:
        return as_strategy(strategy).mesh
    return None if mesh is None else as_mesh(mesh)


def _text(shardings: Any) -> str:
    return f'shardings="{shardings}"' if isinstance(shardings, str) else "styles and placements of other libraries"
