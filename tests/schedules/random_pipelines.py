"""Random pipelines for the scheduler: unequal stages, little memory. Run me for a report on so many.

python -m tests.schedules.random_pipelines 1000
"""

from __future__ import annotations

import random
import sys
import time
from fractions import Fraction

from distir_relax.errors import DistIRError
from distir_relax.schedules import (
    Memory,
    OptimizedOrder,
    Shape,
    Times,
    best_order,
    check,
    fits,
    order_of,
    peak_activations,
    schedule_names,
    timeline,
)

Case = tuple[Shape, Times, Memory | None]


def case(seed: int) -> Case:
    """The pipeline of that number: 2 to 8 ranks, up to 24 microbatches, one or two stages on a rank."""
    draw = random.Random(seed)
    shape = Shape(draw.randint(2, 8), draw.randint(1, 24), draw.choice((1, 2)))
    p, stages = shape.ranks, shape.stages
    most = draw.choice((1, 2, 9, 100))
    kinds = [[draw.randint(1, most) for _ in range(stages)] for _ in range(3)]
    if draw.random() < 0.2:
        kinds = [[Fraction(time, draw.randint(1, 5)) for time in each] for each in kinds]
    sends = [draw.choice((0, 0, 1, most)) for _ in range(stages)]
    factors = (*[1] * (shape.microbatches - 1), Fraction(1, draw.randint(2, 5))) if draw.random() < 0.3 else ()
    sizes = [draw.randint(1, 9) for _ in range(stages)] if draw.random() < 0.3 else []
    # For each rank what a few microbatches take; seldom too little for one that has its largest stages there.
    one = 2 * max(sizes) if sizes else 1
    caps = {
        0: [draw.randint(1, 2 * p) * one for _ in range(p)],
        1: [draw.randint(p, 2 * p) * one] * p,
        2: [max(1, p - rank + draw.choice((0, 0, 1))) * one for rank in range(p)],
    }
    kind = draw.randrange(4)
    return shape, Times(*kinds, sends, factors), Memory(caps[kind], sizes) if kind in caps else None


def best_known(shape: Shape, times: Times, memory: Memory | None) -> int | float | Fraction | None:
    """The smallest makespan of a schedule by name that fits."""
    found = []
    for name in schedule_names():
        if name not in ("auto", "streaming"):
            try:
                order = order_of(name, shape.ranks, shape.microbatches, shape.chunks, memory=memory)
            except DistIRError:
                continue
            found.append(timeline(order, times).makespan)
    return min(found, default=None)


def check_case(seed: int) -> tuple[OptimizedOrder, float | None]:
    """What the scheduler finds is valid, fits, takes as long as it says, and is no worse than what is known.

    Gives that, and the part of the best known makespan that it takes.
    """
    shape, times, memory = case(seed)
    found = best_order(shape, times, memory)
    check(found.order)
    assert found.order.microbatches == shape.microbatches, seed
    assert found.order.rank_of in (shape.loop(), shape.vee()), seed
    if memory:
        assert fits(found.order, memory), seed
        kept = peak_activations(found.order, memory)
        assert all(peak <= memory.of(rank) for rank, peak in enumerate(kept)), seed
    assert timeline(found.order, times).makespan == found.makespan >= found.bound > 0, seed
    known = best_known(shape, times, memory)
    assert known is None or found.makespan <= known, seed
    return found, float(found.makespan / known) if known else None


def main(count: int) -> None:
    """Check so many, and say how far from the bound they are."""
    start = time.perf_counter()
    found = [check_case(seed) for seed in range(count)]
    gaps = sorted(each.gap for each, _ in found)
    parts = [part for _, part in found if part is not None]
    print(f"{count} pipelines in {time.perf_counter() - start:.0f} s: each order valid, within its memory, not below")
    print("the bound, and not worse than any schedule by name.")
    best = sum(gap == 0 for gap in gaps)
    print(
        f"gap to the bound: {sum(gaps) / count:.2%} on average, median {gaps[count // 2]:.2%}, largest {gaps[-1]:.1%};"
    )
    print(f"{best} proven to be the best there can be.")
    shorter = sum(part < 1 for part in parts)
    print(f"Of {len(parts)} into whose memory a schedule by name fits, {shorter} are shorter than all of those,")
    print(
        f"by {1 - sum(parts) / len(parts):.1%} on average, {1 - min(parts):.1%} at most; nothing else fits the others."
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1000)
