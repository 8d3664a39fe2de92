"""Memory for the states of requests: reserved for the longest they can get, in use only up to their last token.

A state is contiguous, as kernels want it. Each of its runs along the tokens (one for each head, say) begins at a page,
so that a request which begins as another did shares the whole pages of the tokens that both have. On systems without
such memory (`page_memory`), and on other devices, states are ordinary tensors, and are copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distir_relax.bundle import Manifest, State, local_shape
from distir_relax.kernels.requests import States
from distir_relax.layout import DTYPES, size_of
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
        self._states = [state for state in _states(manifest) if state.tensor.is_on(rank)]

    def new(self, length: int) -> RequestStates:
        """Return the states of a sequence of up to `length` tokens before its first one: empty, or zero."""
        return self._made(length, 0)

    def fork(self, source: RequestStates, shared: int, length: int) -> RequestStates:
        """Return the states of a sequence of up to `length` tokens whose first `shared` are those of another.

        All states must grow. The other may get more tokens, or be freed, but the shared ones do not change.
        """
        made = self._made(length, shared)
        mine = {state.tensor.name: self._shape(state, shared)[state.dim] for state in self._states}
        if made._memory is None or source._memory is None or not self._share_pages(made, source, mine):
            first = dict.fromkeys(mine, 0)
        else:
            first = {p.name: mine[p.name] * p.bytes // PAGE * PAGE // max(p.bytes, 1) for p in made._places}
        for state in self._states:
            name, dim = state.tensor.name, state.dim
            rest = (dim, first[name], mine[name] - first[name])
            made.tensors[name].narrow(*rest).copy_(source.tensors[name].narrow(*rest))
        return made

    def _made(self, length: int, filled: int) -> RequestStates:
        shapes = [self._shape(state, length) for state in self._states]
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

    def _shape(self, state: State, length: int) -> tuple[int, ...]:
        return _shape(state, self._manifest, self._rank, length)

    def _share_pages(self, made: RequestStates, source: RequestStates, shared: Mapping[str, int]) -> bool:
        """Share the whole pages of the first tokens of each state; return whether the system has done so."""
        assert made._memory is not None
        assert source._memory is not None
        try:
            for mine, other in zip(made._places, source._places, strict=True):
                for run in range(mine.runs):
                    if pages := shared[mine.name] * mine.bytes // PAGE:
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


class StateBytes:
    """The bytes that ranks take for the states of a request, by the number of its tokens.

    `kinds` are ranks with different parts of states: all others are as one of these.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._states = manifest, _states(manifest)
        firsts: dict[object, int] = {}
        self._first = [firsts.setdefault(_parts(manifest, rank), rank) for rank in range(manifest.mesh.size)]
        self.kinds = tuple(firsts.values())
        self._found: dict[tuple[int, int], int] = {}

    def __call__(self, rank: int, length: int) -> int:
        """Return the bytes of a rank for a request that has room for `length` tokens."""
        key = self._first[rank], length
        if key not in self._found:
            self._found[key] = sum(
                math.prod(_shape(state, self._manifest, rank, length)) * DTYPES[state.tensor.dtype][1]
                for state in self._states if state.tensor.is_on(rank)
            )  # fmt: skip
        return self._found[key]

    def of_kinds(self, length: int) -> tuple[int, ...]:
        """Return the bytes of each of the `kinds`."""
        return tuple(self(rank, length) for rank in self.kinds)

    @property
    def token(self) -> tuple[int, ...]:
        """The bytes of each of the `kinds` for the first token, of which states that are split are on one of them."""
        return tuple(one - none for one, none in zip(self.of_kinds(1), self.of_kinds(0), strict=True))


def _parts(manifest: Manifest, rank: int) -> object:
    """Return what two ranks have alike if they hold equal parts of states."""
    states = [(state.tensor, state.dim) for state in manifest.states if state.tensor.is_on(rank)]
    return tuple((tensor.dtype, dim, local_shape(tensor, manifest.mesh, rank)) for tensor, dim in states)


def _states(manifest: Manifest) -> list[State]:
    """Return the states of a manifest as they are after calls, too: with one token more than before the last call."""
    past = next((symbol for symbol in manifest.symbols if symbol.name == "past"), None)
    if past is None or past.high is None:
        return [*manifest.states]
    values = {"past": size_of(replace(past, high=past.high + 1))}
    return [replace(state, tensor=state.tensor.at(values)) for state in manifest.states]


def _shape(state: State, manifest: Manifest, rank: int, length: int) -> tuple[int, ...]:
    """Return the shape of a rank's part of a state after `length` tokens."""
    sizes = {symbol.name: 1 for symbol in manifest.symbols} | {"past": length}
    return local_shape(state.tensor.at(sizes), manifest.mesh, rank)
