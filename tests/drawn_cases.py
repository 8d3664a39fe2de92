"""Which tests the suite runs, where all of them would take too long: the marks ``drawn`` and ``sweep``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256

import pytest


def draw(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, in order, and the others.

    A test with ``@pytest.mark.sweep`` is one of the others: it repeats at length what shorter ones show.
    Of a parametrized test with ``@pytest.mark.drawn(n)``, n cases are run: each is the one that has most values of
    parameters that none before it has; among equals the names decide, as random and the same everywhere. So values of
    each parameter are seen early, and a case more changes little of what is drawn.
    """
    cases: dict[tuple[object, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn"):
            cases[item.path, getattr(item, "cls", None), item.originalname].append(item)  # type: ignore[attr-defined]
    left_out = {item for several in cases.values() for item in set(several) - _drawn(several)}
    left_out |= {item for item in items if item.get_closest_marker("sweep")}
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]


def _drawn(cases: Sequence[pytest.Item]) -> set[pytest.Item]:
    (number,) = cases[0].get_closest_marker("drawn").args  # type: ignore[union-attr]
    left = sorted(cases, key=lambda case: sha256(case.name.encode()).digest())
    seen: set[tuple[str, int]] = set()
    drawn: set[pytest.Item] = set()
    while left and len(drawn) < number:
        best = max(left, key=lambda case: len(_values(case) - seen))
        left.remove(best)
        drawn.add(best)
        seen |= _values(best)
    return drawn


def _values(case: pytest.Item) -> set[tuple[str, int]]:
    """Parameters and which of their values, which all cases share, they have here."""
    parameters = case.callspec.params  # type: ignore[attr-defined]
    return {(name, id(value)) for name, value in parameters.items()}
