"""A model read in: its program, its data, and the way between the model's own call and named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.ir import Module

if TYPE_CHECKING:
    import torch

Flatten = Callable[[tuple[Any, ...], Mapping[str, Any]], "dict[str, torch.Tensor]"]
Rebuild = Callable[["Mapping[str, torch.Tensor]"], Any]


@dataclass(frozen=True)
class Imported:
    """What a frontend gives.

    `module` is a global-stage module with one function, ``main``; its meshes are those that annotations name.
    `tensors` holds the data of each parameter and constant input, by value name; parameters are the model's own
    storage, not copies. `names` leads from every name a user may use for an input or parameter to its value name;
    tied parameters lead to one value. `flatten(args, kwargs)` gives a call's tensors by input name and raises
    `RunError` where the call is unlike the example; `rebuild(outputs)` gives tensors by output name back in the
    structure that the model returns.
    """

    module: Module
    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, str]
    flatten: Flatten
    rebuild: Rebuild
