"""Placeholder data for the export of models with meta-device or deferred parameters and inputs that have data.

`torch.export` requires one device, and tensors of torch's own class. Others are exported as tensors of the same shape
with arbitrary data: parameters as zeros that are mapped, which take no memory and have the strides that ops check;
buffers, which a model may write to, as uninitialized memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distir_relax.support.torch_compat import tree_leaves, tree_map

if TYPE_CHECKING:
    import torch


@contextmanager
def placeholder_data(model: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """Inside the context, `model` can be exported on `inputs`; its tensors are restored afterwards."""
    import torch

    from distir_relax.support.deferred_tensor import DeferredTensor

    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    meta_tensors: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (container, name, tensor)
        for module in model.modules()
        for container in (module._parameters, module._buffers)
        for name, tensor in container.items()
        if tensor is not None and (tensor.is_meta or isinstance(tensor, DeferredTensor))
    ]
    if any(t.is_meta for t in tensors):
        yield
        return
    placeholders = {id(tensor): _placeholder(tensor) for _, _, tensor in meta_tensors}
    for container, name, tensor in meta_tensors:
        container[name] = placeholders[id(tensor)]
    try:
        yield
    finally:
        for container, name, tensor in meta_tensors:
            container[name] = tensor


def with_placeholders(inputs: Any) -> Any:
    """Return inputs in which zeros that take no memory stand for tensors on the meta device."""
    import torch

    return tree_map(lambda x: _mapped_zeros(x) if isinstance(x, torch.Tensor) and x.is_meta else x, inputs)


def deferred_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of `model` whose data are read when an op needs them, by name."""
    from distir_relax.support.deferred_tensor import DeferredTensor

    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if isinstance(parameter, DeferredTensor)}


def _mapped_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of the shape and dtype of a tensor, which take no memory until they are written to."""
    import torch

    if not tensor.numel():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, tensor.numel() * tensor.itemsize, flags=flags)
    except OSError:  # Address space is limited.
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(_mapped_zeros(tensor), requires_grad=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
