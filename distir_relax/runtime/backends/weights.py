"""Weights of one rank, and alias checks of its results, for all backends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle, local_intervals
from distir_relax.runtime.machine import release_freed_memory

if TYPE_CHECKING:
    import torch


_RELEASED = 1 << 24
"""Bytes of weights after whose reading freed memory is released: glibc keeps blocks of weights that were packed."""


class RankWeights(dict[str, "torch.Tensor"]):
    """A rank's shards of the weights, by name: each is read on first use, so that another may be freed before.

    Iteration gives those that were read. Values may be replaced, and names added.
    """

    def __init__(self, bundle: Bundle, rank: int, device: str = "cpu") -> None:
        super().__init__()
        self._bundle, self._rank, self._device = bundle, rank, device
        self._bytes = 0
        self._unread = {tensor.name: tensor for tensor in bundle.manifest.weights if tensor.is_on(rank)}

    def __missing__(self, name: str) -> torch.Tensor:
        import torch

        tensor = self._unread.pop(name)
        if self._bytes > _RELEASED:
            release_freed_memory()
            self._bytes = 0
        manifest = self._bundle.manifest
        with torch.inference_mode(False):
            weight = self._bundle.weights.read(name, local_intervals(tensor, manifest.mesh, self._rank))
            weight = weight.to(self._device)
            # The bundle's tensors may be shared with other ranks, and belong to the user.
            self[name] = weight.clone() if name in manifest.updates else weight
        self._bytes += weight.nbytes
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._unread or super().__contains__(name)

    def pop(self, name: str) -> torch.Tensor:  # type: ignore[override]
        """Remove a weight, and return it."""
        weight = self[name]
        del self[name]
        return weight

    def __delitem__(self, name: str) -> None:
        if self._unread.pop(name, None) is None:
            super().__delitem__(name)

    def read(self) -> dict[str, torch.Tensor]:
        """Read the other weights; return all."""
        for name in tuple(self._unread):
            self[name]
        return dict(self)


def read_all(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights of which none is still to be read."""
    return weights.read() if isinstance(weights, RankWeights) else weights


def load_weights(bundle: Bundle, rank: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return this rank's shards of the weights, by name."""
    return RankWeights(bundle, rank, device).read()


def memory(tensors: Iterable[torch.Tensor | None]) -> frozenset[int]:
    """Return the addresses of the storages of tensors, whatever part of them they view; None has none."""
    import torch

    # Packed weights are opaque objects and never results.
    plain = (t for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.numel())
    return frozenset(t.untyped_storage().data_ptr() for t in plain)


def own_memory(
    results: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor], reserved: Collection[int]
) -> list[torch.Tensor]:
    """Return `results`, copying those that alias the `inputs` or one of the addresses `reserved`.

    A program may return a weight, a state or an input unchanged; its caller may write into the results.
    """
    shared = memory(inputs).union(reserved)
    return [result.clone() if memory([result]) & shared else result for result in results]
