"""Pass interface: a frozen dataclass that transforms one program into another.

Its fields are its options; `takes` and `gives` are its input and output stages. Input and output programs are valid.
Other findings are attached to the module as records (`ir.records`).
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
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


def pass_name(compiler_pass: Pass) -> str:
    """Return the name of a pass, from its class: ``delay-reductions``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(compiler_pass).__name__).lower()


def print_pass(compiler_pass: Pass) -> str:
    """Print a pass with its non-default options: ``to-dist-ir{tail=pad}``."""
    if not is_dataclass(compiler_pass):
        return pass_name(compiler_pass)
    changed = (f for f in fields(compiler_pass) if f.repr and getattr(compiler_pass, f.name) != f.default)
    options = ",".join(f"{f.name}={getattr(compiler_pass, f.name)}" for f in changed)
    return f"{pass_name(compiler_pass)}{{{options}}}" if options else pass_name(compiler_pass)
