"""Caches, positions and masks that a recorded step of several requests, of one new position each, takes from them.

It is written before each step to memory that the step reads: values that depend on sizes, where the caches of the
requests are, how many positions they have, and which of them each row attends to. A program that reads anything else
of a request while it is recorded ends the recording.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.kernels.attention import (
    NO_NORMALIZERS,
    Cache,
    CacheArguments,
    equal_repeats,
    kernel_for,
    kernel_places,
    limits_of,
)
from distir_relax.kernels.native import NUMBERS_OF_BLOCK
from distir_relax.kernels.recording import Recording, paused

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.requests import Request, States


class RecordedRequests(Sequence["_Recorded"]):
    """The requests of a step that is recorded, and then those of each time that it runs."""

    def __init__(self, recording: Recording, requests: Sequence[Request]) -> None:
        self.recording = recording
        self.current = requests
        """The requests while they are recorded: their states are freed with them."""
        self._each = [_Recorded(self, number) for number in range(len(requests))]
        self._of_sizes: dict[tuple[int, int], torch.Tensor] = {}
        """By numbers of the request and among its values that depend on sizes."""
        self._blocks = array("q", [0] * (NUMBERS_OF_BLOCK * len(requests)))
        self._write_blocks(requests)
        self._limits: dict[int | None, array[int]] = {}
        """By the number of the mask among the values that depend on sizes, None for none."""
        self._layers: list[tuple[array[int], Cache, Cache]] = []
        """Where the caches of all requests are, and which caches, of each layer."""
        self._states: list[weakref.ref[States]] = []

    def __len__(self) -> int:
        return len(self._each)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._each[index]

    def of_sizes(self, number: int, value: int) -> torch.Tensor | None:
        """Return a value of a request that depends on sizes: a tensor that has it whenever the step runs."""
        found = self.current[number].sized[value]
        if found is None:
            self.recording.fail("it reads a mask that may be none")
            return None
        if (number, value) not in self._of_sizes:
            self._of_sizes[number, value] = self.recording.input(found)
        return self._of_sizes[number, value]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Sequence[torch.Tensor | None] | int | None,
        scale: float, caches: tuple[CacheArguments, CacheArguments], repeats: tuple[int, ...] = (),
    ) -> torch.Tensor | None:  # fmt: skip
        """Add attention to the step as `attention.RequestsAttention.attend`; return its result.

        None where there is no kernel for it, and the recording ends.
        """
        import torch

        if self.recording.failure:
            return None
        keys, values = (Cache(*cache) for cache in caches)
        new_k, new_v = keys.view(k), values.view(v)
        repeats = repeats or equal_repeats(q.shape[1], new_k.shape[1])
        kernel = kernel_for(q, new_k, new_v, repeats)
        is_plain = q.stride(3) == new_k.stride(3) == new_v.stride(3) == 1
        if kernel is None or not is_plain or not (masks is None or isinstance(masks, int)):
            self.recording.fail("a kernel cannot compute attention")
            return None
        if masks not in self._limits:
            self._limits[masks] = array("q", [0] * (2 * len(self)))
        with paused():
            is_possible = self._write_limits(masks, self.current)
        if not is_possible:
            self.recording.fail("a kernel cannot compute attention with these masks")
            return None
        places = array("q", _places((keys, values), self.current))
        self._layers.append((places, keys, values))
        y = q.new_empty(1, len(self), q.shape[1], new_v.shape[3]).transpose(1, 2)
        kernel(
            places.buffer_info()[0], self._blocks.buffer_info()[0], len(self), self._limits[masks].buffer_info()[0],
            *kernel_places(q, new_k, new_v, y), *NO_NORMALIZERS, scale, torch.get_num_threads(),
        )  # fmt: skip
        return y

    def update(self, requests: Sequence[Request]) -> bool:
        """Prepare a step of these requests; return False if the kernel cannot compute it, because of their masks."""
        if not all(self._write_limits(mask, requests) for mask in self._limits):
            return False
        for (number, position), value in self._of_sizes.items():
            sized = requests[number].sized[position]
            if sized is None or sized.shape != value.shape:
                return False
            value.copy_(sized)
        self._write_blocks(requests)
        known = [ref() for ref in self._states]
        if len(known) != len(requests) or any(mine is not r.states for mine, r in zip(known, requests, strict=True)):
            self._states = [weakref.ref(request.states) for request in requests]
            for places, *caches in self._layers:
                memoryview(places).cast("B")[:] = _places(caches, requests)
        return True

    def _write_limits(self, mask: int | None, requests: Sequence[Request]) -> bool:
        """Write which positions each row attends to; return False if a mask leaves out some between others."""
        for number, request in enumerate(requests):
            found = limits_of(request, None if mask is None else request.sized[mask])
            if found is None:
                return False
            self._limits[mask][2 * number], self._limits[mask][2 * number + 1] = found
        return True

    def _write_blocks(self, requests: Sequence[Request]) -> None:
        for number, request in enumerate(requests):
            first = NUMBERS_OF_BLOCK * number
            self._blocks[first : first + NUMBERS_OF_BLOCK] = array("q", (number, number, 1, number, request.past))


def _places(caches: Sequence[Cache], requests: Sequence[Request]) -> bytes:
    return b"".join(cache.place(request) for request in requests for cache in caches)


class _Recorded:
    """A request, as a program that is recorded sees it."""

    new = last = 1

    def __init__(self, requests: RecordedRequests, number: int) -> None:
        self._requests, self._number = requests, number

    @property
    def past(self) -> int:
        self._requests.recording.fail("it computes with the number of earlier positions")
        return self._requests.current[self._number].past

    @property
    def states(self) -> States:
        self._requests.recording.fail("it reads states")
        return self._requests.current[self._number].states

    @property
    def sized(self) -> _Sized:
        return _Sized(self._requests, self._number)


class _Sized:
    def __init__(self, requests: RecordedRequests, number: int) -> None:
        self._requests, self._number = requests, number

    def __getitem__(self, value: int) -> torch.Tensor | None:
        return self._requests.of_sizes(self._number, value)
