"""Tensors of a call that lie in one memory.

`torch.export` takes a tensor that is given twice, and tensors in one memory, for one: a program would read the first
of them wherever the model reads any.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.support.torch_compat import tree_map

if TYPE_CHECKING:
    import torch


def distinct(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example call with a copy of each tensor that lies in the memory of one before it, or of the model's own."""
    taken = {_storage(t) for t in (*model.parameters(), *model.buffers())}

    def apart(leaf: Any) -> Any:
        found = _storage(leaf)
        if found is None:
            return leaf
        leaf = leaf.detach().clone() if found in taken else leaf
        taken.add(found)
        return leaf

    return tree_map(apart, tuple(args)), tree_map(apart, dict(kwargs))


def check_distinct(inputs: Mapping[str, torch.Tensor], written: Collection[str]) -> None:
    """Raise `RunError` where an input among `written` lies in the memory of another.

    The model writes to it, and would see that in the other, which the program does not.
    """
    for name in written:
        start, end = _extent(inputs[name])
        for other, tensor in inputs.items():
            low, high = _extent(tensor)
            if other != name and low < end and start < high:
                raise RunError(
                    f"the model writes to the input {name!r}, which shares its memory with the input {other!r}",
                    hint=f"give it a copy: {other}.clone()",
                )


def _storage(leaf: Any) -> int | None:
    """What tells the storage of a tensor from others; None for what has none."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        return int(leaf.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which the elements of a tensor lie; an array of numpy has a new storage each time."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
