"""Factors of a `PrimFunc`, derived from its blocks.

A block lists its iteration variables, and its buffer accesses. If a dim of a buffer is always indexed by one variable,
running the variable over a part of its range accesses exactly that part of the dim. So variables, the loops around them
and dims of buffers form classes, each of which can be split independently, or is *blocked*: a variable used in other
expressions (``x[i + 1]``, ``i < 3``), a dim with a constant index.

Anything beyond blocks in loops (scheduled code, calls of other functions, indirect accesses) has no factors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from distir_relax.kernels.prim_func_body import Body, UnsupportedPrimFunc, number, reduction


def block_rule(function: Any) -> tuple[str, str] | None:
    """Return the factor rule of a `PrimFunc` (``"d0 d1, d1 d2 -> d0 d2"``) and the reduction of factors without result.

    The results are the parameters that it writes, which must be the last. None if no dim can be split.
    """
    factors = block_factors(function)
    if factors is None or not factors.operands or not factors.free:
        return None
    names = {root: f"d{i}" for i, root in enumerate(factors.free)}
    fixed = (f"[w{i}]" for i in count())

    def side(buffers: Sequence[Any]) -> str:
        tensors = ([(factors.root(key), size) for key, size in dims_of(buffer)] for buffer in buffers)
        return ", ".join(" ".join("1" if n == 1 else names.get(r) or next(fixed) for r, n in dims) for dims in tensors)

    return f"{side(factors.operands)} -> {side(factors.results)}", factors.reduction


@dataclass
class BlockFactors:
    """The classes of a `PrimFunc`, by number, of loops and block variables (which are keys themselves) and of dims.

    The key of a dim is its buffer and position.
    """

    operands: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()
    buffers: frozenset[Any] = frozenset()
    """All buffers, including intermediate ones."""
    reduction: str = "sum"
    reduced: set[int] = field(default_factory=set)
    """The classes that a block reduces, and that can be split nevertheless."""
    blocked: set[int] = field(default_factory=set)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _parents: list[int] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)

    @property
    def free(self) -> list[int]:
        """The classes of parameters' dims that can be split, in order of first occurrence."""
        keys = (key for buffer in (*self.operands, *self.results) for key, size in dims_of(buffer) if size > 1)
        return [root for root in dict.fromkeys(map(self.root, keys)) if root not in self.blocked]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._numbers

    def add(self, key: Hashable, size: int) -> None:
        """Add a class with one member."""
        self._numbers[key] = len(self._parents)
        self._parents.append(len(self._parents))
        self._sizes.append(size)

    def root(self, key: Hashable) -> int:
        """Return the number of the class of `key`."""
        number = self._numbers[key]
        while self._parents[number] != number:
            number = self._parents[number]
        return number

    def size(self, key: Hashable) -> int:
        """Return the extent of the class of `key`."""
        return self._sizes[self.root(key)]

    def join(self, a: Hashable, b: Hashable) -> None:
        """Join two classes; if their sizes differ, block both instead."""
        first, second = self.root(a), self.root(b)
        if self._sizes[first] != self._sizes[second]:
            self.blocked |= {first, second}
        elif first != second:
            self._parents[first] = second
            if first in self.blocked:
                self.blocked.add(second)

    def block(self, key: Hashable) -> None:
        """Block the class of `key` from being split."""
        self.blocked.add(self.root(key))


def block_factors(function: Any) -> BlockFactors | None:
    """Return the classes of a `PrimFunc`, or None if it is unsupported."""
    try:
        return _Reader(function).factors
    except UnsupportedPrimFunc:
        return None


def dims_of(buffer: Any) -> list[tuple[Hashable, int]]:
    """Return the key and size of each dim. Raises UnsupportedPrimFunc if a size is not constant."""
    return [((buffer, d), number(n)) for d, n in enumerate(buffer.shape)]


