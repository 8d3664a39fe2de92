"""Whether a program over a sequence computes a position in the same way at every length of the sequence.

A program that continues a sequence keeps what it has computed of earlier positions. That must not depend on the number
of later ones, as rotary embeddings do whose factors are chosen by ``max(positions)``, positions divided by their number
or counted from the end.

Values that depend on sizes alone are computed for two lengths. One that is the same for both may still change at
another length, behind a comparison with it. So a value without positions is computed for further lengths up to the
largest, and a comparison or rounding of a value that does change is refused by itself. Where the others reach values
that depend on inputs, the outputs of both lengths are compared: a term that all keys of a query share has no influence
on them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from distir_relax.errors import UnsupportedOpError
from distir_relax.interpret.causality import are_close
from distir_relax.interpret.interpreter import Domain, Interpreter
from distir_relax.ir import Function, Inline, Module, Op, Value, dependents, live_ops, required_ops
from distir_relax.ir.symbols import check_symbols, module_symbols, op_symbols, specialize, specialize_op
from distir_relax.layout import Symbol, symbols_of
from distir_relax.ops import Trait, evaluate, lookup

if TYPE_CHECKING:
    import torch

_LENGTHS = (7, 9)
_ALL_LENGTHS = 128
"""Lengths up to this one are all tried; of greater ones, the powers of two and the largest."""


def check_length_independence(module: Module, tensors: Mapping[str, torch.Tensor], sequence: str) -> None:
    """Compare a global program at several lengths of `sequence`; other symbols are small.

    Raises `UnsupportedOpError` for an op whose result at some position depends on the length, and `DistIRError` if the
    program has no size `sequence`.
    """
    module = Inline().run(module)
    symbols = module_symbols(module)
    check_symbols([sequence], symbols)
    along = symbols[sequence]
    others = {name: s.nearest(1) for name, s in symbols.items() if name != sequence}
    lengths = along.nearest(_LENGTHS[0]), along.nearest(_LENGTHS[1])
    if lengths[0] < lengths[1] and _SizedValues(module.main, tensors, along, others, lengths).reach_inputs():
        _compare_outputs(module, tensors, along, others, lengths)


@dataclass(frozen=True, slots=True)
class _Change:
    """The first op of a value that differs between lengths, and the length of the first other value, if known."""

    op: Op
    length: int | None = None


class _SizedValues:
    """The values of a function that depend on sizes and weights alone, at two `lengths`."""

    def __init__(
        self, function: Function, tensors: Mapping[str, torch.Tensor], along: Symbol, others: Mapping[str, int],
        lengths: tuple[int, int],
    ) -> None:  # fmt: skip
        self._tensors, self._along, self._others, self._lengths = tensors, along, others, lengths
        varying = dependents(function, [i.value.name for i in function.inputs if i.value.name not in tensors])
        ops = live_ops(function)
        self._sized = [op for op in ops if op.results[0].name not in varying]
        self._by_length: set[str] = set()
        for op in self._sized:
            if along in op_symbols(op) or any(v.name in self._by_length for v in op.operands):
                self._by_length.update(v.name for v in op.results)
        self._varying = [op for op in ops if op.results[0].name in varying]
        self._reached = {o.value.name for o in function.outputs}
        self._reached |= {v.name for op in self._varying for v in op.operands}
        self._values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {n: (x, x) for n, x in tensors.items()}
        self._differing: set[str] = set()
        """The values that differ between the two lengths."""
        self._changes: dict[str, _Change] = {}
        """Those that do not, but may at others."""

    def reach_inputs(self) -> bool:
        """Return whether values that depend on the length reach values that depend on inputs, or outputs.

        Raises `UnsupportedOpError` for one that two lengths do not tell apart.
        """
        for op in required_ops(self._sized, self._by_length & self._reached):
            self._evaluate(op)
            for value in op.results:
                if value.name in self._changes and value.name in self._reached:
                    raise _refused(self._changes[value.name], self._along)
        for op in self._varying:
            if not self._is_smooth(op):
                raise _refused(_Change(op), self._along)
        return not self._differing.isdisjoint(self._reached)

    def _evaluate(self, op: Op) -> None:
        operands = [self._values[v.name] for v in op.operands]
        if op.results[0].name not in self._by_length:
            results = evaluate(specialize_op(op, self._others), [x for x, _ in operands])
            self._values |= {v.name: (x, x) for v, x in zip(op.results, results, strict=True)}
            return
        runs = [
            evaluate(specialize_op(op, {**self._others, self._along.name: length}), [pair[n] for pair in operands])
            for n, length in enumerate(self._lengths)
        ]
        for value, *pair in zip(op.results, *runs, strict=True):
            self._values[value.name] = (pair[0], pair[1])
            if change := self._change(op, value):
                self._changes[value.name] = change
            elif not _agree(*pair):
                self._differing.add(value.name)

    def _change(self, op: Op, value: Value) -> _Change | None:
        """Return how a value may differ at other lengths than these; None if they tell."""
        inherited = next((self._changes[v.name] for v in op.operands if v.name in self._changes), None)
        if not any(self._along in symbols_of(size) for size in value.tensor.shape):
            length = self._first_change(value)
            # What differs from the second length on is a smooth function of it, unless it is rounded.
            is_step = length is not None and (length > self._along.low + 1 or _agree(*self._values[value.name]))
            return _Change(inherited.op if inherited else op, length) if is_step else None
        if inherited is not None:
            return inherited
        if not _agree(*self._values[value.name]):
            return None
        return None if self._is_smooth(op) or self._is_selected(op, value) else _Change(op)

    def _is_smooth(self, op: Op) -> bool:
        """Return whether an op that reads values that differ with the length neither compares nor rounds them."""
        differing = {n for n, v in enumerate(op.operands) if v.name in self._differing}
        if not differing or "float" in op.results[0].tensor.dtype:
            return True
        entry = lookup(op.name, op.location)
        return Trait.MOVES in entry.traits or differing <= set().union(*entry.linear_sets(len(op.operands), op.attrs))

    def _is_selected(self, op: Op, value: Value) -> bool:
        """Return whether a result is an operand that does not depend on the length, such as an index in bounds."""
        result, _ = self._values[value.name]
        operands = [self._values[v.name][0] for v in op.operands if v.name not in self._differing]
        return any(x.dtype == result.dtype and x.shape == result.shape and bool((x == result).all()) for x in operands)

    def _first_change(self, value: Value) -> int | None:
        """Return the least length at which a value without positions is another, of those that are tried."""
        ops = required_ops([op for op in self._sized if op.results[0].name in self._by_length], [value.name])
        before = self._along.low
        expected = self._at(ops, value, before)
        for before, length in pairwise(_tried_lengths(self._along)):
            if not _agree(expected, self._at(ops, value, length)):
                while length - before > 1:
                    middle = (before + length) // 2
                    is_same = _agree(expected, self._at(ops, value, middle))
                    before, length = (middle, length) if is_same else (before, middle)
                return length
        return None

    def _at(self, ops: Iterable[Op], value: Value, length: int) -> torch.Tensor:
        found: dict[str, torch.Tensor] = {}
        for op in ops:
            operands = [found[v.name] if v.name in found else self._values[v.name][0] for v in op.operands]
            results = evaluate(specialize_op(op, {**self._others, self._along.name: length}), operands)
            found |= zip((v.name for v in op.results), results, strict=True)
        return found[value.name]


def _tried_lengths(along: Symbol) -> list[int]:
    most = _ALL_LENGTHS if along.high is None else along.high
    tried = {*range(along.low, min(_ALL_LENGTHS, most) + 1), *(1 << n for n in range(most.bit_length())), most}
    return sorted(length for length in tried if along.contains(length))


def _agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal where both have elements."""
    for dim, size in enumerate(map(min, a.shape, b.shape)):
        a, b = a.narrow(dim, 0, size), b.narrow(dim, 0, size)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _compare_outputs(
    module: Module, tensors: Mapping[str, torch.Tensor], along: Symbol, others: Mapping[str, int],
    lengths: tuple[int, int],
) -> None:  # fmt: skip
    """Run the program at both lengths, on inputs that begin alike. Raises `UnsupportedOpError` if outputs do not."""
    import torch

    short, long = (specialize(module, {**others, along.name: length}) for length in lengths)
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for item, concrete in zip(module.main.inputs, long.main.inputs, strict=True):
        kind, dtype = concrete.value.tensor, getattr(torch, concrete.value.tensor.dtype)
        if item.value.name in tensors:
            pairs.append((tensors[item.value.name],) * 2)
            continue
        whole = torch.randn if dtype.is_floating_point else _bits
        x = whole(kind.shape, generator=generator).to(dtype)
        y = x
        for dim, size in enumerate(item.value.tensor.shape):
            if along in symbols_of(size):
                y = y.narrow(dim, 0, lengths[0])
        pairs.append((y, x))
    varying = dependents(module.main, [i.value.name for i in module.main.inputs if i.value.name not in tensors])
    domain = _Pairs({op.results[0].name: op for op in long.main.ops}, varying)
    results = Interpreter(short, domain).run(pairs)
    if domain.first is not None and not all(are_close(a, _beginning(b, a)) for a, b in results):
        raise _refused(_Change(domain.first), along)


