"""Uplinks that several communications share: the transfers in flight on them, and how these slow the next one.

An uplink serves all transfers in flight at equal rates. A transfer of d seconds at the full bandwidth that starts when
others have r_1, r_2, ... seconds left ends after ``d + min(r_1, d) + min(r_2, d) + ...``: until then each of the others
gets as much service, or the rest that it needs. Program order decides: an op is slowed by those before it, and its own
time is not revised when a later one joins. So the last of the ops that overlap ends when all bytes have passed,
exactly, and an earlier one ends as if later ones were not there.

The devices of a class are in units of the same classes (`DeviceClasses`), so an uplink in one of two directions is
identified by its level and the first class of its unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

InFlight = tuple[int, tuple[int, ...]]
"""Transfers on a link: a time, and the femtoseconds of service that each still needs then, in ascending order."""
LinkState = tuple[int, ...]
"""`InFlight` in one tuple, empty for an idle link."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A communication's use of an uplink, in femtoseconds.

    It occupies the link for `occupied` at its full bandwidth, together with the other groups of the op, while its own
    bytes take `crossing` to cross it: longer, if other links are slower.
    """

    link: int
    occupied: int
    crossing: int

    def repeated(self, count: int) -> LinkUse:
        """Return the use by `count` equal communications in turn."""
        return LinkUse(self.link, count * self.occupied, count * self.crossing)


def delay(uses: Sequence[LinkUse], links: Mapping[int, InFlight], start: int) -> int:
    """Return by how much longer a communication takes that starts at a time, due to those in flight."""
    longest = 0
    for use in uses:
        if (in_flight := links.get(use.link)) is not None:
            others = sum([min(left, use.occupied) for left in _drained(in_flight, start)[1]])
            longest = max(longest, use.occupied + others - use.crossing)
    return longest


def with_transfer(in_flight: InFlight | None, start: int, occupied: int) -> InFlight:
    """Return the transfers in flight after another one has started."""
    time, left = _drained(in_flight, start) if in_flight is not None else (start, ())
    return max(time, start), tuple(sorted([*left, occupied]))


def relative(in_flight: InFlight | None, base: int) -> LinkState:
    """Return the state of a link relative to a time, from which on communications start."""
    if in_flight is None or in_flight[0] + sum(in_flight[1]) <= base:
        return ()
    return in_flight[0] - base, *in_flight[1]


def absolute(state: LinkState, base: int) -> InFlight:
    """Return the transfers of a state that is relative to `base`, and not idle."""
    return state[0] + base, state[1:]


def _drained(in_flight: InFlight, time: int) -> InFlight:
    """Return the transfers left at a later time; an earlier one counts as the last."""
    last, left = in_flight
    elapsed = time - last
    if elapsed <= 0:
        return in_flight
    while left:
        service = min(left[0], elapsed // len(left))
        if service < left[0]:
            return time, tuple([rest - service for rest in left])
        elapsed -= service * len(left)
        left = tuple([rest - service for rest in left if rest > service])
    return time, ()