class _Reader:
    """Visits a function's loops and blocks."""

    def __init__(self, function: Any) -> None:
        from tvm import s_tir
        from tvm.tirx.buffer import is_buffer_var

        root = getattr(function.body, "block", None)
        if not isinstance(root, s_tir.SBlock) or root.iter_vars or root.match_buffers or root.init is not None:
            raise UnsupportedPrimFunc
        self.params, self.buffers = tuple(function.params), frozenset((*function.params, *root.alloc_buffers))
        self.factors = BlockFactors(buffers=self.buffers)
        for buffer in (*function.params, *root.alloc_buffers):
            if (
                not is_buffer_var(buffer)
                or len(buffer.strides)
                or number(buffer.elem_offset)
                or buffer.layout is not None
            ):
                raise UnsupportedPrimFunc
            for key, size in dims_of(buffer):
                self.factors.add(key, size)
        self.bodies: list[Body] = []
        self._statement(root.body, ())
        self._split_params()
        self._block_ambiguous()
        self._find_reduced()

    def _statement(self, statement: Any, loops: tuple[Any, ...]) -> None:
        from tvm import s_tir, tirx

        if isinstance(statement, tirx.SeqStmt):
            for item in statement.seq:
                self._statement(item, loops)
        elif isinstance(statement, tirx.For):
            if statement.thread_binding is not None or number(statement.min) or statement.step is not None:
                raise UnsupportedPrimFunc
            self.factors.add(statement.loop_var, number(statement.extent))
            self._statement(statement.body, (*loops, statement.loop_var))
        elif isinstance(statement, s_tir.SBlockRealize) and number(statement.predicate) == 1:
            self._bind(statement, loops)
            self._accesses(Body(statement.block, self.buffers, loops))
        else:
            raise UnsupportedPrimFunc

    def _bind(self, realize: Any, loops: tuple[Any, ...]) -> None:
        """Match the block's variables with its loops, one each."""
        unbound = {loop: self.factors.size(loop) for loop in loops}
        for item, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            size = number(item.dom.extent)
            self.factors.add(item.var, size)
            if value in unbound and unbound.pop(value) == size and number(item.dom.min) == 0:
                self.factors.join(item.var, value)
            elif size != 1 or number(value) or number(item.dom.min):
                raise UnsupportedPrimFunc
        if any(size != 1 for size in unbound.values()):
            raise UnsupportedPrimFunc

    def _accesses(self, body: Body) -> None:
        factors = self.factors
        self.bodies.append(body)
        for buffer, indices in body.accesses:
            for (key, size), index in zip(dims_of(buffer), indices, strict=True):
                if index is not None:
                    factors.join(key, index)
                elif size > 1:
                    factors.block(key)
        for buffer, position in body.wide_dims:
            factors.block((buffer, position))
        for variable in body.nonindex_variables:
            factors.block(variable)
        for _, indices in body.stores:
            for variable in body.parallel - set(indices):
                factors.block(variable)
            for variable in body.reduced & set(indices):
                factors.block(variable)

    def _split_params(self) -> None:
        stored = {buffer for body in self.bodies for buffer, _ in body.stores}
        first = sum(p not in stored for p in self.params)
        self.factors.operands, self.factors.results = self.params[:first], self.params[first:]
        if stored.intersection(self.factors.operands) or not self.factors.results:
            raise UnsupportedPrimFunc

    def _block_ambiguous(self) -> None:
        """Block classes that occur twice in one buffer or block (diagonals), and dims that no block iterates."""
        roots = self.factors.root
        iterated = {roots(v) for body in self.bodies for v in (*body.parallel, *body.reduced)}
        groups = [[roots(key) for key, _ in dims_of(b)] for b in self.buffers]
        self.factors.blocked |= {root for group in groups for root in group} - iterated
        groups += [[roots(v) for v in (*body.parallel, *body.reduced)] for body in self.bodies]
        self.factors.blocked |= {root for group in groups for root, n in Counter(group).items() if n > 1}

    def _find_reduced(self) -> None:
        """Find reduced classes that can be split: those whose reduction is the last step, so that partial
        results can be reduced further."""
        factors, reduced = self.factors, set[int]()
        for body in self.bodies:
            result = reduction(body, frozenset(factors.operands))
            for variable in body.reduced:
                if result is None or variable not in result.neutral or not self._is_last(body):
                    factors.block(variable)
                else:
                    factors.reduction = result.kind
                    reduced.add(factors.root(variable))
        in_results = {factors.root(key) for b in factors.results for key, _ in dims_of(b)}
        factors.blocked |= reduced & in_results
        factors.blocked |= {factors.root(key) for b in self.buffers for key, _ in dims_of(b)} - in_results - reduced
        factors.reduced = reduced - factors.blocked

    def _is_last(self, body: Body) -> bool:
        """Whether the block alone computes the function's only result."""
        results, others = self.factors.results, (other for other in self.bodies if other is not body)
        buffers = {buffer for other in others for buffer, _ in (*other.accesses, *other.stores)}
        return len(results) == 1 and results[0] not in buffers and all(b.same_as(results[0]) for b, _ in body.stores)
