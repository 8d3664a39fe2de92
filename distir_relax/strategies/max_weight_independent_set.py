"""Maximum-weight independent set of the graph of rival classes.

Exact if the search ends within `BRANCHES` branches, as for trees, which need none, and for graphs of a few hubs: nodes
that outweigh their neighbors are taken, leaves are folded into their neighbor (Lamm et al., Exactly Solving the Maximum
Weight Independent Set Problem on Large Real-World Graphs, 2019), and only then is a node of highest degree branched on.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from distir_relax.sharding.factors import Slot

BRANCHES = 1000
"""Branch limit, after which the node that most outweighs its neighbors is taken greedily."""


Links = dict[Slot, set[Slot]]
Weights = dict[Slot, float]


def find_independent_set(weights: Mapping[Slot, float], rivals: Mapping[Slot, Set[Slot]]) -> set[Slot]:
    """Return the keys of `weights` of maximum total weight without a pair of rivals.

    Weights are positive. `rivals` is symmetric; rivals without a weight are ignored.
    """
    links = {v: {u for u in rivals.get(v, ()) if u in weights and u != v} for v in weights}
    return _Search(BRANCHES).best(dict(weights), links)


@dataclass
class _Search:
    """A branch-and-reduce search with `branches_left` branches remaining."""

    branches_left: int

    def best(self, weights: Weights, links: Links) -> set[Slot]:
        """Return the heaviest set of a graph, which is consumed."""
        chosen: set[Slot] = set()
        folded: list[tuple[Slot, Slot]] = []
        worklist = set(weights)
        while links:
            if not worklist:
                parts = _components(links)
                chosen |= self._branch(weights, links) if len(parts) == 1 else self._solve_each(weights, links, parts)
                break
            v = min(worklist)
            worklist.discard(v)
            if v not in links:
                continue
            if weights[v] >= sum(weights[u] for u in links[v]):
                chosen.add(v)
                for u in [v, *links[v]]:
                    worklist |= _remove(links, u)
            elif len(links[v]) == 1:
                # A leaf is in the set unless its neighbor is: the neighbor keeps only its excess weight.
                (u,) = links[v]
                weights[u] -= weights[v]
                folded.append((v, u))
                worklist |= _remove(links, v) | links[u]
        for v, u in reversed(folded):
            if u not in chosen:
                chosen.add(v)
        return chosen

    def _solve_each(self, weights: Weights, links: Links, components: list[set[Slot]]) -> set[Slot]:
        return {v for component in components for v in self._branch(weights, {u: links[u] for u in component})}

    def _branch(self, weights: Weights, links: Links) -> set[Slot]:
        """Return the better of two sets: with the node of highest degree, and without it."""
        if self.branches_left <= 0:
            hub = max(sorted(links), key=lambda v: weights[v] / sum(weights[u] for u in links[v]))
            return {hub} | self.best(*_without(weights, links, {hub, *links[hub]}))
        self.branches_left -= 1
        hub = max(sorted(links), key=lambda v: len(links[v]))
        with_hub = {hub} | self.best(*_without(weights, links, {hub, *links[hub]}))
        without = self.best(*_without(weights, links, {hub}))
        return max(with_hub, without, key=lambda chosen: sum(weights[v] for v in chosen))


def _remove(links: Links, v: Slot) -> set[Slot]:
    """Remove a node; return its neighbors, whose reductions must be checked again."""
    neighbors = links.pop(v, set())
    for u in neighbors:
        links[u].discard(v)
    return neighbors


def _without(weights: Weights, links: Links, removed: Set[Slot]) -> tuple[Weights, Links]:
    return dict(weights), {v: neighbors - removed for v, neighbors in links.items() if v not in removed}


def _components(links: Links) -> list[set[Slot]]:
    """Return the connected components of a graph."""
    components: list[set[Slot]] = []
    seen: set[Slot] = set()
    for start in sorted(links):
        if start in seen:
            continue
        component, frontier = {start}, [start]
        while frontier:
            new = links[frontier.pop()] - component
            component |= new
            frontier += new
        seen |= component
        components.append(component)
    return components
