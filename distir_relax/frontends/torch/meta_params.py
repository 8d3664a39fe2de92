"""Parameters and buffers without data, in a model whose inputs have theirs.

`torch.export` wants all on one device. What is on the meta device is exported as a tensor of the same shape whose data
nobody looks at: parameters as a single number, expanded, which takes no memory; buffers, which a model may write to, as
memory that is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distir_relax.support.torch_compat import tree_leaves

if TYPE_CHECKING:
    import torch


@contextmanager
def exportable(model: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """While it is open, `model` can be exported on `inputs`; afterwards it is what it was."""
    import torch

    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (held, name, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.is_meta
    ]
    if any(t.is_meta for t in given):
        yield
        return
    stand_ins = {id(tensor): _stand_in(tensor) for _, _, tensor in places}
    for held, name, tensor in places:
        held[name] = stand_ins[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(torch.zeros((), dtype=tensor.dtype).expand(tensor.shape), requires_grad=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
