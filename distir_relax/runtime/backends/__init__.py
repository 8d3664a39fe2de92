"""Backends: load a bundle's program as a callable of one rank. Each backend is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from distir_relax.bundle import BACKENDS, Bundle
from distir_relax.errors import RunError
from distir_relax.runtime import token_dispatch  # noqa: F401 - gives communicators more methods

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator
    from distir_relax.runtime.watchdog import Steps


class RankProgram(Protocol):
    """A loaded program of one rank, with its weights."""

    steps: Steps
    """Descriptions of the steps for the watchdog: `steps[2] == "%y = all_reduce(%h) (model.py:12)"`; may be empty."""

    state: Mapping[str, torch.Tensor]
    """This rank's shards of the weights named by the manifest's `updates`, by name, on the device.

    The program reads these tensors when it is called: writing into them changes its next results.
    """

    @property
    def held(self) -> Collection[int]:
        """Addresses of memory that the program reads again, other than that of its state (`weights.memory`)."""
        ...

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Return this rank's shards of the outputs from its shards of the inputs, both in the manifest's order.

        `sizes` are the values of the manifest's symbols by name.

        Results may alias inputs, state and `held` memory. The new value of a state may alias the old one; otherwise the
        caller copies it there.
        """
        ...


class Load(Protocol):
    """Loader function of a backend."""

    def __call__(self, bundle: Bundle, rank: int, comm: Communicator, device: str) -> RankProgram:
        """Load the program of `rank` for repeated calls on `device` ("cpu", "cuda", "cuda:1").

        The program is generated from the verified text of the ranked stage. Reads only this rank's slices of the
        weights. Raises UnsupportedOpError for an op that this backend has no code for, RunError when the backend cannot
        run here.
        """
        ...


Collect: TypeAlias = "Callable[[Callable[[], Any]], list[Any]]"
"""Calls a function on each process of a launch, and returns the results (of JSON's types) of all on each of them.

If it raises a `DistIRError` on one of them, all raise that.
"""


class LoadSequences(Protocol):
    """Loader of other programs of the torch backend for a bundle that continues sequences."""

    def __call__(
        self, bundle: Bundle, communicators: Sequence[Communicator], collect: Collect = ...
    ) -> list[RankProgram]:
        """Load those of the ranks of this process, which have these communicators.

        The result is empty if some process of the launch cannot run them: all call this alike, and `collect` is theirs;
        by default this is the only process.
        """
        ...


def _lazily(name: str) -> Load:
    def load(bundle: Bundle, rank: int, comm: Communicator, device: str) -> RankProgram:
        module = importlib.import_module(f"distir_relax.runtime.backends.{name}")
        return cast(Load, module.load)(bundle, rank, comm, device)

    return load


_backends = {name: _lazily(name) for name in (*BACKENDS, "checked")}


def register_backend(name: str, load: Load) -> None:
    """Register a backend in this process. Raises ValueError when the name is taken."""
    if name in _backends:
        raise ValueError(f"there is a backend {name!r} already")
    _backends[name] = load


def find_backend(name: str) -> Load:
    """Return the loader of the backend of that name. Raises RunError for an unknown one."""
    if name not in _backends:
        raise RunError(f"unknown backend {name!r}", hint=f"backends: {', '.join(_backends)}")
    return _backends[name]


def load_program(backend: str, bundle: Bundle, rank: int, comm: Communicator, device: str = "cpu") -> RankProgram:
    """Load a rank's program by the backend called `backend`. Raises RunError for an unknown name."""
    return find_backend(backend)(bundle, rank, comm, device)
