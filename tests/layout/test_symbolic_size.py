"""Symbolic sizes against integers: arithmetic, normal forms, decisions, texts."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distir_relax.errors import DistIRError
from distir_relax.layout.partition import balanced
from distir_relax.layout.symbolic_size import (
    Guard,
    Size,
    Symbol,
    SymbolicSize,
    UndecidedSize,
    are_equal,
    assuming,
    balanced_part,
    bounds,
    evaluate_size,
    floor_divide,
    is_always,
    maximum,
    minimum,
    multiple_of_symbol,
    parse_size,
    size_of,
    symbols_of,
)

BATCH, SEQUENCE = Symbol("batch", 1, 13), Symbol("sequence", 0, 17)
SYMBOLS = {symbol.name: symbol for symbol in (BATCH, SEQUENCE)}
N, B = size_of(SEQUENCE), size_of(BATCH)
OPEN = size_of(Symbol("open", 3))


def random_text(rng: random.Random, depth: int) -> str:
    """A random expression over both symbols, fully parenthesized, as Python evaluates it."""
    if not depth or rng.random() < 0.2:
        return rng.choice(["batch", "sequence", str(rng.randrange(8))])
    left, right = random_text(rng, depth - 1), random_text(rng, depth - 1)
    kind = rng.choice(["+", "-", "*", "//", "//", "min", "max"])
    if kind in ("min", "max"):
        return f"{kind}({left}, {right})"
    return f"(({left}) {kind} {rng.randrange(1, 7)})" if kind == "//" else f"(({left}) {kind} ({right}))"


@settings(max_examples=150, deadline=None)
@example(8781)
@given(st.integers(0, 2**32))
def test_an_expression_has_the_values_of_integers(seed: int) -> None:
    """Normal form, text and its inverse, bounds and decisions, for all values of both symbols."""
    rng = random.Random(seed)
    text = random_text(rng, 3)
    size = parse_size(text, SYMBOLS)
    assert parse_size(str(size), SYMBOLS) == size, "printing and parsing are inverse"
    low, high = bounds(size)
    values = []
    for batch, sequence in product(range(1, 14), range(18)):
        expected = eval(text, {}, {"batch": batch, "sequence": sequence, "min": min, "max": max})
        assert evaluate_size(size, {"batch": batch, "sequence": sequence}) == expected, (text, str(size))
        assert evaluate_size(evaluate_size(size, {"batch": batch}), {"sequence": sequence}) == expected
        values.append(expected)
    assert low is not None
    assert high is not None
    assert low <= min(values) <= max(values) <= high
    other = rng.choice([min(values), max(values), values[7], 0, 5])
    for relation, holds in (("<", [v < other for v in values]), ("<=", [v <= other for v in values]),
                            ("==", [v == other for v in values])):  # fmt: skip
        decided = is_always(size, relation, other)  # type: ignore[arg-type]
        assert decided is None or set(holds) == {decided}, (str(size), relation, other)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(1, 9), st.integers(-9, 9), st.integers(1, 9), st.integers(-9, 9), st.integers(1, 9), st.integers(-9, 40)
)
def test_linear_divisions_of_one_symbol_are_decided(a: int, b: int, c: int, d: int, e: int, limit: int) -> None:
    """``(a*n + b) // c + (d*n) // e`` compared with a number: no case is left undecided that integers decide."""
    size = floor_divide(a * N + b, c) + floor_divide(d * N, e)
    values = [(a * n + b) // c + (d * n) // e for n in range(18)]
    for relation, holds in (("<", {v < limit for v in values}), ("<=", {v <= limit for v in values})):
        assert is_always(size, relation, limit) == (holds.pop() if len(holds) == 1 else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_balanced_parts_are_those_of_numbers(count: int) -> None:
    parts = [balanced_part(N, count, index) for index in range(count)]
    for n in range(18):
        assert [evaluate_size(part, {"sequence": n}) for part in parts] == list(balanced(n, count))
    total: Size = 0
    for part in parts:
        total = total + part
    assert are_equal(total, N)
    for larger, smaller in pairwise(parts):
        assert larger >= smaller
        assert larger - smaller <= 1


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (2 * B + 1, "2*batch + 1"),
        (B * N * 3 - N, "3*batch*sequence - sequence"),
        (floor_divide(N + 1, 2), "(sequence + 1) // 2"),
        (floor_divide(4 * N + 2, 4), "sequence"),
        (floor_divide(2 * N + 1, 4), "sequence // 2"),
        (floor_divide(floor_divide(N, 2) + 1, 3), "(sequence + 2) // 6"),
        (floor_divide(B * N, B), "sequence"),
        (floor_divide(6 * B * N + 4 * N, 2 * N + 2), "(6*batch*sequence + 4*sequence) // (2*sequence + 2)"),
        (floor_divide(B, 14), "0"),
        (3 * floor_divide(N, 2), "3*(sequence // 2)"),
        (N - floor_divide(N, 2) * 2, "2*((sequence + 1) // 2) - sequence"),
            (N - floor_divide(N + 1, 2), "sequence // 2"),
            (N - floor_divide(N + 2, 3), "sequence - (sequence + 2) // 3"),
            (floor_divide(N + 1, 3) + floor_divide(N, 3), "sequence - (sequence + 2) // 3"),
        (minimum(N, 5), "min(5, sequence)"),
        (minimum(N, 20, B + 20), "sequence"),
        (maximum(N, B, N + 1), "max(batch, sequence + 1)"),
        (minimum(minimum(N, 5), B), "min(5, batch, sequence)"),
        (-N + 3, "-sequence + 3"),
        (N - N + 2, "2"),
    ],
)  # fmt: skip
def test_normal_forms(size: Size, text: str) -> None:
    assert str(size) == text
    assert parse_size(text, SYMBOLS) == size
    assert isinstance(size, SymbolicSize) == bool(symbols_of(size))


