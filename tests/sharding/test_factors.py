"""Factors of all calls of a function are computed at once, with the same result as for the inlined program."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from distir_relax.ir import inlined_main, parse
from distir_relax.sharding.components import components, equal_rows
from distir_relax.sharding.factors import Factoring, factorize

UNLIKE_LAYER = """
module @global {
  func @main(
    input %x: f32[7,15],
    parameter %a: f32[15,15],
    parameter %b: f32[15,15],
    parameter %c: f32[15,15],
  ) {
    %p: f32[7,15] = call @layer(%x, %a)
    %q: f32[7,15] = call @layer(%p, %b)
    %r: f32[7,15] = call @unlike(%q, %a)
    %s: f32[7,15] = call @layer(%r, %c)
    %t: f32[7,15] = add(%s, %p)
    return "t": %t
  }
  func @layer(
    input %h: f32[7,15],
    input %w: f32[15,15],
  ) {
    %m: f32[7,15] = matmul(%h, %w)
    %heads: f32[7,3,5] = reshape(%m) {shape=(7,3,5)}
    %turned: f32[3,7,5] = permute_dims(%heads) {axes=(1,0,2)}
    %back: f32[7,3,5] = permute_dims(%turned) {axes=(1,0,2)}
    %flat: f32[7,15] = reshape(%back) {shape=(7,15)}
    %o: f32[7,15] = add(%flat, %h)
    return "o": %o
  }
  func @unlike(
    input %h: f32[7,15],
    input %w: f32[15,15],
  ) {
    %m: f32[7,15] = matmul(%h, %w)
    %inner: f32[7,15] = call @layer(%m, %w)
    %o: f32[7,15] = multiply(%inner, %h)
    return "o": %o
  }
}
"""


def partition(factoring: Factoring) -> set[frozenset[tuple[str, int, int]]]:
    classes = defaultdict(set)
    for name, dims in factoring.slots.items():
        for dim, sizes in enumerate(dims):
            for index in range(len(sizes)):
                classes[factoring.classes[name, dim, index]].add((name, dim, index))
    assert all(representative in members for representative, members in classes.items())
    return set(map(frozenset, classes.values()))


def test_calls_of_a_function_have_the_factors_of_the_inlined_program() -> None:
    inlined = inlined_main(parse(UNLIKE_LAYER))
    assert len(inlined.function.ops) == 27
    at_once, one_by_one = factorize(inlined.function, inlined.instance), factorize(inlined.function)
    assert at_once.slots == one_by_one.slots
    assert at_once.atoms == one_by_one.atoms
    assert at_once.blocked == one_by_one.blocked
    assert partition(at_once) == partition(one_by_one)
    assert at_once.slots["a"] == ((3, 5), (3, 5))
    assert at_once.classes["a", 1, 0] == at_once.classes["p.o", 1, 0] == at_once.classes["c", 1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_components_are_those_of_a_search(seed: int) -> None:
    chosen = random.Random(seed)
    count = chosen.choice([1, 7, 127])
    pairs = [(chosen.randrange(count), chosen.randrange(count)) for _ in range(chosen.choice([0, 1, count]))]
    neighbors = defaultdict(set)
    for a, b in pairs:
        neighbors[a].add(b)
        neighbors[b].add(a)
    smallest = list(range(count))
    for node in reversed(range(count)):
        reached, pending = {node}, [node]
        while pending:
            new = neighbors[pending.pop()] - reached
            reached |= new
            pending += new
        for other in reached:
            smallest[other] = min(smallest[other], node)
    half = len(pairs) // 2
    edges = [np.array(part, dtype=np.int64).reshape(-1, 2) for part in (pairs[:half], pairs[half:])]
    assert components(count, [(part[:, 0], part[:, 1]) for part in edges]).tolist() == smallest


def test_a_long_path_is_one_component() -> None:
    order = np.random.default_rng(5).permutation(10_001)
    assert not components(10_001, [(order[:-1], order[1:])]).any()


def test_equal_rows_are_grouped_in_order() -> None:
    rows = np.array([[1, 2], [0, 5], [1, 2], [1, 0], [0, 5], [1, 2]])
    assert sorted(group.tolist() for group in equal_rows(rows)) == [[0, 2, 5], [1, 4], [3]]
    assert [group.tolist() for group in equal_rows(rows[[0, 2]])] == [[0, 1]]
