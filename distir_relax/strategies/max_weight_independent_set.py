"""The heaviest set of classes of which no two are rivals: a maximum-weight independent set.

Exact where the search ends within `BRANCHES` branches, as it does for trees without any and for graphs that a few hubs
hold together: things that outweigh their rivals are taken, leaves are folded into their one rival (Lamm et al., Exactly
Solving the Maximum Weight Independent Set Problem on Large Real-World Graphs, 2019), and only then one with the most
rivals is tried both ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from distir_relax.sharding.factors import Slot

BRANCHES = 1000
"""After so many branches, what outweighs its rivals most is taken without trying the other way."""


Links = dict[Slot, set[Slot]]
Weights = dict[Slot, float]


def heaviest_independent(weights: Mapping[Slot, float], rivals: Mapping[Slot, Set[Slot]]) -> set[Slot]:
    """Of the keys of `weights` those that weigh most together without a pair of rivals among them.

    Weights are positive. `rivals` go both ways; those without a weight do not count.
    """
    links = {v: {u for u in rivals.get(v, ()) if u in weights and u != v} for v in weights}
    return _Search(BRANCHES).best(dict(weights), links)


@dataclass
class _Search:
    """A search with so many branches `left`."""

    left: int

    def best(self, weights: Weights, links: Links) -> set[Slot]:
        """The heaviest set of a graph, which is used up."""
        taken: set[Slot] = set()
        folded: list[tuple[Slot, Slot]] = []
        waiting = set(weights)
        while links:
            if not waiting:
                parts = _components(links)
                taken |= self._branch(weights, links) if len(parts) == 1 else self._each(weights, links, parts)
                break
            v = min(waiting)
            waiting.discard(v)
            if v not in links:
                continue
            if weights[v] >= sum(weights[u] for u in links[v]):
                taken.add(v)
                for u in [v, *links[v]]:
                    waiting |= _remove(links, u)
            elif len(links[v]) == 1:
                # A leaf is in the set where its rival is not: the rival counts by what it weighs more.
                (u,) = links[v]
                weights[u] -= weights[v]
                folded.append((v, u))
                waiting |= _remove(links, v) | links[u]
        for v, u in reversed(folded):
            if u not in taken:
                taken.add(v)
        return taken

    def _each(self, weights: Weights, links: Links, parts: list[set[Slot]]) -> set[Slot]:
        return {v for part in parts for v in self._branch(weights, {u: links[u] for u in part})}

    def _branch(self, weights: Weights, links: Links) -> set[Slot]:
        """The better of two sets: with the one that has the most rivals, and without it."""
        if self.left <= 0:
            hub = max(sorted(links), key=lambda v: weights[v] / sum(weights[u] for u in links[v]))
            return {hub} | self.best(*_without(weights, links, {hub, *links[hub]}))
        self.left -= 1
        hub = max(sorted(links), key=lambda v: len(links[v]))
        with_hub = {hub} | self.best(*_without(weights, links, {hub, *links[hub]}))
        without = self.best(*_without(weights, links, {hub}))
        return max(with_hub, without, key=lambda found: sum(weights[v] for v in found))


def _remove(links: Links, v: Slot) -> set[Slot]:
    """Take one out; those that it was a rival of, for which something may have changed."""
    near = links.pop(v, set())
    for u in near:
        links[u].discard(v)
    return near


def _without(weights: Weights, links: Links, gone: Set[Slot]) -> tuple[Weights, Links]:
    return dict(weights), {v: near - gone for v, near in links.items() if v not in gone}


def _components(links: Links) -> list[set[Slot]]:
    """The parts of a graph that hang together."""
    found: list[set[Slot]] = []
    seen: set[Slot] = set()
    for start in sorted(links):
        if start in seen:
            continue
        part, edge = {start}, [start]
        while edge:
            new = links[edge.pop()] - part
            part |= new
            edge += new
        seen |= part
        found.append(part)
    return found
