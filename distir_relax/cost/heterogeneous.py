"""Device groups of a machine that differ in speed or memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from distir_relax.errors import ProfileError
from distir_relax.support import shown


@dataclass(frozen=True, slots=True)
class Group:
    """A group of devices: those from the first to the last number of each of the `ranges`.

    Their compute and memory rates are `speed` times those of the machine; they have `memory` bytes, the machine's if
    None.
    """

    ranges: tuple[tuple[int, int], ...]
    speed: float = 1.0
    memory: float | None = None

    @property
    def last(self) -> int:
        """Return the highest device number."""
        return max(last for _, last in self.ranges)

    def without(self, count: int) -> Group | None:
        """Return the group without the first `count` devices of the machine; None if it is empty then."""
        ranges = tuple((max(first - count, 0), last - count) for first, last in self.ranges if last >= count)
        return replace(self, ranges=ranges) if ranges else None

    def __str__(self) -> str:
        return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in self.ranges)


def read_ranges(text: object, where: str) -> tuple[tuple[int, int], ...]:
    """Parse device numbers of a profile: ``"1"``, ``"0-3, 12"``. Raises `ProfileError` for anything else."""
    parts = text.split(",") if isinstance(text, str) else []
    matches = [match for part in parts if (match := _RANGE.fullmatch(part.strip()))]
    ranges = tuple((int(m["first"]), int(m["last"] or m["first"])) for m in matches)
    if not ranges or len(matches) < len(parts) or any(first > last for first, last in ranges):
        raise ProfileError(
            f"expected the numbers of devices 'devices' in [[group]], found {shown(text)}",
            where,
            'write them as text: devices = "4-7, 12"',
        )
    return ranges


def check_groups(groups: Sequence[Group], devices: int, where: str) -> None:
    """Raise `ProfileError` if a device is in two groups, or does not exist in the machine."""
    highest = max((group.last for group in groups), default=0)
    if groups and highest >= devices:
        raise ProfileError(f"a [[group]] names device {highest}, the machine has {devices}", where, "they begin with 0")
    ranges = sorted(bounds for group in groups for bounds in group.ranges)
    for (_, last), (first, _) in pairwise(ranges):
        if first <= last:
            raise ProfileError(f"device {first} is named twice in [[group]]", where, "a device is in one group")


_RANGE = re.compile(r"(?P<first>\d{1,7})(\s*-\s*(?P<last>\d{1,7}))?")
