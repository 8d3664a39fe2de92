"""Result of a bisection, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distir_relax.support.units import count, listed

CAUSES = {
    "execution": "the backend or the hardware: on the same operands, the op's definition gives another result",
    "communication": "the communication: its operands are right, its result is not",
    "definition": "the op's definition: on this rank's operands it gives this result, not the part of the whole",
    "other": "the other run: this one agrees with the model there; bisect the other one by itself",
    "unknown": "not determined: some operands are not variables of the program",
}
"""Causes of a wrong value."""


@dataclass(frozen=True)
class WrongValue:
    """The first wrong value: its op in the ranks' programs, the op's place in the model, and its largest difference.

    `op` is the text of the op, on `ranks`. The element at the global `index` of the model's value `name` is `found`,
    and `expected`, an error of `error` (`rounding.difference`); rounding explains one of `bound`. `cause` is one of
    `CAUSES`; for "other", it is the run that this one is compared with that differs from the model.
    """

    name: str
    op: str
    location: str
    ranks: tuple[int, ...]
    error: float
    bound: float
    index: tuple[int, ...]
    found: float
    expected: float
    cause: str


@dataclass(frozen=True)
class OpError:
    """Errors of the result `name` of an op (by name), root mean squares relative to that in the other precision.

    `added` is the error on operands that have the errors of the ops before, `total` includes these.
    """

    name: str
    op: str
    location: str
    added: float
    total: float


@dataclass(frozen=True, repr=False)
class Bisection:
    """Comparison of a plan with its model, or with another run (`against`), value by value.

    `values` of the model's values were compared, of all `ops`; `wrong_values` of them are wrong, `wrong` is the first.
    `outputs` are the errors of the outputs by name, of which `wrong_outputs` exceed rounding. A fault `is_hidden`
    if the outputs are right in runs that record values. `headroom` is the largest error of a right value relative to
    its bound. In a comparison of two precisions (`is_ranking`) no value is wrong; `errors` are the ops with the largest
    added errors. `runs` is the number of runs, in `seconds` with the reference.
    """

    name: str
    ranks: int
    backend: str
    against: str = ""
    ops: int = 0
    values: int = 0
    wrong: WrongValue | None = None
    wrong_values: int = 0
    outputs: Mapping[str, float] = field(default_factory=dict)
    wrong_outputs: tuple[str, ...] = ()
    headroom: float = 0.0
    errors: Sequence[OpError] = ()
    is_ranking: bool = False
    is_hidden: bool = False
    runs: int = 0
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether no value and no output is wrong."""
        return self.wrong is None and not self.wrong_outputs

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain numbers and lists, for JSON; infinite errors are null."""
        plain: dict[str, Any] = _finite(asdict(self))
        return {**plain, "is_right": self.is_right}

    def _lines(self) -> list[str]:
        against = f" against {self.against}" if self.against else ""
        runs = f"{count(self.runs, 'run')}, {self.seconds:.2f} s"
        lines = [f"{self.name}: {count(self.ranks, 'rank')}, {self.backend}{against}, {runs}"]
        if self.is_ranking:
            return [*lines, *self._ranking()]
        # A training step has an output for each weight.
        shown = sorted(self.outputs, key=lambda name: -self.outputs[name])
        outputs = listed([f"{name} {self.outputs[name]:.2g}" for name in shown], 4)
        lines += [f"  errors of outputs: {outputs}"] if outputs else []
        if self.wrong is not None:
            lines += _wrong_lines(self.wrong)
            rest = self.wrong_values - 1
            lines.append(f"  {count(rest, 'other value')} of {self.values:,} compared are wrong, too")
        elif self.wrong_outputs:
            lines += [
                f"  wrong: {listed(self.wrong_outputs, 4)}, though the {self.values:,} values compared are right",
                f"  {_HIDDEN if self.is_hidden else _RETURNED}",
            ]
        else:
            lines.append(
                f"  right: {self.values:,} values of {self.ops:,} ops, on all ranks; "
                f"the largest error is {self.headroom:.0%} of its bound"
            )
        return lines

    def _ranking(self) -> list[str]:
        lines = [f"  {self.values:,} values compared; errors relative to the result, root mean square", ""]
        lines.append(f"  {'added':>9}  {'total':>9}  op")
        for row in self.errors:
            place = f"  # {row.location}" if row.location else ""
            lines.append(f"  {row.added:>9.2e}  {row.total:>9.2e}  %{row.name} = {row.op}{place}")
        return lines


_HIDDEN = "the outputs are right, too, when values are recorded: the fault needs fused ops or reused memory"
_RETURNED = "the programs return other values, or compute them from values that were not compared"


def _wrong_lines(wrong: WrongValue) -> list[str]:
    ranks = f"rank{'' if len(wrong.ranks) == 1 else 's'} {listed(list(map(str, wrong.ranks)), 8)}"
    return [
        f"  first wrong value: %{wrong.name}, on {ranks}",
        f"    op     {wrong.op}",
        f"    model  {wrong.location or 'unknown'}",
        f"    error  {wrong.error:.3g} at {list(wrong.index)}: found {wrong.found:.6g}, expected {wrong.expected:.6g}; "
        f"rounding explains {wrong.bound:.2g}",
        f"    cause  {CAUSES[wrong.cause]}",
    ]


def _finite(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_finite(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item
