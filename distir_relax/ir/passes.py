"""What a pass is: a frozen dataclass that makes one program of another.

Its fields are its options; `takes` and `gives` are the stages that it goes between. A pass expects a valid program and
gives one. What it finds besides goes with the module, as records (`ir.records`).
"""

from __future__ import annotations

import re
from typing import ClassVar, Protocol

from distir_relax.ir.program import Module


class Pass(Protocol):
    """One step of a pipeline."""

    takes: ClassVar[tuple[str, ...]]
    """The stages of the programs that it takes."""

    gives: ClassVar[str]
    """The stage of the program that it gives; the one it was given where this is empty."""

    def run(self, module: Module) -> Module:
        """The new program. Raises `DistIRError` for what the user can mend."""
        ...


def name_of(step: Pass | type[Pass]) -> str:
    """Return the name of a pass, after its class: ``delay-reductions``."""
    kind = step if isinstance(step, type) else type(step)
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", kind.__name__).lower()