def test_relations_are_decided_within_the_bounds() -> None:
    assert N < 18
    assert not N >= 18
    assert B >= 1
    assert OPEN > 2
    assert OPEN * OPEN >= 9
    assert OPEN * N >= 0
    assert are_equal(N % 1, 0)
    assert bool(B)
    with pytest.raises(UndecidedSize, match=r"sequence < 17 depends on the values of sequence"):
        bool(N < 17)
    with pytest.raises(UndecidedSize, match="sequence == 0 depends"):
        bool(N)
    with pytest.raises(UndecidedSize, match="sequence == batch depends on the values of batch, sequence"):
        are_equal(N, B)
    with pytest.raises(UndecidedSize, match="expected a divisor of at least 1, found sequence, which is at least 0"):
        floor_divide(B, N)
    with pytest.raises(UndecidedSize, match="expected a divisor of at least 1, found 0"):
        floor_divide(B, 0)
    with pytest.raises(TypeError):
        range(N)  # type: ignore[arg-type]


def test_values_outside_of_the_bounds_are_refused() -> None:
    assert evaluate_size(N * B, {"sequence": 17, "batch": N}) == 17 * N
    with pytest.raises(DistIRError, match="expected sequence of at least 0 and at most 17, found 18"):
        evaluate_size(N, {"sequence": 18})
    with pytest.raises(DistIRError, match="expected open of at least 3, found 2"):
        evaluate_size(OPEN, {"open": 2})
    for name, low, high in (("two words", 0, 1), ("min", 0, 1), ("if", 0, 1), ("n", -1, 1), ("n", 3, 2)):
        with pytest.raises(DistIRError, match="expected"):
            Symbol(name, low, high)
    assert size_of(Symbol("one", 1, 1)) == 1


def test_multiples_of_a_symbol() -> None:
    assert multiple_of_symbol(32 * N) == (SEQUENCE, 32)
    assert multiple_of_symbol(B) == (BATCH, 1)
    for size in (3, N + 1, N * B, N * N, -N, floor_divide(N, 2), maximum(N, B), N + B):
        assert multiple_of_symbol(size) is None


@pytest.mark.parametrize(
    "text",
    ["", "batch +", "height", "batch / 2", "batch ** 2", "max()", "abs(batch)", "1.5", "True", "batch // 0", "(" * 300,
     "batch.real", "min(batch, key=batch)", "[batch]", "batch // sequence", "9" * 5000, "+".join(["1"] * 300)],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(DistIRError, match=r"expected|there is no size"):
        parse_size(text, SYMBOLS)


def test_what_follows_from_a_guard() -> None:
    past, new = size_of(Symbol("past", 0, 64)), size_of(Symbol("new", 1, 64))
    with assuming([Guard(past + new, "<=", 40, True), Guard(new, "<", past, False)]):
        assert not past + new > 64
        assert past + new <= 40
        assert 41 - new > past
        assert past - new <= 0
        with pytest.raises(UndecidedSize):
            past + new < 40  # noqa: B015
        with pytest.raises(UndecidedSize):
            past < new  # noqa: B015
