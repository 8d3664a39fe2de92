"""Quantized weights as tensors: of data in memory now, of deferred ones when they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from distir_relax.ir import TensorType

if TYPE_CHECKING:
    import torch

Quantize: TypeAlias = "Callable[[torch.Tensor], Sequence[torch.Tensor]]"
"""Returns the tensors of a weight (n, k) in some format (`kernels.quantized`)."""


def quantized_tensors(
    weight: torch.Tensor, is_transposed: bool, quantize: Quantize, kinds: Sequence[TensorType]
) -> list[torch.Tensor]:
    """Return the tensors of a weight (n, k), or of its transposition, which have the types `kinds`.

    Those of a deferred weight are deferred: reading one reads the weight, and quantizes it. A weight on the meta device
    has tensors there.
    """
    import torch

    from distir_relax.support.deferred_tensor import DeferredTensor

    def meta(kind: TensorType) -> torch.Tensor:
        return torch.empty(tuple(kind.shape), dtype=getattr(torch, kind.dtype), device="meta")

    if isinstance(weight, DeferredTensor):
        last = _Last(weight, is_transposed, quantize)
        return [DeferredTensor(meta(kind), partial(last.tensor, number)) for number, kind in enumerate(kinds)]
    if weight.is_meta:
        return [meta(kind) for kind in kinds]
    return list(quantize(_matrix(weight, is_transposed)))


class _Last:
    """The tensors of a deferred weight; those of the weight that was read last are kept until another is read."""

    _lock = threading.Lock()
    _owner: _Last | None = None
    _tensors: Sequence[torch.Tensor] = ()

    def __init__(self, weight: torch.Tensor, is_transposed: bool, quantize: Quantize) -> None:
        self._weight, self._is_transposed, self._quantize = weight, is_transposed, quantize

    def tensor(self, number: int) -> torch.Tensor:
        """Return one of the tensors."""
        with _Last._lock:
            if _Last._owner is not self:
                _Last._tensors = ()
                _Last._tensors = self._quantize(_matrix(self._weight.read(), self._is_transposed))  # type: ignore[attr-defined]
                _Last._owner = self
            return _Last._tensors[number]


def _matrix(weight: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    weight = weight.detach()
    return weight.t() if is_transposed else weight
