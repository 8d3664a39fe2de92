"""Sizes in Relax: a TVM variable for each symbol, and TVM expressions over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Op
from distir_relax.ir.symbols import specialize_op
from distir_relax.layout import Symbol, SymbolicSize, size_of, symbols_within

_PREFIX = "size_"
"""The prefix of symbols in expressions, whose scope has no such names: a symbol may have the name of an operand."""


class RelaxSizes:
    """The sizes of one Relax function, with its own variables for `symbols`."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        from tvm import ir, sym, tirx

        self.variables = {symbol.name: tirx.Var(symbol.name, "int64") for symbol in symbols}
        self._bounded = sym.Analyzer()
        for symbol, variable in zip(symbols, self.variables.values(), strict=True):
            self._bounded.bind(variable, ir.Range(symbol.low, (_UNBOUNDED if symbol.high is None else symbol.high) + 1))
        self._functions = {"min": _folded(tirx.min), "max": _folded(tirx.max)}
        # The bounds that TVM's own inference assumes.
        self._inferring = sym.Analyzer()
        for variable in self.variables.values():
            self._inferring.bind(variable, ir.Range(0, _UNBOUNDED + 1))

    def size(self, size: int) -> Any:
        """Return a size as a TVM expression; a number as it is."""
        return eval(str(size), {**self._functions, **self.variables}) if isinstance(size, SymbolicSize) else size

    def shape(self, sizes: Sequence[int]) -> tuple[Any, ...]:
        """Return sizes as TVM expressions; numbers as they are."""
        return tuple(map(self.size, sizes))

    def scope(self) -> dict[str, Any]:
        """Return the names in the expressions of ops that `with_own_names` returns."""
        return {**self._functions, **{_PREFIX + name: variable for name, variable in self.variables.items()}}

    def are_equal(self, actual: Any, expected: int) -> bool:
        """Whether TVM's inference proves that one of its expressions has the value of a size."""
        return bool(self._inferring.can_prove(actual == self.size(expected)))

    def may_be_zero(self, size: Any) -> bool:
        """Whether a TVM expression may be zero, for values within the bounds of the symbols."""
        number = static_size(size)
        return number == 0 if number is not None else not self._bounded.can_prove(size > 0)


_UNBOUNDED = (1 << 31) - 1


def static_size(size: Any) -> int | None:
    """Return the number that a size in TVM is, None if it is symbolic."""
    return int(getattr(size, "value", size)) if isinstance(size, int) or hasattr(size, "value") else None


def known_dim(x: Any, axis: int) -> int:
    """Return the size of a dim of a Relax value. Raises NotImplementedError if it is symbolic."""
    number = static_size(x.ty.shape[axis])
    if number is None:
        raise NotImplementedError(f"dim {axis} of size {x.ty.shape[axis]}")
    return number


def with_own_names(op: Op) -> Op:
    """Return an op whose attributes name symbols as `RelaxSizes.scope` does."""
    renamed = {s.name: size_of(Symbol(_PREFIX + s.name, s.low, s.high, s.typical)) for s in _symbols(op)}
    return specialize_op(op, renamed) if renamed else op


def _symbols(op: Op) -> frozenset[Symbol]:
    return symbols_within(tuple(op.attrs.values()))


def _folded(function: Any) -> Any:
    """Return a function of two arguments as one of several, which may be numbers."""
    from tvm import tirx

    def fold(first: Any, *rest: Any) -> Any:
        result = first
        for number in rest:
            a, b = (tirx.IntImm("int64", n) if isinstance(n, int) else n for n in (result, number))
            result = function(a, b)
        return result

    return fold
