"""A model read in: its program, its data, and the way between the model's own call and named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distir_relax.ir import Function, Module, count_uses, live_ops
from distir_relax.support.units import count

if TYPE_CHECKING:
    import torch

Flatten = Callable[[tuple[Any, ...], Mapping[str, Any]], "dict[str, torch.Tensor]"]
Rebuild = Callable[["Mapping[str, torch.Tensor]"], Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """A module of the model during one call of it: its path, its class where that is known, and which call it is."""

    path: str
    kind: str = ""
    call: int = 0


@dataclass(frozen=True, repr=False)
class Imported:
    """What a frontend gives.

    `module` is a global-stage module with one function, ``main``; its meshes are those that annotations name.
    `tensors` holds the data of each parameter and constant input, by value name; parameters are the model's own
    storage until `snapshot`. `names` leads from every name a user may use for an input or parameter to its value
    name; tied parameters lead to one value. `unused` are the names of parameters that no result depends on.
    `flatten(args, kwargs)` gives a call's tensors by input name and raises `RunError` where the call is unlike the
    example; `rebuild(outputs)` gives tensors by output name back in the structure that the model returns. `values`
    leads from the model's own names of its tensors to value names, for a model that names them (ONNX). `written`
    leads from an output that is the new value of an input, which the model changes in place, to that input.
    `scopes` says for values in the calls of which modules they are made, outermost first. `places` is how many
    meshes the model names, all of one shape: the places of one. `arguments` are those of a model's call that may be
    given by position, in order, and `constants` the values of those that are no tensors, by name. `results` are the
    outputs that `rebuild` takes, where these are not all.
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

    def __repr__(self) -> str:
        return f"<imported {self.module!r}, data of {count(len(self.tensors), 'tensor')}>"


def snapshot(imported: Imported) -> Imported:
    """The same model with tensors of its own, where they have data: constants were computed from them as they are."""
    import torch

    tensors = {
        name: tensor if tensor.is_meta else tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in imported.tensors.items()
    }
    return replace(imported, tensors=tensors)


def live(function: Function) -> Function:
    """The function without ops and inputs that reach no output; the user's inputs all stay."""
    found = replace(function, ops=live_ops(function))
    used = count_uses(found)
    inputs = tuple(item for item in function.inputs if item.role == "input" or item.value.name in used)
    return replace(found, inputs=inputs)
