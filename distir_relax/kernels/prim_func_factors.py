"""How a `PrimFunc` may be split: read off its blocks.

A block says over which variables it runs, and where in which buffer it reads and writes. Where a dim of a buffer is
always at one such variable, running the variable over a part of its range takes that part of the dim and no other. So
variables, the loops around them and the dims of buffers fall into classes, each of which may be cut by itself, or is
*blocked*: a variable that is computed with (``x[i + 1]``, ``i < 3``), a dim that is at a number.

What is more than blocks in loops (scheduled code, calls of other functions, look-ups) has no such classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from distir_relax.kernels.prim_func_body import Body, NotBlocks, number, reduction


def block_rule(function: Any) -> tuple[str, str] | None:
    """The factor rule of a `PrimFunc` (``"d0 d1, d1 d2 -> d0 d2"``) and the reduction of what stands in no result.

    The results are the parameters that it writes, which must be the last. None where nothing may be split.
    """
    factors = block_factors(function)
    if factors is None or not factors.operands or not factors.free:
        return None
    order = {root: f"d{i}" for i, root in enumerate(factors.free)}
    whole = (f"[w{i}]" for i in count())

    def side(buffers: Sequence[Any]) -> str:
        tensors = ([(factors.root(key), size) for key, size in dims_of(buffer)] for buffer in buffers)
        return ", ".join(" ".join("1" if n == 1 else order.get(r) or next(whole) for r, n in t) for t in tensors)

    return f"{side(factors.operands)} -> {side(factors.results)}", factors.reduction


@dataclass
class BlockFactors:
    """The classes of a `PrimFunc`, by number: of loops and block variables, which are their own keys, and of dims.

    The key of a dim is its buffer and its position there.
    """

    operands: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()
    buffers: frozenset[Any] = frozenset()
    """All, also those between."""
    reduction: str = "sum"
    reduced: set[int] = field(default_factory=set)
    """The classes that a block joins, and that may be split nevertheless."""
    blocked: set[int] = field(default_factory=set)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _parents: list[int] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)

    @property
    def free(self) -> list[int]:
        """The classes of parameters' dims that may be split, as they first stand there."""
        keys = (key for buffer in (*self.operands, *self.results) for key, size in dims_of(buffer) if size > 1)
        return [root for root in dict.fromkeys(map(self.root, keys)) if root not in self.blocked]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._numbers

    def add(self, key: Hashable, size: int) -> None:
        """A class of one member."""
        self._numbers[key] = len(self._parents)
        self._parents.append(len(self._parents))
        self._sizes.append(size)

    def root(self, key: Hashable) -> int:
        """The number of the class of `key`."""
        number = self._numbers[key]
        while self._parents[number] != number:
            number = self._parents[number]
        return number

    def size(self, key: Hashable) -> int:
        """How far the class of `key` goes."""
        return self._sizes[self.root(key)]

    def join(self, a: Hashable, b: Hashable) -> None:
        """Make two classes one; those of unlike sizes are blocked."""
        first, second = self.root(a), self.root(b)
        if self._sizes[first] != self._sizes[second]:
            self.blocked |= {first, second}
        elif first != second:
            self._parents[first] = second
            if first in self.blocked:
                self.blocked.add(second)

    def block(self, key: Hashable) -> None:
        """The class of `key` may not be split."""
        self.blocked.add(self.root(key))


def block_factors(function: Any) -> BlockFactors | None:
    """The classes of a `PrimFunc`, or None where it is more than blocks in loops."""
    try:
        return _Reader(function).factors
    except NotBlocks:
        return None


def dims_of(buffer: Any) -> list[tuple[Hashable, int]]:
    """The key and the size of each dim. Raises NotBlocks where a size is open."""
    return [((buffer, d), number(n)) for d, n in enumerate(buffer.shape)]


