"""Devices of a machine that are unlike its others: slower or faster, with more memory or less."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from distir_relax.errors import ProfileError
from distir_relax.support import shown


@dataclass(frozen=True, slots=True)
class Group:
    """Some devices of a machine: those from the first to the last number of each of the `ranges`.

    They compute, and read and write memory, at `speed` times the rates of the machine, and have `memory` bytes, the
    machine's where that is None.
    """

    ranges: tuple[tuple[int, int], ...]
    speed: float = 1.0
    memory: float | None = None

    @property
    def last(self) -> int:
        """The highest of them."""
        return max(last for _, last in self.ranges)

    def without(self, count: int) -> Group | None:
        """The group where the first `count` devices of the machine are left out; None where nothing of it stays."""
        kept = tuple((max(first - count, 0), last - count) for first, last in self.ranges if last >= count)
        return replace(self, ranges=kept) if kept else None

    def __str__(self) -> str:
        return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in self.ranges)


def read_ranges(text: object, where: str) -> tuple[tuple[int, int], ...]:
    """Device numbers as a profile has them: ``"1"``, ``"0-3, 12"``. Raises `ProfileError` for anything else."""
    parts = text.split(",") if isinstance(text, str) else []
    found = [match for part in parts if (match := _RANGE.fullmatch(part.strip()))]
    ranges = tuple((int(m["first"]), int(m["last"] or m["first"])) for m in found)
    if not ranges or len(found) < len(parts) or any(first > last for first, last in ranges):
        raise ProfileError(
            f"expected the numbers of devices 'devices' in [[group]], found {shown(text)}",
            where,
            'write them as text: devices = "4-7, 12"',
        )
    return ranges


def check_groups(groups: Sequence[Group], devices: int, where: str) -> None:
    """Raise `ProfileError` where a device is in two groups, or is none of the machine's."""
    highest = max((group.last for group in groups), default=0)
    if groups and highest >= devices:
        raise ProfileError(f"a [[group]] names device {highest}, the machine has {devices}", where, "they begin with 0")
    ranges = sorted(bounds for group in groups for bounds in group.ranges)
    for (_, last), (first, _) in pairwise(ranges):
        if first <= last:
            raise ProfileError(f"device {first} is named twice in [[group]]", where, "a device is in one group")


_RANGE = re.compile(r"(?P<first>\d{1,7})(\s*-\s*(?P<last>\d{1,7}))?")