class _Pairs(Domain["tuple[torch.Tensor, torch.Tensor]"]):
    """The tensors of the runs at both lengths; `first` is the first op with results among `varying` that differ."""

    def __init__(self, long: Mapping[str, Op], varying: Collection[str]) -> None:
        self._long, self._varying = long, varying
        self.first: Op | None = None

    def apply(
        self, op: Op, operands: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        from distir_relax.support.deferred_tensor import read_deferred

        # A weight that is read from a file is read once.
        operands = [(x, x) if a is b else (a, b) for a, b in operands for x in (read_deferred(a) if a is b else a,)]
        other = self._long[op.results[0].name]
        runs = [evaluate(each, [pair[n] for pair in operands]) for n, each in enumerate((op, other))]
        results = list(zip(*runs, strict=True))
        is_sized = all(v.name not in self._varying for v in op.results)
        if self.first is None and not is_sized and not all(are_close(a, _beginning(b, a)) for a, b in results):
            self.first = op
        return results


def _bits(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return random integers 0 and 1: valid indices, and a mask."""
    import torch

    return torch.randint(0, 2, tuple(shape), generator=generator)


def _beginning(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    for dim, size in enumerate(like.shape):
        x = x.narrow(dim, 0, min(size, x.shape[dim]))
    return x


def _refused(change: _Change, along: Symbol) -> UnsupportedOpError:
    message = f"{change.op.name} makes positions along {along} depend on their number"
    if change.length is None:
        hint = "only a model whose positions do not depend on the length of the text can continue it"
        return UnsupportedOpError(message, change.op.location, hint)
    return UnsupportedOpError(
        f"{message}: its result is another from {change.length} on",
        change.op.location,
        "positions that were computed for a shorter text would stay as they were: limit it to"
        f" {change.length - 1}, with max_length=",
    )
