"""Roles of the dims along a sequence: which positions a value of an incremental program has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from distir_relax.ir import Attribute, Op, TensorType, Value
from distir_relax.ir.symbols import specialize_op
from distir_relax.layout import Symbol, evaluate_size, generic_value, size_of, symbols_of
from distir_relax.layout.symbolic_size import Size
from distir_relax.ops import lookup
from distir_relax.ops.table.rule import PARALLEL, Dims, Rule

Role: TypeAlias = Literal["", "new", "all"]
"""The positions along a dim: of the call's new tokens, or of all tokens; empty for a dim along no sequence."""

Roles: TypeAlias = tuple[Role, ...]
"""The role of each dim of a value."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The sizes of an incremental program: `sequence` is the symbol of the full one, ``past + new`` its value."""

    sequence: Symbol
    past: Size
    new: Size

    @property
    def total(self) -> Size:
        """The number of all tokens."""
        return self.past + self.new

    def is_along(self, size: Size) -> bool:
        """Return whether a size of the full program depends on the length of the sequence."""
        return self.sequence in symbols_of(size)

    def is_sequence(self, size: Size) -> bool:
        """Return whether a size of the full program is the length of the sequence."""
        return size == size_of(self.sequence)

    def extra(self, size: Size) -> int | None:
        """Return how many positions more than the sequence a size of the full program has; None for other sizes."""
        difference = size - size_of(self.sequence)
        return difference if isinstance(difference, int) else None

    def size(self, size: Size, role: Role) -> Size:
        """Return the size of a dim with a role."""
        extra = self.extra(size)
        if role == "new" and extra is not None and extra < 0:
            # The new positions are as many as those of a call (`IncrementalStep`).
            return self.new
        return evaluate_size(size, {self.sequence.name: self.new if role == "new" else self.total})

    def type(self, kind: TensorType, roles: Roles) -> TensorType:
        """Return the type of a value with these roles."""
        return TensorType(tuple(map(self.size, kind.shape, roles)), kind.dtype)

    def roles(self, kind: TensorType, role: Role) -> Roles:
        """Return the roles of a value whose dims along the sequence all have one."""
        return tuple(role if self.is_along(size) else "" for size in kind.shape)


@dataclass(frozen=True, slots=True)
class OpRoles:
    """The roles of an op's operands and results, where some of its factors have the new positions only."""

    operands: tuple[Roles, ...]
    results: tuple[Roles, ...]
    is_parallel: bool
    """Whether the op computes the new positions from those of its operands alone; otherwise its entry says how."""
    dim: int = -1
    """The dim of the result along which the entry says how."""

    @property
    def is_restricted(self) -> bool:
        """Whether some dim has the new positions only."""
        return any("new" in roles for roles in (*self.operands, *self.results))


def op_roles(op: Op, result: int, roles: Roles, positions: Positions) -> OpRoles | None:
    """Return the roles of an op, one of whose results has these `roles`; None if it does not relate the new positions.

    A factor along the sequence that the result does not determine has all positions.
    """
    entry = lookup(op.name, op.location)
    rule = entry.rule_for([v.tensor for v in op.operands], op.attrs, [v.tensor for v in op.results])
    along = _factors_along(op, rule, positions)
    windowed = {w.result_dim for w in rule.windows}
    new, continued = set[int](), list[int]()
    for dim, role in enumerate(roles):
        if role != "new":
            continue
        found = along & set(rule.results[result][dim])
        factor = rule.factors[next(iter(found))] if len(found) == 1 else None
        variant = entry.split.positional | entry.split.expand.keys()
        if factor is None or factor.kind != PARALLEL or factor.name in variant or dim in windowed:
            if not _is_continued(op, result, dim, positions):
                return None
            continued.append(dim)
        new |= found
    if len(continued) > 1:
        return None
    is_windowed = bool(continued) and entry.incremental is not None and entry.incremental.is_windowed

    def of(kind: TensorType, dims: Dims, window: Sequence[int] = ()) -> Roles:
        def role(dim: int, size: Size, factors: Sequence[int]) -> Role:
            if not positions.is_along(size):
                return ""
            return "new" if new & set(factors) or dim in window else "all"

        return tuple(map(role, range(len(dims)), kind.shape, dims))

    window = continued if is_windowed else []
    operands = tuple(of(v.tensor, dims, window) for v, dims in zip(op.operands, rule.operands, strict=True))
    results = [of(v.tensor, dims) for v, dims in zip(op.results, rule.results, strict=True)]
    results[result] = roles
    return OpRoles(operands, tuple(results), not continued, *continued)


def restricted_attrs(op: Op, roles: OpRoles, positions: Positions, operands: Sequence[Value]) -> dict[str, Attribute]:
    """Return the attributes of a parallel op on `operands`, which have their roles."""
    attrs = dict(specialize_op(op, {positions.sequence.name: positions.total}).attrs)
    localize = lookup(op.name, op.location).split.localize
    if localize is None or not roles.is_restricted:
        return attrs
    return dict(localize(attrs, [v.tensor for v in operands], result_types(op, roles, positions)))


def result_types(op: Op, roles: OpRoles, positions: Positions) -> list[TensorType]:
    """Return the types of an op's results, which have their roles."""
    return [positions.type(v.tensor, r) for v, r in zip(op.results, roles.results, strict=True)]


def window_extras(op: Op, dim: int, positions: Positions) -> list[int | None]:
    """Return how many positions more than the sequence each operand has along `dim`; None for other sizes."""
    return [positions.extra(v.tensor.shape[dim]) if dim < len(v.tensor.shape) else None for v in op.operands]


def _is_continued(op: Op, result: int, dim: int, positions: Positions) -> bool:
    """Return whether the entry of an op says how its new positions along `dim` are computed."""
    form, size = lookup(op.name, op.location).incremental, op.results[result].tensor.shape[dim]
    if form is None or dim not in form.dims(op):
        return False
    if not form.is_windowed:
        return positions.is_sequence(size)
    along = [v for v in op.operands if dim < len(v.tensor.shape) and positions.is_along(v.tensor.shape[dim])]
    extras = [extra for extra in window_extras(op, dim, positions) if extra is not None]
    return positions.extra(size) is not None and len(along) == len(extras) == 1


def _factors_along(op: Op, rule: Rule, positions: Positions) -> set[int]:
    """Return the factors of dims along the sequence; of a dim of several, those of its length."""
    length = generic_value(size_of(positions.sequence))
    found: set[int] = set()
    tensors = zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True)
    for value, dims in tensors:
        for size, factors in zip(value.tensor.shape, dims, strict=True):
            if positions.is_along(size):
                found |= {f for f in factors if len(factors) == 1 or rule.factors[f].size % length == 0}
    return found
