"""Random annotations, several mesh axes on one dim and sizes of the user's own among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from distir_relax.layout import DeviceMesh


def draw_placements(
    draw: random.Random,
    shape: Sequence[int],
    dims: Sequence[int],
    mesh: DeviceMesh,
    how: Callable[[int], str],
    whole: float = 0.25,
) -> str:
    """A placement along each mesh axis: a split of one of `dims`, first ones first, or `R` with probability `whole`.

    `how` says for a dim how it is cut: ``""``, ``"chunk"`` or ``"sizes"``. Sizes along a second axis divide each part
    that the first leaves.
    """
    left = list(dims)
    parts = {dim: [shape[dim]] for dim in dims}
    found = []
    for ranks in mesh.shape:
        if not left or draw.random() < whole:
            found.append("R")
            continue
        dim = left[0]
        if draw.random() < 0.7:
            left.pop(0)
        cut = how(dim)
        if cut == "sizes":
            segments = [_sizes(draw, part, ranks) for part in parts[dim]]
            parts[dim] = [size for segment in segments for size in segment]
            cut = " + ".join("|".join(map(str, segment)) for segment in segments)
        found.append(f"S[{dim}: {cut}]" if cut else f"S[{dim}]")
    return ", ".join(found)


def _sizes(draw: random.Random, total: int, ranks: int) -> list[int]:
    ends = sorted(draw.randint(0, total) for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, total], strict=True)]
