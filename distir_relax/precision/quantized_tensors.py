"""Quantized weights as tensors: of data in memory now, of deferred ones when they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from distir_relax.bundle import StoredGroups
from distir_relax.errors import DistIRError
from distir_relax.ir import TensorType

if TYPE_CHECKING:
    import torch

Quantize: TypeAlias = "Callable[[torch.Tensor], Sequence[torch.Tensor]]"
"""Returns the tensors of a weight (n, k) in some format (`kernels.quantized`)."""


def quantized_tensors(
    name: str, weight: torch.Tensor, is_transposed: bool, quantize: Quantize, kinds: Sequence[TensorType]
) -> list[torch.Tensor]:
    """Return the tensors of the weight `name` (n, k), or of its transposition, which have the types `kinds`.

    Those of a stack of weights are quantized one after the other, and so take no memory besides their tensors.
    Those of a deferred weight are deferred: reading one reads the weight, and quantizes it. A weight on the meta device
    has tensors there. Raises `DistIRError`, for a deferred weight when it is read, for numbers that have no such form.
    """
    from distir_relax.support.deferred_tensor import DeferredTensor

    def now() -> Sequence[torch.Tensor]:
        data = weight.read() if isinstance(weight, DeferredTensor) else weight.detach()
        data = data.mT if is_transposed else data
        with _errors_of(name):
            return quantize(data) if data.dim() == 2 else _stacked(data, quantize, kinds)

    if isinstance(weight, DeferredTensor):
        return _deferred(now, kinds)
    return [_meta(kind) for kind in kinds] if weight.is_meta else list(now())


def _stacked(weights: torch.Tensor, quantize: Quantize, kinds: Sequence[TensorType]) -> list[torch.Tensor]:
    """Return the tensors of a stack of weights."""
    import torch

    stacked = [torch.empty_like(_meta(kind), device="cpu") for kind in kinds]
    for number, weight in enumerate(weights):
        for target, part in zip(stacked, quantize(weight), strict=True):
            target[number] = part
    return stacked


def stored_groups(weight: torch.Tensor) -> StoredGroups | None:
    """Return what a model's file has for a weight, if it is quantized there."""
    find = getattr(getattr(weight, "source", None), "groups", None)
    return None if find is None else find()


def group_tensors(name: str, groups: StoredGroups, kinds: Sequence[TensorType]) -> list[torch.Tensor]:
    """Return the tensors of the weight `name` as its file has them, which have the types `kinds`; they are deferred."""

    def now() -> Sequence[torch.Tensor]:
        with _errors_of(name):
            return groups.read()

    return _deferred(now, kinds)


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Convert errors of the numbers of a weight to errors for the user."""
    try:
        yield
    except ValueError as error:
        raise DistIRError(str(error), name, f"keep it as it is: --keep {name}, or keep=[{name!r}]") from None


def _deferred(compute: Callable[[], Sequence[torch.Tensor]], kinds: Sequence[TensorType]) -> list[torch.Tensor]:
    from distir_relax.support.deferred_tensor import DeferredTensor

    last = _Last(compute)
    return [DeferredTensor(_meta(kind), partial(last.tensor, number)) for number, kind in enumerate(kinds)]


def _meta(kind: TensorType) -> torch.Tensor:
    import torch

    return torch.empty(tuple(kind.shape), dtype=getattr(torch, kind.dtype), device="meta")


class _Last:
    """The tensors of a weight, computed when one is needed; those of one weight are kept until another is needed."""

    _lock = threading.Lock()
    _owner: _Last | None = None
    _tensors: Sequence[torch.Tensor] = ()

    def __init__(self, compute: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._compute = compute

    def tensor(self, number: int) -> torch.Tensor:
        """Return one of the tensors."""
        with _Last._lock:
            if _Last._owner is not self:
                _Last._tensors = ()
                _Last._tensors = self._compute()
                _Last._owner = self
            return _Last._tensors[number]
