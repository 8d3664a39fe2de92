"""Parameters without data, in a model whose buffers and inputs have theirs.

`torch.export` wants all on one device. A parameter on the meta device is exported as one of the same shape that takes
no memory: a single number, expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def exportable(model: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """While it is open, `model` can be exported on `inputs`; afterwards it is what it was."""
    import torch
    from torch.utils._pytree import tree_leaves

    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    empty = {id(p): p for p in model.parameters() if p.is_meta}
    if not empty or any(t.is_meta for t in (*given, *model.buffers())):
        yield
        return
    stand_ins = {
        key: torch.nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), requires_grad=False)
        for key, p in empty.items()
    }
    places = [
        (module, name, p) for module in model.modules() for name, p in module._parameters.items() if id(p) in empty
    ]
    for module, name, p in places:
        module._parameters[name] = stand_ins[id(p)]
    try:
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p
