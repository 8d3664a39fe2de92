"""Types of values, by stage. A size is a number, or symbolic (`layout.symbolic_size`).

``TensorType``   global, ranked and executable stages: a tensor of one device
``DTensorType``  sharded stage: a global tensor with its placement along each mesh axis
``PlacedType``   distributed and executable stages: one local tensor on each device of a set; shapes may differ

In the executable stage tensors have a `form`: ``packed``, a weight in the layout of a kernel (weights that are packed
together are one object), and ``each``, one tensor for each request of a step, whose sizes are those of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from distir_relax.layout import (
    DTYPES,
    Placement,
    generic_value,
    is_symbolic,
    print_placements,
    print_sizes,
    typical_value,
)


@dataclass(frozen=True, slots=True)
class PerRank:
    """A size per device: `values[i]` is for the i-th device of the op's device set."""

    values: tuple[int, ...]

    def __str__(self) -> str:
        runs: list[tuple[int, int]] = []
        for value in self.values:
            if runs and runs[-1][0] == value:
                runs[-1] = (value, runs[-1][1] + 1)
            else:
                runs.append((value, 1))
        if len(self.values) <= 8 or len(runs) > len(self.values) // 2:
            return print_sizes(self.values, "|")
        if is_symbolic(self.values):
            return " | ".join(f"({value})*{count}" for value, count in runs)
        return "|".join(f"{value}*{count}" for value, count in runs)


Size = int | PerRank


def per_rank(values: list[int] | tuple[int, ...]) -> Size:
    """Return a `Size` of one value per device: a single number if all are equal."""
    return values[0] if len(set(values)) == 1 else PerRank(tuple(values))


def at_rank(size: Size, index: int) -> int:
    """Return the number for the device at `index` in the device set."""
    return size.values[index] if isinstance(size, PerRank) else size


PACKED, EACH = "packed", "each"
"""The forms of tensors in the executable stage, besides plain ones."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor of `shape` and `dtype` on one device; `form` is that of the executable stage."""

    shape: tuple[int, ...]
    dtype: str
    form: str = ""

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size in bytes: a number; that of the typical sizes, if some are symbolic."""
        elements = self.elements
        return (elements if type(elements) is int else self.typical.elements) * DTYPES[self.dtype][1]

    @property
    def typical(self) -> TensorType:
        """The type with typical sizes instead of symbolic ones."""
        return replace(self, shape=tuple(map(typical_value, self.shape))) if is_symbolic(self.shape) else self

    @property
    def generic(self) -> TensorType:
        """The type with large primes instead of symbols (`layout.symbolic_size.generic_value`)."""
        return replace(self, shape=tuple(map(generic_value, self.shape))) if is_symbolic(self.shape) else self

    @property
    def plain(self) -> TensorType:
        """The type without its form."""
        return TensorType(self.shape, self.dtype) if self.form else self

    def __str__(self) -> str:
        return f"{DTYPES[self.dtype][0]}[{print_sizes(self.shape, ',')}]{_word(self.form)}"


@dataclass(frozen=True, slots=True)
class DTensorType:
    """A tensor of global `shape` on mesh number `mesh`, with one placement per mesh axis."""

    shape: tuple[int, ...]
    dtype: str
    placements: tuple[Placement, ...]
    mesh: int = 0

    @property
    def tensor(self) -> TensorType:
        """The type without the layout."""
        return TensorType(self.shape, self.dtype)

    def __str__(self) -> str:
        return f'R.DTensor({self.shape!r}, "{self.dtype}", "mesh[{self.mesh}]", "{print_placements(self.placements)}")'


@dataclass(frozen=True, slots=True)
class PlacedType:
    """One local tensor on each of `devices` (ascending). A dim is a number, or one number per device."""

    shape: tuple[Size, ...]
    dtype: str
    devices: tuple[int, ...]
    form: str = ""

    def local(self, index: int) -> TensorType:
        """Return the type on the device at `index` in `devices`."""
        # Inlined `at_rank`: the simulator calls this for every operand.
        shape = tuple([size.values[index] if isinstance(size, PerRank) else size for size in self.shape])
        return TensorType(shape, self.dtype, self.form)

    @property
    def plain(self) -> PlacedType:
        """The type without its form."""
        return PlacedType(self.shape, self.dtype, self.devices) if self.form else self

    def __str__(self) -> str:
        is_spaced = any(is_symbolic(n.values if isinstance(n, PerRank) else n) for n in self.shape)
        shape = (", " if is_spaced else ",").join(map(str, self.shape))
        return f"{DTYPES[self.dtype][0]}[{shape}] @ {print_devices(self.devices)}{_word(self.form)}"


@dataclass(frozen=True, slots=True)
class Untyped:
    """The missing type of a value in program text, with its `devices` if present."""

    devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"? @ {print_devices(self.devices)}" if self.devices else "?"


Type = TensorType | DTensorType | PlacedType | Untyped


def _word(form: str) -> str:
    return f" {form}" if form else ""


def print_devices(devices: tuple[int, ...]) -> str:
    """Print ``{0,1}``; a long range is ``{0..1023}``."""
    if len(devices) > 3 and devices == tuple(range(devices[0], devices[-1] + 1)):
        return f"{{{devices[0]}..{devices[-1]}}}"
    return f"{{{','.join(map(str, devices))}}}"
