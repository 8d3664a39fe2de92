"""What is computed from numbers of which there are few: the groups of rows, and how many rows each group has.

Proofs by trying all there is. A row's group is one of a few numbers: an op that makes each element from one element is
known when it is known for each of them (a *table*). A sum over all rows then depends on nothing but how many rows each
group has, and what is linear in these *tallies* is known when it is known for one row of each group alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distir_relax.errors import DistIRError
from distir_relax.ir import Op, Value
from distir_relax.ops import PARALLEL, Rule, Trait, evaluate, lookup
from distir_relax.ops.table.dispatch import type_of

if TYPE_CHECKING:
    import torch

MOST_NUMBERS = 1 << 16
"""Of larger tensors it is not asked what they hold."""


@dataclass
class Tallies:
    """What is known of values of a program: `made` leads from names to ops, `constants` to data.

    `ids` are the groups of `rows` rows, numbers from 0 to `count` - 1.
    """

    made: Mapping[str, Op]
    constants: Mapping[str, torch.Tensor]
    ids: str
    count: int
    rows: int
    _numbers: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def numbers(self, name: str) -> torch.Tensor | None:
        """What a value holds in every run; None where that is not known."""
        if name not in self._numbers:
            self._numbers[name] = self._fixed(name)
        return self._numbers[name]

    def table(self, name: str) -> torch.Tensor | None:
        """What an element of a value is for each group that its row may be of; None where it depends on more."""
        import torch

        if name == self.ids:
            return torch.arange(self.count)
        op = self.made.get(name)
        if op is None or not op.operands or len(op.results) > 1 or op.callee:
            return None
        given = [self.table(v.name) if v.tensor.shape else self.numbers(v.name) for v in op.operands]
        inside = [i for i, v in enumerate(op.operands) if v.tensor.shape]
        if any(x is None for x in given) or not is_rowwise(op, inside):
            return None
        return run(op, [x for x in given if x is not None])

    def tally(self, name: str) -> torch.Tensor | None:
        """What a value is for one row of each group alone, (groups, its dims), where it is linear in the tallies."""
        fixed = self.numbers(name)
        if fixed is not None:
            return None if bool(fixed.any()) else fixed.new_zeros((self.count, *fixed.shape))
        op = self.made.get(name)
        if op is None or not op.operands or len(op.results) > 1 or op.callee:
            return None
        summed = self._summed(op)
        if summed is not None:
            return summed
        found = {i: tally for i, v in enumerate(op.operands) if (tally := self.tally(v.name)) is not None}
        others = {i: x for i, v in enumerate(op.operands) if i not in found and (x := self.numbers(v.name)) is not None}
        if not found or len(found) + len(others) < len(op.operands):
            return None
        sets = lookup(op.name).linear_sets(len(op.operands), op.attrs)
        if not any(found.keys() <= linear for linear in sets) and not self._keeps_whole(op, found):
            return None
        each = [
            run(op, [found[i][e] if i in found else others[i] for i in range(len(op.operands))])
            for e in range(self.count)
        ]
        return _stacked(each)

    def _fixed(self, name: str) -> torch.Tensor | None:
        if name in self.constants:
            known = self.constants[name]
            return None if known.is_meta or known.numel() > MOST_NUMBERS else known
        op = self.made.get(name)
        if op is None or len(op.results) > 1 or op.callee or op.results[0].tensor.elements > MOST_NUMBERS:
            return None
        given = [self.numbers(v.name) for v in op.operands]
        if any(x is None for x in given) or not lookup(op.name).computes:
            return None
        return run(op, [x for x in given if x is not None])

    def _summed(self, op: Op) -> torch.Tensor | None:
        """A sum over rows, each of which is what its group makes it."""
        tables = [self.table(v.name) for v in op.operands]
        given = [t for t in tables if t is not None]
        rule = rule_of(op)
        if len(given) < len(tables) or len({rule.operands[i] for i in range(len(tables))}) > 1:
            return None
        dims, expanded = rule.operands[0], lookup(op.name, op.location).split.expand
        if len(dims) != 1 or len(dims[0]) != 1 or rule.factors[dims[0][0]].kind != "sum":
            return None
        # What is run in parts by other ops, such as a mean, is more than the sum of its parts.
        if "*" in expanded or rule.factors[dims[0][0]].name in expanded:
            return None
        return _stacked([run(op, [t[e : e + 1] for t in given]) for e in range(self.count)])

    def _keeps_whole(self, op: Op, found: Mapping[int, torch.Tensor]) -> bool:
        """Whether an op leaves whole numbers as they are, as many as there can be: a cast of counts."""
        import torch

        if len(op.operands) != 1 or Trait.POINTWISE not in lookup(op.name).traits:
            return False
        (tally,) = found.values()
        if bool((tally < 0).any()) or bool((tally != tally.to(torch.int64)).any()):
            return False
        counts = torch.arange(self.rows * int(tally.max() if tally.numel() else 0) + 1)
        kept = run(op, [counts.to(tally.dtype)])
        return kept is not None and kept.shape == counts.shape and bool((kept == counts).all())


def run(op: Op, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The result of an op of one result on these tensors, which may be of other sizes than its operands.

    None where it cannot run on them: its attributes may be for others.
    """
    values = tuple(Value(f"x{i}", type_of(x)) for i, x in enumerate(tensors))
    try:
        return evaluate(Op(op.name, values, (), op.attrs, op.location), tensors)[0]
    except DistIRError:
        return None


def _stacked(each: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    import torch

    found = [x for x in each if x is not None]
    return torch.stack(found) if found and len(found) == len(each) else None


def rule_of(op: Op) -> Rule:
    """The factor rule of an op of the global stage."""
    kinds = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    return lookup(op.name, op.location).rule_for(kinds[0], op.attrs, kinds[1])


def is_rowwise(op: Op, inside: Sequence[int]) -> bool:
    """Whether each row of the results is made of the rows at its place of the operands `inside`, wherever it stands.

    That is what a parallel factor says that is not told by position: it may be cut anywhere.
    """
    split, rule = lookup(op.name, op.location).split, rule_of(op)
    rows = {rule.operands[i][0] for i in inside}
    if len(rows) != 1 or len(row := next(iter(rows))) != 1:
        return False
    factor = rule.factors[row[0]]
    told = split.positional | split.expand.keys()
    others = [dims for i, dims in enumerate(rule.operands) if i not in inside]
    elsewhere = any(row[0] in dim for dims in others for dim in dims)
    whole = all(dims and dims[0] == row for dims in rule.results)
    return factor.kind == PARALLEL and factor.name not in told and whole and not elsewhere and not rule.windows
