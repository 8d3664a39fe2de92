"""The torch backend with a check after each op: the first result that is not a number is an error that names the op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle
from distir_relax.runtime.backends.torch import TorchProgram, load_module
from distir_relax.runtime.verification import read_stage

if TYPE_CHECKING:
    from distir_relax.runtime.communicator import Communicator


def load(bundle: Bundle, rank: int, comm: Communicator, device: str = "cpu") -> TorchProgram:
    """See `Backend.load`; the program is emitted from the text of the ranked stage."""
    from distir_relax.layout import assuming
    from distir_relax.lowering.emit.torch import to_torch_checked

    ranked = read_stage(bundle, "ranked")
    name = bundle.manifest.program_of(rank).name
    with assuming(ranked.guards):
        text = to_torch_checked(ranked, name, bundle.manifest.name)
    return load_module(bundle, rank, comm, device, f"{name}.checked", text)
