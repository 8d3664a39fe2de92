"""Annotations: the few placements that a user gives, from which all others follow.

In a model, `annotate_sharding` marks a value where it stands. From outside, `apply_shardings` marks inputs and
parameters by name.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from distir_relax.errors import AnnotationError, PlacementError
from distir_relax.ir import (
    DeviceMesh,
    Function,
    Module,
    Op,
    Placement,
    Shard,
    TensorType,
    Value,
    parse_placements,
    print_placements,
)
from distir_relax.sharding.cuts import reject_crossing

if TYPE_CHECKING:
    import torch


def annotate_sharding(x: torch.Tensor, mesh: DeviceMesh, placement: object) -> torch.Tensor:
    """Mark `x` to lie on `mesh` as `placement` says: one placement per mesh axis.

    `placement` is text (``"S[0]"``, ``"S[1: 64|63]"``, on a 2-D mesh ``"S[0], R"``), a placement object of ours or of
    torch, or a list of those. `x` itself is returned: the mark does nothing until the model is compiled.

    Raises `PlacementError` at the caller's line when the text is no placement, or does not fit `x` or `mesh`.
    """
    import torch

    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return x
    # A frame more than this one would be a library's, not the user's.
    caller = sys._getframe(1)
    where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    text = print_placements(fit_placements(placement, mesh, tuple(x.shape), where))
    if not torch.compiler.is_exporting():
        return x
    marked: torch.Tensor = custom_op()(x, list(mesh.shape), list(mesh.axes), text, where)
    return marked


def fit_placements(
    placement: object, mesh: DeviceMesh, shape: tuple[int, ...], where: str = ""
) -> tuple[Placement, ...]:
    """The placements that `placement` gives, checked against `mesh` and `shape`; negative dims are made positive.

    Raises `PlacementError` when they cannot be read, when there is not one per mesh axis, when one names a dim that
    is not there, when sizes do not add up to their dim, and when those of two axes that split one dim do not fit each
    other.
    """
    items = placement if isinstance(placement, (list, tuple)) else [placement]
    try:
        return _fit(", ".join(map(str, items)), mesh, shape)
    except PlacementError as error:
        raise PlacementError(error.message, where, error.hint) from None


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


class _Program(Protocol):
    """What `apply_shardings` needs of an imported model."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def module(self) -> Module: ...

    @property
    def names(self) -> Mapping[str, str]: ...


_P = TypeVar("_P", bound=_Program)


def apply_shardings(imported: _P, shardings: Mapping[str, str], mesh: DeviceMesh) -> _P:
    """The imported model with annotations on its inputs and parameters, by name.

    `shardings` leads from patterns (``"encoder.layer.*.dense.weight"``, with the wildcards of `fnmatch`) to
    placements. Raises `AnnotationError` for a pattern that matches nothing, for two patterns that disagree about
    one tensor, and for a mesh unlike that of the model's own annotations; `PlacementError` for a placement that does
    not fit.
    """
    if not shardings:
        return imported
    main = imported.module.main
    if any(known != mesh for known in imported.module.meshes):
        raise AnnotationError(
            f"expected one mesh for all annotations: shardings are for {mesh}, the model's own annotations for "
            f"{imported.module.meshes[0]}"
        )
    chosen: dict[str, tuple[str, str]] = {}
    types = {item.value.name: item.value.type for item in main.inputs}
    for pattern, text in shardings.items():
        where = f'shardings["{pattern}"]'
        matches = [name for name in imported.names if fnmatchcase(name, pattern)]
        if not matches:
            raise _no_match(pattern, imported.names)
        for name in matches:
            value = imported.names[name]
            kind = types[value]
            assert isinstance(kind, TensorType)
            placements = print_placements(fit_placements(text, mesh, kind.shape, f"{where}, {name}"))
            other, before = chosen.setdefault(value, (pattern, placements))
            if before != placements:
                raise AnnotationError(
                    f"{name} is matched by {other!r}, which says {before}, and by {pattern!r}, which says {placements}",
                    where,
                    "make one of the patterns narrower",
                )
    function = _mark_inputs(main, {value: (f'shardings["{p}"]', text) for value, (p, text) in chosen.items()})
    module = replace(imported.module, functions=(function, *imported.module.functions[1:]), meshes=(mesh,))
    return replace(imported, module=module)


@lru_cache(maxsize=4096)
def _fit(text: str, mesh: DeviceMesh, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    placements = parse_placements(text)
    if len(placements) != len(mesh.shape):
        axes = ", ".join(mesh.axes)
        raise PlacementError(
            f"expected one placement for each of the {len(mesh.shape)} mesh axes ({axes}), "
            f"found {len(placements)} in {text!r}",
            hint='separate them by commas: "S[0], R"',
        )
    fitted = tuple(
        _fit_shard(placement, mesh.shape[axis], shape) if isinstance(placement, Shard) else placement
        for axis, placement in enumerate(placements)
    )
    reject_crossing(fitted, "")
    return fitted


def _fit_shard(shard: Shard, ranks: int, shape: tuple[int, ...]) -> Shard:
    if not -len(shape) <= shard.dim < len(shape):
        dims = f"dims 0 to {len(shape) - 1}" if shape else "no dims"
        raise PlacementError(f"{shard} names dim {shard.dim}, but a tensor of shape {shape} has {dims}")
    shard = replace(shard, dim=shard.dim % len(shape))
    cut, size = shard.cut, shape[shard.dim]
    if cut and cut.ranks != ranks:
        raise PlacementError(f"{shard} lists {cut.ranks} sizes, but the mesh axis has {ranks} devices")
    if cut and cut.total != size:
        raise PlacementError(
            f"the sizes of {shard} add up to {cut.total}, but dim {shard.dim} of shape {shape} has {size}"
        )
    return shard


def _no_match(pattern: str, names: Iterable[str]) -> AnnotationError:
    known = list(names)
    near = difflib.get_close_matches(pattern.replace("*", "0"), known, n=3, cutoff=0.4)
    listed = ", ".join(near or known[:3])
    return AnnotationError(
        f"the pattern {pattern!r} matches no input and no parameter",
        f'shardings["{pattern}"]',
        f"the nearest names are {listed}" if near else f"the names are such as {listed}",
    )


def _mark_inputs(function: Function, marks: Mapping[str, tuple[str, str]]) -> Function:
    """The function with an annotate op on each marked input, which all that used the input use instead."""
    taken = {item.value.name for item in function.inputs}
    taken |= {result.name for op in function.ops for result in op.results}
    marked: dict[str, Value] = {}
    heads: list[Op] = []
    for item in function.inputs:
        if item.value.name not in marks:
            continue
        where, text = marks[item.value.name]
        name = f"{item.value.name}.sharded"
        while name in taken:
            name += "_"
        taken.add(name)
        marked[item.value.name] = Value(name, item.value.type)
        heads.append(Op("annotate_sharding", (item.value,), (marked[item.value.name],), {"placements": text}, where))
    ops = [replace(op, operands=tuple(marked.get(v.name, v) for v in op.operands)) for op in function.ops]
    outputs = [replace(o, value=marked.get(o.value.name, o.value)) for o in function.outputs]
    return replace(function, ops=(*heads, *ops), outputs=tuple(outputs))
