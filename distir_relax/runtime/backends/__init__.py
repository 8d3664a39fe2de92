"""Backends: what turns a bundle's program into something a rank can call. Each is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, cast

from distir_relax.bundle import Bundle
from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator
    from distir_relax.runtime.watchdog import Steps

BACKENDS = ("torch", "tvm")


class RankProgram(Protocol):
    """A loaded program of one rank, its weights in place."""

    steps: Steps
    """What each step number is, for the watchdog: `steps[2] == "%y = all_reduce(%h) (model.py:12)"`; may be empty."""

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """This rank's shards of the outputs, from its shards of the inputs, both in the manifest's order."""
        ...


class Backend(Protocol):
    """What the module `distir_relax.runtime.backends.<name>` offers."""

    def load(self, bundle: Bundle, rank: int, comm: Communicator, device: str) -> RankProgram:
        """The program of `rank`, ready to be called again and again on `device` ("cpu", "cuda", "cuda:1").

        Reads only this rank's slices of the weights. Raises BundleError when the bundle was not
        compiled for this backend, RunError when the backend cannot run here.
        """
        ...


def load_program(backend: str, bundle: Bundle, rank: int, comm: Communicator, device: str = "cpu") -> RankProgram:
    """`Backend.load` of the backend called `backend`. Raises RunError for an unknown name."""
    if backend not in BACKENDS:
        raise RunError(f"unknown backend {backend!r}", hint=f"backends: {', '.join(BACKENDS)}")
    module: Any = importlib.import_module(f"distir_relax.runtime.backends.{backend}")
    return cast(Backend, module).load(bundle, rank, comm, device)
