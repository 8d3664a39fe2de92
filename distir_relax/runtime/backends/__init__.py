"""Backends: load a bundle's program into something that a rank calls. Each is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from distir_relax.bundle import BACKENDS, Bundle
from distir_relax.errors import RunError
from distir_relax.runtime import token_dispatch  # noqa: F401 - gives communicators more methods

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator
    from distir_relax.runtime.watchdog import Steps


class RankProgram(Protocol):
    """A loaded program of one rank, its weights in place."""

    steps: Steps
    """What each step number is, for the watchdog: `steps[2] == "%y = all_reduce(%h) (model.py:12)"`; may be empty."""

    state: Mapping[str, torch.Tensor]
    """This rank's shards of the weights that the manifest's `updates` name, by name, on the device. They are what the
    program reads when it is called: whoever writes into them changes what it computes next."""

    held: Collection[int]
    """The addresses of the memory that the program reads again, besides that of its state (`weights.memory`)."""

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """This rank's shards of the outputs, from its shards of the inputs, both in the manifest's order.

        Results may lie in the memory of inputs, of state, and of what is `held`. The new value of a state may lie where
        the old one did; elsewhere, the caller writes it there.
        """
        ...


class Load(Protocol):
    """How a backend loads a rank's program."""

    def __call__(self, bundle: Bundle, rank: int, comm: Communicator, device: str) -> RankProgram:
        """The program of `rank`, ready to be called again and again on `device` ("cpu", "cuda", "cuda:1").

        Reads only this rank's slices of the weights. Raises BundleError when the bundle was not
        compiled for this backend, RunError when the backend cannot run here.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """What runs a bundle's programs, and which ones."""

    load: Load
    programs: tuple[str, ...]
    """The kinds of programs, of `BACKENDS`, that a bundle needs for it; none for one that reads the bundle's texts."""


def _lazily(name: str) -> Load:
    def load(bundle: Bundle, rank: int, comm: Communicator, device: str) -> RankProgram:
        module = importlib.import_module(f"distir_relax.runtime.backends.{name}")
        return cast(Load, module.load)(bundle, rank, comm, device)

    return load


_backends = {name: Backend(_lazily(name), (name,)) for name in BACKENDS}


def register_backend(name: str, load: Load, programs: Sequence[str] = ()) -> None:
    """Add a backend, in this process; `programs` are the kinds of `BACKENDS` that a bundle must hold for it.

    Raises ValueError when the name is taken, or for a kind of programs that there is not.
    """
    if name in _backends:
        raise ValueError(f"there is a backend {name!r} already")
    if unknown := set(programs) - set(BACKENDS):
        raise ValueError(f"bundles hold programs for {', '.join(BACKENDS)}, found {', '.join(sorted(unknown))}")
    _backends[name] = Backend(load, tuple(programs))


def find_backend(name: str) -> Backend:
    """The backend of that name. Raises RunError for an unknown one."""
    if name not in _backends:
        raise RunError(f"unknown backend {name!r}", hint=f"backends: {', '.join(_backends)}")
    return _backends[name]


def load_program(backend: str, bundle: Bundle, rank: int, comm: Communicator, device: str = "cpu") -> RankProgram:
    """`Backend.load` of the backend called `backend`. Raises RunError for an unknown name."""
    return find_backend(backend).load(bundle, rank, comm, device)
