"""How an op that is not parallel along a sequence continues it: the facet `IncrementalForm`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distir_relax.ir import Attribute, Op, TensorType, Value


@dataclass(frozen=True)
class IncrementalStep:
    """One op of an incremental program: its operands with the positions that its rule asks for, and its states.

    A dim of ``sequence + c`` elements has `c` extra positions. Its new positions are those from ``past + min(c, 0)`` up
    to ``past + new + c``: with `c` more than zero the last ones are computed again by the next call, and with `c` less
    than zero the first call has some before the first position, whose values are arbitrary.
    """

    g: Any
    """The builder of the incremental program."""
    operands: Sequence[Value]
    """Along factors of the result they have the new positions, along all others all of them."""
    attrs: Mapping[str, Any]
    """Those of the op over all positions."""
    result: TensorType
    """The type of the new positions of the result."""
    dim: int
    """The dim of the result along which the form continues."""
    extra: int
    """The number of extra positions of the result along `dim`."""
    extras: Sequence[int | None]
    """The number of extra positions of each operand along `dim`; None for one that is not along the sequence there."""
    past: int
    """The number of earlier positions, symbolic."""
    new: int
    """The number of new positions, symbolic."""
    declare: Callable[[TensorType, str, int], Value]
    keep: Callable[[Value, Value], None]
    """Lets the second value be what the next call finds in the first, a state."""

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Emit an op of the incremental program, and return its result."""
        return self.g.emit(name, *operands, **attrs)

    def state(self, kind: TensorType, name: str) -> Value:
        """Declare a state of a fixed shape; it is zero before the first call."""
        return self.declare(kind, name, -1)


@dataclass(frozen=True)
class IncrementalForm:
    """What an op carries from one call to the next along a dim in which it is not parallel."""

    dims: Callable[[Op], Collection[int]]
    """The dims of the result along which the form continues, one of them at a time."""
    compute: Callable[[IncrementalStep], Value | tuple[Value, ...]]
    """Emits the new positions of the result; of an op with several results, all of them."""
    carries: bool = False
    """Whether it has a state."""
    of_states: str = ""
    """The op that appends to growing states itself, where operands 1 and 2 are views of them (`AttendStates`)."""
    is_windowed: bool = False
    """Whether a position of the result reads a window of positions, at a constant distance, of one operand.

    This operand has the sequence along the same dim, and its new positions too; sizes may have extra positions.
    """
