"""What a bound step of several requests, of one new position each, takes from them: caches, positions, masks.

It is written before each step to memory that the step reads: values that depend on sizes, where the caches of the
requests are, how many positions they have, and which of them each row attends to.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels.attention import (
    Cache,
    CacheArguments,
    equal_repeats,
    kernel_for,
    kernel_places,
    limits_of,
)
from distir_relax.kernels.bound_step import BoundStep, CannotBind, Kind
from distir_relax.kernels.native import NUMBERS_OF_BLOCK

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.requests import Request, States


class BoundRequests:
    """The requests of a step, of which there are `count`."""

    def __init__(self, step: BoundStep, count: int) -> None:
        self._step, self._count = step, count
        self._of_sizes: list[tuple[int, int | None, torch.Tensor]] = []
        """Numbers among the values that depend on sizes, dims of the requests' rows, and the values of this step."""
        self._blocks = array("q", [0] * (NUMBERS_OF_BLOCK * count))
        self._limits: dict[int | None, array[int]] = {}
        """By the number of the mask among the values that depend on sizes, None for none."""
        self._layers: list[tuple[array[int], Cache, Cache]] = []
        """Where the caches of all requests are, and which caches, of each layer."""
        self._states: list[weakref.ref[States]] = []

    def of_sizes(self, number: int, dim: int | None, kind: Kind) -> torch.Tensor:
        """Return one of the values that depend on sizes: along `dim` it has the rows of all, None if they share it."""
        import torch

        shape, dtype = kind
        value = torch.empty(shape, dtype=dtype)
        self._of_sizes.append((number, dim, value))
        return value

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: int | None, scale: float,
        caches: tuple[CacheArguments, CacheArguments], repeats: tuple[int, ...] = (),
    ) -> torch.Tensor:  # fmt: skip
        """Add attention to the step as `attention.RequestsAttention.attend`; return its result.

        `mask` is the number of the requests' masks among their `sized` values. Raises `CannotBind` where there is no
        kernel.
        """
        import torch

        keys, values = (Cache(*cache) for cache in caches)
        new_k, new_v = keys.view(k), values.view(v)
        heads, value_width = q.shape[1], new_v.shape[3]
        repeats = repeats or equal_repeats(heads, new_k.shape[1])
        kernel = kernel_for(q, new_k, new_v, repeats)
        if kernel is None or not q.stride(3) == new_k.stride(3) == new_v.stride(3) == 1:
            raise CannotBind
        y = self._step.empty((1, self._count, heads, value_width), q.dtype).transpose(1, 2)
        places = array("q", [0] * (6 * self._count))
        self._layers.append((places, keys, values))
        limits = self._limits.setdefault(mask, array("q", [0] * (2 * self._count)))
        self._step.add(
            kernel, places.buffer_info()[0], self._blocks.buffer_info()[0], self._count, limits.buffer_info()[0],
            *kernel_places(q, new_k, new_v, y), scale, torch.get_num_threads(),
        )  # fmt: skip
        return y

    def update(self, requests: Sequence[Request]) -> bool:
        """Prepare a step of these requests; return False if the kernel cannot compute it, because of their masks."""
        import torch

        for mask, limits in self._limits.items():
            for number, request in enumerate(requests):
                found = limits_of(request, None if mask is None else request.sized[mask])
                if found is None:
                    return False
                limits[2 * number], limits[2 * number + 1] = found
        for position, dim, value in self._of_sizes:
            parts = [request.sized[position] for request in requests]
            if dim is None or len(parts) == 1:
                value.copy_(parts[0])  # type: ignore[arg-type]
            else:
                torch.cat(parts, dim, out=value)  # type: ignore[arg-type]
        for number, request in enumerate(requests):
            first = NUMBERS_OF_BLOCK * number
            self._blocks[first : first + NUMBERS_OF_BLOCK] = array("q", (number, number, 1, number, request.past))
        known = [ref() for ref in self._states]
        if len(known) != len(requests) or any(mine is not r.states for mine, r in zip(known, requests, strict=True)):
            self._states = [weakref.ref(request.states) for request in requests]
            for places, *caches in self._layers:
                of_all = b"".join(cache.place(request) for request in requests for cache in caches)
                memoryview(places).cast("B")[:] = of_all
        return True
