"""Counterexample of a plan, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distir_relax.support.units import count, listed

_SHOWN = 8
"""Maximum number of elements of the inputs in a text."""
_IN_JSON = 1000
"""Maximum number of elements of the inputs in JSON."""


@dataclass(frozen=True)
class Element:
    """An element of an input: the name, the index, and the value."""

    input: str
    index: tuple[int, ...]
    value: float

    def __str__(self) -> str:
        return f"{self.input}{list(self.index) or ''} = {self.value:g}"


@dataclass(frozen=True)
class Difference:
    """An element of an output that two programs compute differently; `ranks` are those that have `found`.

    `failure` says why the second program cannot run, if the first one can.
    """

    output: str = ""
    index: tuple[int, ...] = ()
    found: float = 0.0
    expected: float = 0.0
    ranks: tuple[int, ...] = ()
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return f"the run fails: {self.failure}"
        at = f" at {list(self.index)}" if self.index else ""
        on = f" on {_ranks(self.ranks)}" if self.ranks else ""
        found, expected = _shown(self.found, self.expected)
        return f"the output {self.output!r}{at} is {found}{on}, and not {expected}"


@dataclass(frozen=True)
class Counterexample:
    """The result of a search for the smallest input that shows a mistake; `difference` is None if none was found.

    `elements` are those of the inputs that are not zero, `sizes` the values of symbolic sizes. `inputs` has the number
    of elements of each input, and `tried` is the number of inputs on which the programs were compared. `is_smallest`
    says that no element can be zero, unless time was over before. `reason` says why nothing was compared.
    """

    difference: Difference | None = None
    elements: Sequence[Element] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, int] = field(default_factory=dict)
    tried: int = 0
    is_smallest: bool = True
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"no input was tried: {self.reason}"
        if self.difference is None:
            return f"no input of {self.tried} tried shows a difference"
        sizes = [f"{name} = {size}" for name, size in self.sizes.items()]
        kind = "smallest input" if self.is_smallest else "smallest input until time was over"
        return f"{kind}: {', '.join([*sizes, *self._inputs()])}: {self.difference}"

    def _inputs(self) -> list[str]:
        by_input: dict[str, list[Element]] = {}
        for element in self.elements:
            by_input.setdefault(element.input, []).append(element)
        texts: list[str] = []
        rest = 0
        for name, elements in by_input.items():
            values = {element.value for element in elements}
            if len(elements) == self.inputs[name] > 1 and len(values) == 1:
                texts.append(f"{name} = {elements[0].value:g} everywhere")
                continue
            shown = elements[: max(0, _SHOWN - len(texts))]
            texts += map(str, shown)
            rest += len(elements) - len(shown)
        if rest:
            texts.append(f"and {count(rest, 'further element')}")
        return [*texts, "all else 0" if texts else "all 0"]

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values, for JSON; numbers that are not finite are null."""
        found = self.difference
        return {
            "text": str(self),
            "sizes": dict(self.sizes),
            "elements": [[e.input, list(e.index), _finite(e.value)] for e in self.elements[:_IN_JSON]],
            "output": None if found is None else found.output,
            "index": None if found is None else list(found.index),
            "found": None if found is None else _finite(found.found),
            "expected": None if found is None else _finite(found.expected),
            "failure": "" if found is None else found.failure,
            "ranks": [] if found is None else list(found.ranks),
            "tried": self.tried,
            "is_smallest": self.is_smallest,
        }


def _shown(*values: float) -> list[str]:
    """Format different numbers, to six digits or as many as distinguish them."""
    texts: list[str] = []
    for digits in range(6, 18):
        texts = ["not a number" if math.isnan(value) else f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 0``, ``ranks 0, 1 and 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    texts = list(map(str, ranks))
    return f"ranks {listed(texts, 8)}" if len(texts) > 8 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
