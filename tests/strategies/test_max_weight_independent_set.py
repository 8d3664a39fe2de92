"""Sets without rivals, against all sets there are."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest

from distir_relax.sharding.factors import Slot
from distir_relax.strategies import max_weight_independent_set
from distir_relax.strategies.max_weight_independent_set import find_independent_set

Graph = tuple[dict[Slot, float], dict[Slot, set[Slot]]]


def graph(weights: list[float], edges: list[tuple[int, int]]) -> Graph:
    names: list[Slot] = [(f"v{i:04}", 0, 0) for i in range(len(weights))]
    links: dict[Slot, set[Slot]] = {name: set() for name in names}
    for a, b in edges:
        links[names[a]].add(names[b])
        links[names[b]].add(names[a])
    return dict(zip(names, weights, strict=True)), links


def drawn(seed: int, largest: int) -> Graph:
    """Few weights, so that many are equal; from trees to graphs of many cycles."""
    rng = random.Random(seed)
    n = rng.randint(1, largest)
    share = rng.choice((0.1, 0.2, 0.4, 0.8))
    edges = [pair for pair in combinations(range(n), 2) if rng.random() < share]
    return graph([rng.choice((1.0, 2.0, 3.0, 5.5, 7.25)) for _ in range(n)], edges)


def heaviest(weights: dict[Slot, float], links: dict[Slot, set[Slot]]) -> float:
    """By trying each set, one after the other of its members."""
    if not weights:
        return 0.0
    v = next(iter(weights))
    rest = {u: w for u, w in weights.items() if u != v}
    apart = {u: w for u, w in rest.items() if u not in links[v]}
    return max(weights[v] + heaviest(apart, links), heaviest(rest, links))


def check(found: set[Slot], links: dict[Slot, set[Slot]]) -> None:
    assert all(links[v].isdisjoint(found) for v in found)


@pytest.mark.parametrize("seed", range(300))
def test_none_is_heavier(seed: int) -> None:
    weights, links = drawn(seed, 13)
    found = find_independent_set(weights, links)
    check(found, links)
    assert sum(weights[v] for v in found) == pytest.approx(heaviest(weights, links), abs=1e-9)


def test_ends_of_a_path_do_not_lead_astray() -> None:
    """They are of other parity than what is best: whoever takes one leaves a gap."""
    weights, links = graph([0.9, *[2.0] * 15, 0.95], [(i, i + 1) for i in range(16)])
    found = find_independent_set(weights, links)
    assert found == {v for i, v in enumerate(weights) if i % 2}


def test_a_hub_against_its_leaves() -> None:
    weights, links = graph([10.0, *[3.0] * 5], [(0, i) for i in range(1, 6)])
    assert find_independent_set(weights, links) == set(list(weights)[1:])
    weights, links = graph([16.0, *[3.0] * 5], [(0, i) for i in range(1, 6)])
    assert find_independent_set(weights, links) == {next(iter(weights))}


def test_a_search_without_branches_left_finds_a_set_that_none_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_weight_independent_set, "BRANCHES", 3)
    for seed in range(50):
        weights, links = drawn(seed, 60)
        found = find_independent_set(weights, links)
        check(found, links)
        assert all(v in found or links[v] & found for v in weights)


@pytest.mark.sweep
def test_a_long_path_and_a_thick_graph_take_little_time() -> None:
    rng = random.Random(1)
    start = time.perf_counter()
    weights, links = graph([rng.random() + 0.1 for _ in range(3000)], [(i, i + 1) for i in range(2999)])
    check(find_independent_set(weights, links), links)
    pairs = [pair for pair in combinations(range(200), 2) if rng.random() < 0.1]
    weights, links = graph([rng.random() + 0.1 for _ in range(200)], pairs)
    check(find_independent_set(weights, links), links)
    assert time.perf_counter() - start < 20.0
