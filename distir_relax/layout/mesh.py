"""Device mesh: an n-dimensional grid of devices."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from distir_relax.errors import PlacementError


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """An n-dimensional grid of devices, numbered in row-major order.

    `shape` is the number of devices along each axis; `axes` names the axes (``("dp", "tp")``).
    Raises `PlacementError` for an empty mesh, or for names that do not match the shape.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        axes = tuple(self.axes) or tuple(f"axis{i}" for i in range(len(self.shape)))
        object.__setattr__(self, "axes", axes)
        if not self.shape or any(n < 1 for n in self.shape):
            raise PlacementError(f"a device mesh needs at least one device along each axis, found shape {self.shape}")
        if len(axes) != len(self.shape) or len(set(axes)) != len(axes):
            raise PlacementError(
                f"a mesh of shape {self.shape} needs {len(self.shape)} distinct axis names, found {axes}"
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, in order."""
        return _numbers(self.size)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the index of device `rank` along each axis."""
        return _coordinates(self.shape, rank)

    def rank(self, coordinates: Sequence[int]) -> int:
        """Return the device at `coordinates`: the inverse of `coordinates()`."""
        rank = 0
        for size, index in zip(self.shape, coordinates, strict=True):
            rank = rank * size + index
        return rank

    def group(self, rank: int, axis: int) -> tuple[int, ...]:
        """Return the devices that differ from `rank` at most along `axis`, in order along it."""
        here = self.coordinates(rank)
        return tuple(self.rank((*here[:axis], i, *here[axis + 1 :])) for i in range(self.shape[axis]))

    def __str__(self) -> str:
        axes = "".join(f"{json.dumps(axis)}, " for axis in self.axes).rstrip(" " if len(self.axes) == 1 else ", ")
        return f"device_mesh({self.shape!r}, ({axes}))"


def as_mesh(mesh: DeviceMesh | int | Sequence[int]) -> DeviceMesh:
    """Convert a user's mesh: a `DeviceMesh`, a shape (``(2, 3)``), or a number of devices (``3``).

    Raises `PlacementError` for anything else.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    shape = (mesh,) if isinstance(mesh, int) else mesh
    if isinstance(shape, (tuple, list)) and all(isinstance(n, int) and not isinstance(n, bool) for n in shape):
        return DeviceMesh(tuple(shape))
    raise PlacementError(
        f"expected a DeviceMesh, a shape such as (2, 3) or a number of devices, found {mesh!r}",
        hint='DeviceMesh((2, 3), ("dp", "tp")) names the axes',
    )


@lru_cache(maxsize=64)
def _numbers(count: int) -> tuple[int, ...]:
    return tuple(range(count))


@lru_cache(maxsize=1 << 16)
def _coordinates(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    index = []
    for n in reversed(shape):
        rank, i = divmod(rank, n)
        index.append(i)
    return tuple(reversed(index))
