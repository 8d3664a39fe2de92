"""What a pass is: a frozen dataclass that makes one program of another.

Its fields are its options; `takes` and `gives` are the stages that it goes between. A pass expects a valid program and
gives one. What it finds besides goes with the module, as records (`ir.records`).
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
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


def name_of(step: Pass) -> str:
    """The name of a pass, after its class: ``delay-reductions``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(step).__name__).lower()


def print_pass(step: Pass) -> str:
    """A pass with those of its options that are not as by default: ``to-dist-ir{tail=pad}``."""
    if not is_dataclass(step):
        return name_of(step)
    given = (f for f in fields(step) if f.repr and getattr(step, f.name) != f.default)
    options = ",".join(f"{f.name}={getattr(step, f.name)}" for f in given)
    return f"{name_of(step)}{{{options}}}" if options else name_of(step)