class _Reader:
    """Goes through a function's loops and blocks."""

    def __init__(self, function: Any) -> None:
        from tvm import s_tir
        from tvm.tirx.buffer import is_buffer_var

        root = getattr(function.body, "block", None)
        if not isinstance(root, s_tir.SBlock) or root.iter_vars or root.match_buffers or root.init is not None:
            raise NotBlocks
        self.params, self.buffers = tuple(function.params), frozenset((*function.params, *root.alloc_buffers))
        self.factors = BlockFactors(buffers=self.buffers)
        for buffer in (*function.params, *root.alloc_buffers):
            if (
                not is_buffer_var(buffer)
                or len(buffer.strides)
                or number(buffer.elem_offset)
                or buffer.layout is not None
            ):
                raise NotBlocks
            for key, size in dims_of(buffer):
                self.factors.add(key, size)
        self.bodies: list[Body] = []
        self._statement(root.body, ())
        self._sides()
        self._block_what_is_unclear()
        self._reduced()

    def _statement(self, statement: Any, loops: tuple[Any, ...]) -> None:
        from tvm import s_tir, tirx

        if isinstance(statement, tirx.SeqStmt):
            for item in statement.seq:
                self._statement(item, loops)
        elif isinstance(statement, tirx.For):
            if statement.thread_binding is not None or number(statement.min) or statement.step is not None:
                raise NotBlocks
            self.factors.add(statement.loop_var, number(statement.extent))
            self._statement(statement.body, (*loops, statement.loop_var))
        elif isinstance(statement, s_tir.SBlockRealize) and number(statement.predicate) == 1:
            self._bind(statement, loops)
            self._accesses(Body(statement.block, self.buffers, loops))
        else:
            raise NotBlocks

    def _bind(self, realize: Any, loops: tuple[Any, ...]) -> None:
        """The block's variables are its loops, one each."""
        left = {loop: self.factors.size(loop) for loop in loops}
        for item, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            size = number(item.dom.extent)
            self.factors.add(item.var, size)
            if value in left and left.pop(value) == size and number(item.dom.min) == 0:
                self.factors.join(item.var, value)
            elif size != 1 or number(value) or number(item.dom.min):
                raise NotBlocks
        if any(size != 1 for size in left.values()):
            raise NotBlocks

    def _accesses(self, body: Body) -> None:
        factors = self.factors
        self.bodies.append(body)
        for buffer, indices in body.accesses:
            for (key, size), index in zip(dims_of(buffer), indices, strict=True):
                if index is not None:
                    factors.join(key, index)
                elif size > 1:
                    factors.block(key)
        for buffer, position in body.stretches:
            factors.block((buffer, position))
        for variable in body.computed_with:
            factors.block(variable)
        for _, indices in body.stores:
            for variable in body.parallel - set(indices):
                factors.block(variable)
            for variable in body.reduced & set(indices):
                factors.block(variable)

    def _sides(self) -> None:
        written = {buffer for body in self.bodies for buffer, _ in body.stores}
        first = sum(p not in written for p in self.params)
        self.factors.operands, self.factors.results = self.params[:first], self.params[first:]
        if written.intersection(self.factors.operands) or not self.factors.results:
            raise NotBlocks

    def _block_what_is_unclear(self) -> None:
        """What stands twice in one buffer, or in one block, is read across; what no block runs over is not known."""
        roots = self.factors.root
        run = {roots(v) for body in self.bodies for v in (*body.parallel, *body.reduced)}
        groups = [[roots(key) for key, _ in dims_of(b)] for b in self.buffers]
        self.factors.blocked |= {root for group in groups for root in group} - run
        groups += [[roots(v) for v in (*body.parallel, *body.reduced)] for body in self.bodies]
        self.factors.blocked |= {root for group in groups for root, n in Counter(group).items() if n > 1}

    def _reduced(self) -> None:
        """What is reduced may be split if only the one result is made of it: its parts can then be joined at last."""
        factors, reduced = self.factors, set[int]()
        for body in self.bodies:
            found = reduction(body, frozenset(factors.operands))
            for variable in body.reduced:
                if found is None or variable not in found.neutral or not self._is_last(body):
                    factors.block(variable)
                else:
                    factors.reduction = found.kind
                    reduced.add(factors.root(variable))
        in_results = {factors.root(key) for b in factors.results for key, _ in dims_of(b)}
        factors.blocked |= reduced & in_results
        factors.blocked |= {factors.root(key) for b in self.buffers for key, _ in dims_of(b)} - in_results - reduced
        factors.reduced = reduced - factors.blocked

    def _is_last(self, body: Body) -> bool:
        """Whether the block alone makes the function's one result."""
        results, others = self.factors.results, (other for other in self.bodies if other is not body)
        seen = {buffer for other in others for buffer, _ in (*other.accesses, *other.stores)}
        return len(results) == 1 and results[0] not in seen and all(b.same_as(results[0]) for b, _ in body.stores)
