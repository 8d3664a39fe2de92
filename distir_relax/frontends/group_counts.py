"""Analysis of group indices and of the number of rows in each group, by enumeration.

A row's group is one of a few indices: a pointwise op on group indices is known once it is evaluated for each index (a
*table*). A sum over all rows then depends only on the number of rows in each group, and a value that is linear in these
*counts* is known once it is evaluated for a single row of each group.
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
"""Maximum number of elements of tensors that are evaluated."""
EXACT_COUNTS = 1 << 24
"""The maximum number of rows where nothing bounds it: float32, in which models count, has all integers so far."""


@dataclass
class GroupCounts:
    """Analysis of a program's values: `producers` maps names to ops, `constants` names to data.

    `ids` are the groups of at most `rows` rows, integers from 0 to `count` - 1.
    """

    producers: Mapping[str, Op]
    constants: Mapping[str, torch.Tensor]
    ids: str
    count: int
    rows: int
    _numbers: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def numbers(self, name: str) -> torch.Tensor | None:
        """Return a value's data if it is the same in every run, else None."""
        if name not in self._numbers:
            self._numbers[name] = self._evaluate(name)
        return self._numbers[name]

    def table(self, name: str) -> torch.Tensor | None:
        """Return a value's element for each group of its row; None if it depends on more than the group."""
        import torch

        if name == self.ids:
            return torch.arange(self.count)
        op = self.producers.get(name)
        if op is None or not op.operands or len(op.results) > 1 or op.callee:
            return None
        operands = [self.table(v.name) if v.tensor.shape else self.numbers(v.name) for v in op.operands]
        row_operands = [i for i, v in enumerate(op.operands) if v.tensor.shape]
        if any(x is None for x in operands) or not is_rowwise(op, row_operands):
            return None
        return run(op, [x for x in operands if x is not None])

    def tally(self, name: str) -> torch.Tensor | None:
        """Return a value for one row of each group, (groups, its dims), if it is linear in the counts, else None."""
        fixed = self.numbers(name)
        if fixed is not None:
            return None if bool(fixed.any()) else fixed.new_zeros((self.count, *fixed.shape))
        op = self.producers.get(name)
        if op is None or not op.operands or len(op.results) > 1 or op.callee:
            return None
        summed = self._summed(op)
        if summed is not None:
            return summed
        linear = {i: tally for i, v in enumerate(op.operands) if (tally := self.tally(v.name)) is not None}
        rest = {i: x for i, v in enumerate(op.operands) if i not in linear and (x := self.numbers(v.name)) is not None}
        if not linear or len(linear) + len(rest) < len(op.operands):
            return None
        sets = lookup(op.name).linear_sets(len(op.operands), op.attrs)
        if not any(linear.keys() <= allowed for allowed in sets) and not self._preserves_counts(op, linear):
            return None
        per_group = [
            run(op, [linear[i][e] if i in linear else rest[i] for i in range(len(op.operands))])
            for e in range(self.count)
        ]
        return _stacked(per_group)

    def _evaluate(self, name: str) -> torch.Tensor | None:
        if name in self.constants:
            data = self.constants[name]
            return None if data.is_meta or data.numel() > MOST_NUMBERS else data
        op = self.producers.get(name)
        if op is None or len(op.results) > 1 or op.callee or op.results[0].tensor.elements > MOST_NUMBERS:
            return None
        operands = [self.numbers(v.name) for v in op.operands]
        if any(x is None for x in operands) or not lookup(op.name).computes:
            return None
        return run(op, [x for x in operands if x is not None])

    def _summed(self, op: Op) -> torch.Tensor | None:
        """Return a sum over rows whose elements depend only on their groups."""
        tables = [self.table(v.name) for v in op.operands]
        operands = [t for t in tables if t is not None]
        rule = rule_of(op)
        if len(operands) < len(tables) or len({rule.operands[i] for i in range(len(tables))}) > 1:
            return None
        dims, expanded = rule.operands[0], lookup(op.name, op.location).split.expand
        if len(dims) != 1 or len(dims[0]) != 1 or rule.factors[dims[0][0]].kind != "sum":
            return None
        # Ops that run in parts by other ops, such as a mean, are not plain sums of their parts.
        if "*" in expanded or rule.factors[dims[0][0]].name in expanded:
            return None
        return _stacked([run(op, [t[e : e + 1] for t in operands]) for e in range(self.count)])

    def _preserves_counts(self, op: Op, by_operand: Mapping[int, torch.Tensor]) -> bool:
        """Return whether an op, such as a cast of counts, preserves all integers that occur."""
        import torch

        if len(op.operands) != 1 or Trait.POINTWISE not in lookup(op.name).traits:
            return False
        (tally,) = by_operand.values()
        if bool((tally < 0).any()) or bool((tally != tally.to(torch.int64)).any()):
            return False
        most = self.rows * int(tally.max() if tally.numel() else 0)
        # A dtype that lacks an integer, or ends at one, does so next to a power of two.
        near = [n for k in range(most.bit_length() + 1) for n in ((1 << k) - 1, 1 << k, (1 << k) + 1) if n <= most]
        counts = torch.cat([torch.arange(min(most, MOST_NUMBERS) + 1), torch.tensor([*near, most])])
        result = run(op, [counts.to(tally.dtype)])
        return result is not None and result.shape == counts.shape and bool((result == counts).all())


def run(op: Op, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Run an op with one result on these tensors, whose sizes may differ from those of its operands.

    Returns None if its attributes do not fit the sizes.
    """
    values = tuple(Value(f"x{i}", type_of(x)) for i, x in enumerate(tensors))
    try:
        return evaluate(Op(op.name, values, (), op.attrs, op.location), tensors)[0]
    except DistIRError:
        return None


def _stacked(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    import torch

    results = [x for x in tensors if x is not None]
    return torch.stack(results) if results and len(results) == len(tensors) else None


def rule_of(op: Op) -> Rule:
    """Return the factor rule of an op of the global stage."""
    kinds = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    return lookup(op.name, op.location).rule_for(kinds[0], op.attrs, kinds[1])


def is_rowwise(op: Op, row_operands: Sequence[int]) -> bool:
    """Return whether each row of the results depends only on the same row of the `row_operands`, at any position.

    This is the meaning of a parallel factor that is not positional: it may be cut anywhere.
    """
    split, rule = lookup(op.name, op.location).split, rule_of(op)
    rows = {rule.operands[i][0] for i in row_operands}
    if len(rows) != 1 or len(row := next(iter(rows))) != 1:
        return False
    factor = rule.factors[row[0]]
    positional = split.positional | split.expand.keys()
    others = [dims for i, dims in enumerate(rule.operands) if i not in row_operands]
    elsewhere = any(row[0] in dim for dims in others for dim in dims)
    leading = all(dims and dims[0] == row for dims in rule.results)
    return factor.kind == PARALLEL and factor.name not in positional and leading and not elsewhere and not rule.windows
