"""Memory for the states of requests: reserved for the longest they can get, in use only up to their last token.

A state is contiguous, as kernels want it. Each of its runs along the tokens (one for each head, say) begins at a page,
so that a request which begins as another did shares the whole pages of the tokens that both have. On systems without
such memory (`page_memory`), and on other devices, states are ordinary tensors, and are copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distir_relax.bundle import Manifest, State, local_shape
from distir_relax.kernels.requests import States
from distir_relax.layout import DTYPES
from distir_relax.runtime.arrays import torch_dtype
from distir_relax.runtime.requests.page_memory import PAGE, PageMemory, is_available


@dataclass
class RequestStates:
    """The states of a request on one rank, by name.

    Those that grow are buffers, with room for all tokens of the request. They have the first `length`.
    """

    tensors: States
    length: int = 0
    _memory: PageMemory | None = None
    _places: Sequence[_Place] = ()


class StateMemory:
    """Makes the states of requests on one rank, on a device."""

    def __init__(self, manifest: Manifest, rank: int, device: str) -> None:
        self._manifest, self._rank, self._device = manifest, rank, device
        self._states = [state for state in manifest.states if state.tensor.is_on(rank)]

    def new(self, length: int) -> RequestStates:
        """Return the states of a sequence of up to `length` tokens before its first one: empty, or zero."""
        return self._made(length, 0)

    def fork(self, source: RequestStates, shared: int, length: int) -> RequestStates:
        """Return the states of a sequence of up to `length` tokens whose first `shared` are those of another.

        All states must grow. The other may get more tokens, or be freed, but the shared ones do not change.
        """
        made = self._made(length, shared)
        if made._memory is None or source._memory is None or not self._share_pages(made, source, shared):
            first = {state.tensor.name: 0 for state in self._states}
        else:
            first = {p.name: shared * p.bytes // PAGE * PAGE // max(p.bytes, 1) for p in made._places}
        for state in self._states:
            name, dim = state.tensor.name, state.dim
            rest = (dim, first[name], shared - first[name])
            made.tensors[name].narrow(*rest).copy_(source.tensors[name].narrow(*rest))
        return made

    def _made(self, length: int, filled: int) -> RequestStates:
        shapes = [_shape(state, self._manifest, self._rank, length) for state in self._states]
        if self._device == "cpu" and is_available():
            return self._in_pages(shapes, filled)
        import torch

        tensors = States()
        for state, shape in zip(self._states, shapes, strict=True):
            tensors[state.tensor.name] = torch.zeros(shape, dtype=torch_dtype(state.tensor.dtype), device=self._device)
        return RequestStates(tensors, filled)

    def _in_pages(self, shapes: Sequence[tuple[int, ...]], filled: int) -> RequestStates:
        import torch

        places, end = [], 0
        for state, shape in zip(self._states, shapes, strict=True):
            places.append(_Place.of(state, shape, end))
            end = places[-1].end
        memory = PageMemory(end)
        whole = torch.frombuffer(memory.buffer(), dtype=torch.uint8)
        tensors = States()
        for state, place in zip(self._states, places, strict=True):
            part = whole[place.start : place.end].view(torch_dtype(state.tensor.dtype))
            tensors[state.tensor.name] = part[: math.prod(place.shape)].view(place.shape)
        return RequestStates(tensors, filled, memory, places)

    def _share_pages(self, made: RequestStates, source: RequestStates, shared: int) -> bool:
        """Share the whole pages of the first tokens; return whether the system has done so."""
        assert made._memory is not None
        assert source._memory is not None
        try:
            for mine, other in zip(made._places, source._places, strict=True):
                for run in range(mine.runs):
                    if pages := shared * mine.bytes // PAGE:
                        made._memory.share(mine.page(run), source._memory, other.page(run), pages)
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class _Place:
    """Where a state is in memory: `runs` along its tokens, of `bytes` each token, which begin at a page each.

    `shape` has as many tokens as fill whole pages.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    runs: int
    bytes: int
    run_bytes: int

    @classmethod
    def of(cls, state: State, shape: tuple[int, ...], start: int) -> _Place:
        """Return the place from a byte on."""
        item = DTYPES[state.tensor.dtype][1]
        runs = math.prod(shape[: state.dim]) if state.grows else 1
        each = math.prod(shape[state.dim + 1 :]) * item if state.grows else math.prod(shape) * item
        if state.grows and each:
            step = PAGE // math.gcd(PAGE, each)
            tokens = -(-shape[state.dim] // step) * step
            shape = (*shape[: state.dim], tokens, *shape[state.dim + 1 :])
            return cls(state.tensor.name, start, shape, runs, each, tokens * each)
        return cls(state.tensor.name, start, shape, runs, each, -(-each // PAGE) * PAGE)

    @property
    def end(self) -> int:
        return self.start + self.runs * self.run_bytes

    def page(self, run: int) -> int:
        """Return the first page of a run."""
        return (self.start + run * self.run_bytes) // PAGE


def bytes_per_token(manifest: Manifest, rank: int) -> int:
    """Return the bytes of a rank's states for each token of a request."""
    return _bytes(manifest, rank, 1) - _bytes(manifest, rank, 0)


def bytes_per_request(manifest: Manifest, rank: int) -> int:
    """Return the bytes of a rank's states of a request without tokens."""
    return _bytes(manifest, rank, 0)


def _shape(state: State, manifest: Manifest, rank: int, length: int) -> tuple[int, ...]:
    """Return the shape of a state that has room for `length` tokens."""
    # The state before a call has at least one token less than the longest sequence.
    past = max(length - 1, 0)
    sizes = {symbol.name: 1 for symbol in manifest.symbols} | {"past": past}
    shape = local_shape(state.tensor.at(sizes), manifest.mesh, rank)
    if not state.grows:
        return shape
    return (*shape[: state.dim], shape[state.dim] + length - past, *shape[state.dim + 1 :])


def _bytes(manifest: Manifest, rank: int, length: int) -> int:
    states = [state for state in manifest.states if state.tensor.is_on(rank)]
    return sum(math.prod(_shape(state, manifest, rank, length)) * DTYPES[state.tensor.dtype][1] for state in states)
