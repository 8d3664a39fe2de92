"""Aliased tensors in the arguments of a call.

`torch.export` treats aliased tensors as one tensor: the program would read the first of them wherever the model reads
any.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.support.torch_compat import tree_map

if TYPE_CHECKING:
    import torch


def copy_aliases(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy each tensor of the example call that shares storage with an earlier one, or with the model's tensors."""
    storages = {_storage(t) for t in (*model.parameters(), *model.buffers())}

    def copy_if_aliased(leaf: Any) -> Any:
        storage = _storage(leaf)
        if storage is None:
            return leaf
        leaf = leaf.detach().clone() if storage in storages else leaf
        storages.add(storage)
        return leaf

    return tree_map(copy_if_aliased, tuple(args)), tree_map(copy_if_aliased, dict(kwargs))


def check_no_mutated_alias(inputs: Mapping[str, torch.Tensor], mutated: Collection[str]) -> None:
    """Raise `RunError` if an input among `mutated` shares memory with another.

    The model's write would be visible in the other input, the program's is not.
    """
    for name in mutated:
        start, end = _extent(inputs[name])
        for other, tensor in inputs.items():
            low, high = _extent(tensor)
            if other != name and low < end and start < high:
                raise RunError(
                    f"the model writes to the input {name!r}, which shares its memory with the input {other!r}",
                    hint=f"give it a copy: {other}.clone()",
                )


def _storage(leaf: Any) -> int | None:
    """Return an identifier of a tensor's storage; None without a storage."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        return int(leaf.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range of a tensor's elements; storages of numpy arrays are new for each tensor."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
