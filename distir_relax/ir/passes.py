"""Pass interface: a frozen dataclass that transforms one program into another.

Its fields are its options; `takes` and `gives` are its input and output stages. Input and output programs are valid.
Other findings are attached to the module as records (`ir.records`).
"""

from __future__ import annotations

import re
from typing import ClassVar, Protocol

from distir_relax.ir.program import Module


class Pass(Protocol):
    """One step of a compiler pipeline."""

    takes: ClassVar[tuple[str, ...]]
    """The stages of programs that it accepts."""

    gives: ClassVar[str]
    """The stage of its result; empty for that of its input."""

    def run(self, module: Module) -> Module:
        """Transform the program. Raises `DistIRError` for errors that the user can fix."""
        ...


def pass_name(step: Pass | type[Pass]) -> str:
    """Return the name of a pass, after its class: ``delay-reductions``."""
    kind = step if isinstance(step, type) else type(step)
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", kind.__name__).lower()
