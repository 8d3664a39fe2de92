"""Imported models: program, data, and conversion between the model's call and named tensors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Origin
from distir_relax.errors import DistIRError
from distir_relax.ir import Function, Module, count_uses, live_ops
from distir_relax.support.units import count

if TYPE_CHECKING:
    import torch

Flatten = Callable[[tuple[Any, ...], Mapping[str, Any]], "dict[str, torch.Tensor]"]
Rebuild = Callable[["Mapping[str, torch.Tensor]"], Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """A module of the model during one call: its path, its class if known, and the number of the call."""

    path: str
    kind: str = ""
    call: int = 0


@dataclass(frozen=True, repr=False)
class Imported:
    """Result of a frontend.

    `module` is a global-stage module with one function, ``main``; its meshes are those of the annotations. `tensors`
    holds the data of each parameter and constant input, by value name; parameters are the model's own storage until
    `snapshot`. `names` maps every user-visible name of an input or parameter to its value name; tied parameters share a
    value. `unused` are the names of parameters without influence on a result. `flatten(args, kwargs)` returns a call's
    tensors by input name and raises `RunError` if the call differs from the example; `rebuild(outputs)` restores the
    structure of the model's result from tensors by output name. `values` maps the model's own tensor names to value
    names, for a model that has them (ONNX). `written` maps an output that is the new value of an input, which the model
    mutates, to that input. `scopes` maps values to the modules in whose calls they are computed, outermost first.
    `places` is the number of equal meshes that the model uses. `arguments` are the positional arguments of a model's
    call, in order, and `constants` the values of non-tensor arguments, by name. `results` are the outputs that
    `rebuild` takes, if not all. `shape_ops` has, by value, how many ops on shapes the model's own program runs after
    it, which are folded (`frontends.shape_ops`). `origin` says which model it is, for the manifest of a bundle.
    `fixed` are the names of the buffers and tensor attributes that the model reads and does not change, `digests` their
    SHA-256, for a training.
    """

    module: Module
    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, str]
    flatten: Flatten
    rebuild: Rebuild
    values: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[str, tuple[Frame, ...]] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    places: int = 1
    arguments: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ()
    shape_ops: Mapping[str, int] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    fixed: frozenset[str] = frozenset()
    digests: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<imported {self.module!r}, data of {count(len(self.tensors), 'tensor')}>"


def snapshot(imported: Imported) -> Imported:
    """Return the same model with copies of its tensors, except of those on the meta device."""
    import torch

    tensors = {
        name: tensor if tensor.is_meta else tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in imported.tensors.items()
    }
    return replace(imported, tensors=tensors)


def match_parameters(imported: Imported, patterns: Sequence[str], option: str, model: str = "") -> set[str]:
    """Return the values of the parameters of `model` whose names match a pattern (`fnmatch`) of an option.

    Raises `DistIRError` for a pattern that no parameter matches.
    """
    parameters = {item.value.name for item in imported.module.main.inputs if item.role == "parameter"}
    names = {name: value for name, value in imported.names.items() if value in parameters}
    matched: set[str] = set()
    for pattern in patterns:
        found = {value for name, value in names.items() if fnmatchcase(name, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern, names, 1)
            raise DistIRError(
                f"no parameter matches {pattern!r} of `{option}`", model,
                f"did you mean {near[0]!r}?" if near else f"parameters have names such as {next(iter(names), 'none')}",
            )  # fmt: skip
        matched |= found
    return matched


def eliminate_dead_ops(function: Function) -> Function:
    """Remove ops and inputs that reach no output; the user's inputs stay."""
    pruned = replace(function, ops=live_ops(function))
    used = count_uses(pruned)
    inputs = tuple(item for item in function.inputs if item.role == "input" or item.value.name in used)
    return replace(pruned, inputs=inputs)
