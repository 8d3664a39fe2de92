"""Shardings of a torch model in the words of other libraries, as placements of its parameters by name.

======================================  ==================================================================
``"tp_plan"``                           the plan of a transformers model, ``model.tp_plan``
``{"layers.*.q_proj": "colwise"}``      a style of transformers, for a module or a parameter
``{"layers.*.q_proj": ColwiseParallel()}``  a style of `torch.distributed.tensor.parallel.parallelize_module`
``{"layers.*.q_proj.weight": Shard(0)}``    a placement of torch, or one for each axis of the mesh
``{"layers.*.q_proj.weight": P("tp")}``     a `PartitionSpec` of JAX: an axis of the mesh for each dim
======================================  ==================================================================

A style says which part of a weight a device has. It also says where its authors communicate; here propagation does,
so styles that say nothing of weights, such as ``sequence_parallel``, leave them whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from distir_relax.errors import AnnotationError
from distir_relax.layout import Cut, DeviceMesh, Placement, R, Segment, Shard, print_placements
from distir_relax.layout.partition import balanced

if TYPE_CHECKING:
    import torch

TP_PLAN = "tp_plan"
"""The shardings that a model of transformers has itself."""

Split = Callable[[int, bool], "int | None"]
"""Returns the dim of a parameter that is split, from its number of dims and whether it is of an embedding."""


@dataclass(frozen=True)
class _Style:
    """How a style splits the parameters of a module: along `dim`, each of `parts` equal parts by itself."""

    dim: Split
    parts: int = 1


def _columns(dims: int, is_embedding: bool) -> int | None:
    """The outputs of a linear layer, and the biases of these; the vectors of an embedding."""
    return dims - 1 if is_embedding or dims == 1 else dims - 2


def _rows(dims: int, is_embedding: bool) -> int | None:
    """The inputs of a linear layer, whose bias is whole; the words of an embedding."""
    return 0 if is_embedding else dims - 1 if dims > 1 else None


def _first(dims: int, is_embedding: bool) -> int | None:
    return 0


def _whole(dims: int, is_embedding: bool) -> int | None:
    return None


_WHOLE = _Style(_whole)
_STYLES: Mapping[str, _Style] = {
    "colwise": _Style(_columns), "colwise_rep": _Style(_columns), "colwise_gather_output": _Style(_columns),
    "rowwise": _Style(_rows), "rowwise_rep": _Style(_rows), "rowwise_split_input": _Style(_rows),
    "embedding_rowwise": _Style(_rows), "embedding_colwise": _Style(_columns),
    "packed_colwise": _Style(_columns, 2), "packed_rowwise": _Style(_rows, 2),
    "grouped_gemm": _Style(_first),
    **dict.fromkeys(
        (
            "replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce", "mla_kv_a_proj",
            "moe_tp_experts", "moe_identity_expert", "local_params", "ep_dispatch_experts",
        ),
        _WHOLE,
    ),
    # Classes of torch.distributed.tensor.parallel.
    "ColwiseParallel": _Style(_columns), "RowwiseParallel": _Style(_rows),
    **dict.fromkeys(
        ("SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"), _WHOLE
    ),
}  # fmt: skip
"""The styles of transformers by name, and those of torch by class."""


def is_translated(shardings: object) -> bool:
    """Return whether shardings are in the words of other libraries, so that `shardings_by_name` translates them."""
    if isinstance(shardings, str):
        return shardings == TP_PLAN
    return isinstance(shardings, Mapping) and not all(map(_is_text, shardings.values()))


def shardings_by_name(shardings: Any, model: Any, mesh: DeviceMesh, axis: int) -> dict[str, str]:
    """Return placements on `mesh` by parameter, or by pattern if they are written in our words already.

    Styles, and single placements of torch on a mesh of several axes, split along the mesh axis with number `axis`.

    Raises `AnnotationError` for a model without a plan, for a rule, not of a plan, that matches no module and no
    parameter, for an unknown style, and a placement that the mesh or the parameter has no room for.
    """
    named = _named_parameters(model)
    rules = _tp_plan(model) if shardings == TP_PLAN else shardings
    result = {pattern: value for pattern, value in rules.items() if _is_text(value)}
    of_modules: dict[str, str] = {}
    for pattern, value in rules.items():
        if _is_text(value):
            continue
        own = [name for name in named if fnmatchcase(name, pattern)]
        below = [name for name in named if fnmatchcase(name.rpartition(".")[0], pattern)]
        if (
            shardings != TP_PLAN
            and not own
            and not below
            and not any(fnmatchcase(path, pattern) for path, _ in model.named_modules())
        ):
            raise _no_match(pattern, named)
        for found, names in ((result, own), (of_modules, below)):
            for name in names:
                parameter, is_embedding = named[name]
                where, shape = f'shardings["{pattern}"], {name}', tuple(parameter.shape)
                found[name] = print_placements(_placements(value, shape, is_embedding, mesh, axis, where))
    # A family's plan has rules for layers that some of its models lack. A parameter's rule precedes its module's.
    return of_modules | result


def _placements(
    value: Any, shape: Sequence[int], is_embedding: bool, mesh: DeviceMesh, axis: int, where: str
) -> tuple[Placement, ...]:
    if type(value).__name__ == "PartitionSpec":
        return _of_jax(value, len(shape), mesh, where)
    if isinstance(value, (list, tuple)) or _is_torch_placement(value):
        return _of_torch(value if isinstance(value, (list, tuple)) else [value], mesh, axis, where)
    style = _STYLES.get(value if isinstance(value, str) else type(value).__name__)
    if style is None:
        raise AnnotationError(
            f"expected a placement, a style of transformers or torch, or a PartitionSpec, found {value!r}", where,
            f"known styles are {', '.join(_STYLES)}",
        )  # fmt: skip
    dim = style.dim(len(shape), is_embedding)
    if dim is None or mesh.shape[axis] == 1:
        return _on_axis(R, mesh, axis)
    if style.parts == 1:
        return _on_axis(Shard(dim), mesh, axis)
    if shape[dim] % style.parts:
        raise AnnotationError(f"expected {style.parts} equal parts of dim {dim} to split, found {shape[dim]}", where)
    sizes = balanced(shape[dim] // style.parts, mesh.shape[axis])
    return _on_axis(Shard(dim, Cut((Segment(style.parts, tuple(sizes)),))), mesh, axis)


def _on_axis(placement: Placement, mesh: DeviceMesh, axis: int) -> tuple[Placement, ...]:
    return tuple(placement if number == axis else R for number in range(len(mesh.shape)))


def _of_torch(placements: Sequence[Any], mesh: DeviceMesh, axis: int, where: str) -> tuple[Placement, ...]:
    """Return placements of torch on our mesh: one for each axis, or one for `axis`."""
    for placement in placements:
        is_known = _is_torch_placement(placement) and (placement.is_shard() or placement.is_replicate())
        if not is_known or type(placement).__name__ == "_StridedShard":
            raise AnnotationError(f"expected Shard(dim) or Replicate() for a parameter, found {placement}", where)
    ours = [Shard(placement.dim) if placement.is_shard() else R for placement in placements]
    if len(ours) == 1:
        return _on_axis(ours[0], mesh, axis)
    if len(ours) != len(mesh.shape):
        raise AnnotationError(f"expected a placement for each axis of {mesh}, found {list(placements)}", where)
    return tuple(ours)


def _of_jax(spec: Iterable[Any], dims: int, mesh: DeviceMesh, where: str) -> tuple[Placement, ...]:
    """Return placements for the axes of a mesh from the axes of dims."""
    entries = list(spec)
    if len(entries) > dims:
        raise AnnotationError(f"expected at most {dims} axes for {dims} dims, found {spec}", where)
    found: dict[str, Placement] = {}
    for dim, names in enumerate(entries):
        for name in (names,) if isinstance(names, str) else names or ():
            if name not in mesh.axes:
                raise AnnotationError(f"expected axes of {mesh}, found {name!r} in {spec}", where)
            found[name] = Shard(dim)
    return tuple(found.get(name, R) for name in mesh.axes)


def _tp_plan(model: Any) -> Mapping[str, str]:
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise AnnotationError(
            'expected a model with a tp_plan for shardings="tp_plan", found none', type(model).__name__,
            "give a strategy such as 1/2/1/1, which needs no plan",
        )  # fmt: skip
    return dict(plan)


def _named_parameters(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return the parameters by all of their names, and whether each is of an embedding."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            is_embedding = hasattr(module, "num_embeddings")
            found[f"{path}.{name}" if path else name] = parameter, is_embedding
    return found


def _is_text(value: object) -> bool:
    """Return whether a value is a placement in our words."""
    return isinstance(value, str) and value not in _STYLES


def _is_torch_placement(value: object) -> bool:
    return hasattr(value, "is_shard") and hasattr(value, "is_replicate")


def _no_match(pattern: str, names: Iterable[str]) -> AnnotationError:
    closest = difflib.get_close_matches(pattern, [name.rpartition(".")[0] for name in names], n=3, cutoff=0.4)
    return AnnotationError(
        f"the rule {pattern!r} matches no module and no parameter of the model", f'shardings["{pattern}"]',
        f"the nearest modules are {', '.join(dict.fromkeys(closest))}" if closest else "",
    )  # fmt: skip
