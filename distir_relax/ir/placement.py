"""How a tensor lies on a device mesh: one placement per mesh axis.

=================  ==========================================================================
``R``              replicated: every device along the axis holds all of it
``S[dim]``         split along ``dim``; how is not yet decided
``S[dim: a|b]``    split along ``dim``; index 0 along the axis holds ``a`` elements, index 1 ``b``
``S[dim: chunk]``  split along ``dim`` into blocks of ``ceil(n / ranks)``, as torch and TVM do
``I[op]``          intermediate: each device holds a term of a reduction still to be made
``At[i]``          only index ``i`` along the axis holds it: an input or output of one pipeline stage
=================  ==========================================================================

A cut may have several segments, each split by itself: ``S[1: 3*(384|384)]`` is a fused QKV weight of
2304 columns whose three parts are each cut in two, so a device holds three slices, not one block.

``I`` is the TVM RFC's intermediate type; ``I_SUM``, ``P(sum)`` and ``Partial(sum)`` are read too.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from distir_relax.errors import PlacementError

REDUCTIONS = ("sum", "mean", "min", "max")

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """An n-dimensional grid of devices, numbered row by row.

    `shape` is the number of devices along each axis; `axes` names the axes (``("dp", "tp")``).
    Raises `PlacementError` for an empty mesh, or for names that do not match the shape.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        axes = tuple(self.axes) or tuple(f"axis{i}" for i in range(len(self.shape)))
        object.__setattr__(self, "axes", axes)
        if not self.shape or any(n < 1 for n in self.shape):
            raise PlacementError(f"a device mesh needs at least one device along each axis, found shape {self.shape}")
        if len(axes) != len(self.shape) or len(set(axes)) != len(axes):
            raise PlacementError(
                f"a mesh of shape {self.shape} needs {len(self.shape)} distinct axis names, found {axes}"
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The index along each axis of device `rank`."""
        index = []
        for n in reversed(self.shape):
            rank, i = divmod(rank, n)
            index.append(i)
        return tuple(reversed(index))

    def __str__(self) -> str:
        axes = "".join(f"{json.dumps(axis)}, " for axis in self.axes).rstrip(" " if len(self.axes) == 1 else ", ")
        return f"device_mesh({self.shape!r}, ({axes}))"


@dataclass(frozen=True, slots=True)
class Segment:
    """`repeat` equal stretches of a dim, each split into `sizes` elements, index by index along the mesh axis."""

    repeat: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        sizes = "|".join(map(str, self.sizes))
        return sizes if self.repeat == 1 else f"{self.repeat}*({sizes})"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a dim is divided along one mesh axis: its segments in order."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, *sizes: int) -> Cut:
        """One segment with the given sizes."""
        return cls((Segment(1, sizes),))

    @property
    def ranks(self) -> int:
        """How many shards the cut makes."""
        return len(self.segments[0].sizes)

    @property
    def total(self) -> int:
        """The number of elements of the whole dim."""
        return sum(s.repeat * sum(s.sizes) for s in self.segments)

    @property
    def is_block(self) -> bool:
        """Whether every shard is one contiguous block."""
        return len(self.segments) == 1 and self.segments[0].repeat == 1

    def local_sizes(self) -> tuple[int, ...]:
        """The number of elements that each index along the axis holds."""
        return tuple(sum(s.repeat * s.sizes[i] for s in self.segments) for i in range(self.ranks))

    def intervals(self, index: int) -> list[Interval]:
        """The intervals [start, stop) of the dim that `index` holds, in order; adjacent ones are merged."""
        found: list[Interval] = []
        start = 0
        for segment in self.segments:
            before, width, stride = sum(segment.sizes[:index]), segment.sizes[index], sum(segment.sizes)
            for _ in range(segment.repeat):
                if width:
                    first = start + before
                    if found and found[-1][1] == first:
                        found[-1] = (found[-1][0], first + width)
                    else:
                        found.append((first, first + width))
                start += stride
        return found

    def __str__(self) -> str:
        return " + ".join(map(str, self.segments))


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device along the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along `dim`. `cut` says how; None leaves it to propagation, `chunk` asks for ceil-sized blocks."""

    dim: int
    cut: Cut | None = None
    chunk: bool = False

    def __str__(self) -> str:
        how = f": {self.cut}" if self.cut else ": chunk" if self.chunk else ""
        return f"S[{self.dim}{how}]"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device along the axis holds one term; reducing them with `reduction` gives the value."""

    reduction: str = "sum"

    def __str__(self) -> str:
        return f"I[{self.reduction}]"


@dataclass(frozen=True, slots=True)
class At:
    """Only the devices at `index` along the axis hold the tensor; how the devices of a distributed program get it."""

    index: int

    def __str__(self) -> str:
        return f"At[{self.index}]"


Placement = Replicate | Shard | Partial | At
R = Replicate()


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What two lists of intervals, each in order, have in common, in order."""
    found = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return [(start, stop) for start, stop in found if start < stop]


def held_intervals(placements: Sequence[Placement], dim: int, size: int, coordinates: Sequence[int]) -> list[Interval]:
    """The intervals of a dim of `size` elements that the device at `coordinates` holds, in order.

    Each mesh axis that cuts the dim says by itself what its indices hold of it; a device holds what all of them leave
    it. The cuts of the axes must be decided.
    """
    held = [(0, size)] if size else []
    for placement, index in zip(placements, coordinates, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            assert placement.cut is not None
            held = intersect(held, placement.cut.intervals(index))
    return held


def holds(placements: Sequence[Placement], coordinates: Sequence[int]) -> bool:
    """Whether the device at `coordinates` holds anything of a tensor: `At` leaves out the others along its axis."""
    return all(not isinstance(p, At) or p.index == i for p, i in zip(placements, coordinates, strict=True))


def block_bounds(placements: Sequence[Placement], dim: int, size: int, mesh: Sequence[int]) -> tuple[int, ...] | None:
    """Where the blocks of a dim of `size` elements begin, one for each device along the axes that cut it, and its end.

    The devices are taken row by row. None unless each holds one block (or nothing) and the blocks follow each other in
    that order. `placements` may be those of the first axes of `mesh` only.
    """
    cuts = [(axis, p.cut) for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    bounds = [0]
    for indices in itertools.product(*(range(mesh[axis]) for axis, _ in cuts)):
        held = [(0, size)]
        for (_, cut), index in zip(cuts, indices, strict=True):
            assert cut is not None
            held = intersect(held, cut.intervals(index))
        if len(held) > 1 or any(start != bounds[-1] for start, _ in held):
            return None
        bounds.append(held[0][1] if held else bounds[-1])
    return tuple(bounds)


def parse_placement(text: str) -> Placement:
    """Read one placement, in our spelling, the RFC's or torch's.

    Raises `PlacementError` when the text is none of them.
    """
    stripped = text.strip()
    if stripped in ("R", "Replicate()"):
        return R
    if match := _SHARD.fullmatch(stripped):
        how, dim = (match["how"] or "").strip(), int(match["dim"] or match["torch"])
        if how == "chunk":
            return Shard(dim, chunk=True)
        return Shard(dim, _parse_cut(how, text) if how else None)
    if match := _AT.fullmatch(stripped):
        return At(int(match["index"]))
    if match := _PARTIAL.fullmatch(stripped):
        reduction = (match["ours"] or match["rfc"] or match["torch"]).lower()
        if reduction in REDUCTIONS:
            return Partial(reduction)
    raise PlacementError(
        f"{text!r} is not a placement",
        hint="write R, S[dim], S[dim: 64|63], or I[sum] (also I[mean], I[min], I[max])",
    )


@lru_cache(maxsize=4096)
def parse_placements(text: str) -> tuple[Placement, ...]:
    """Read one placement per mesh axis, separated by commas: ``"S[0], R"``."""
    return tuple(parse_placement(part) for part in re.split(r",(?![^(\[]*[)\]])", text))


def print_placements(placements: tuple[Placement, ...]) -> str:
    """The inverse of `parse_placements`."""
    return ", ".join(map(str, placements))


_SHARD = re.compile(r"S\[\s*(?P<dim>-?\d+)\s*(?::(?P<how>[^\]]+))?\]|(?:S|Shard)\((?:dim=)?(?P<torch>-?\d+)\)")
_AT = re.compile(r"At\[\s*(?P<index>\d+)\s*\]")
_PARTIAL = re.compile(r"I\[(?P<ours>\w+)\]|I_(?P<rfc>[a-zA-Z]+)|(?:P|Partial)\(['\"]?(?P<torch>\w+)['\"]?\)")
_SEGMENT = re.compile(r"(?:(?P<repeat>\d+)\s*\*\s*)?\(?\s*(?P<sizes>\d+(?:\s*\|\s*\d+)*)\s*\)?")


def _parse_cut(text: str, whole: str) -> Cut:
    segments = []
    for part in text.split("+"):
        match = _SEGMENT.fullmatch(part.strip())
        if not match:
            raise PlacementError(
                f"{whole!r} is not a placement: cannot read the sizes {text!r}", hint="write S[1: 64|63]"
            )
        sizes = tuple(int(n) for n in match["sizes"].split("|"))
        segments.append(Segment(int(match["repeat"] or 1), sizes))
    if len({len(s.sizes) for s in segments}) > 1:
        raise PlacementError(f"{whole!r}: every segment must list one size per device along the axis")
    return Cut(tuple(segments))
