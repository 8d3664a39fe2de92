"""The scheduler against the schedules that there are, on pipelines such as models give: makespans, and its time.

    python benchmarks/schedules.py

Stages of a transformer: all alike but the first, which has the embedding, and the last, which has the head; sends take
a tenth of a forward. What a rank may keep is what 1F1B keeps there, or is not limited.
"""

from __future__ import annotations

import time
from fractions import Fraction

from distir_relax.errors import DistIRError
from distir_relax.schedules import Memory, Shape, Times, best_order, order_of, schedule_names, timeline

PIPELINES = [Shape(p, m, v) for p, m in ((4, 8), (8, 32), (16, 64)) for v in (1, 2)]


def stages(shape: Shape) -> Times:
    """Forwards take 10 on a rank in all, gradients of inputs 11, those of weights 9; the ends of the model more."""
    inner = (shape.stages - 2) * (1,)
    parts = [(first, *inner, last) for first, last in (((1, 2)), (1, 2), (Fraction(3, 2), 2))]
    whole = zip((10, 11, 9), parts, strict=True)
    forward, inputs, weights = ([Fraction(each * part, shape.chunks) for part in row] for each, row in whole)
    return Times(forward, inputs, weights, send=1)


def best_by_name(shape: Shape, times: Times, memory: Memory | None) -> tuple[str, float]:
    """The schedule by name that fits and ends first, and when."""
    found = []
    for name in schedule_names():
        if name not in ("auto", "streaming"):
            try:
                order = order_of(name, shape.ranks, shape.microbatches, shape.chunks, times, memory)
            except DistIRError:
                continue
            found.append((float(timeline(order, times).makespan), name))
    makespan, name = min(found, default=(float("nan"), "none fits"))
    return name, makespan


def main() -> None:
    """One line for each pipeline, without a limit and within the memory of 1F1B."""
    print(
        f"{'p':>3} {'m':>3} {'v':>2} {'memory':8} {'by name':12} {'ends at':>9} {'auto':>9} {'gap':>6} {'seconds':>8}"
    )
    for shape in PIPELINES:
        times = stages(shape)
        for memory in (None, Memory([shape.ranks - rank for rank in range(shape.ranks)]), Memory(shape.ranks)):
            name, makespan = best_by_name(shape, times, memory)
            start = time.perf_counter()
            found = best_order(shape, times, memory)
            seconds = time.perf_counter() - start
            cap = "free" if memory is None else "p" if memory.cap == shape.ranks else "p - r"
            shown = f"{shape.ranks:3} {shape.microbatches:3} {shape.chunks:2} {cap:8} {name:12} {makespan:9.1f}"
            print(f"{shown} {float(found.makespan):9.1f} {found.gap:6.1%} {seconds:8.2f}")


if __name__ == "__main__":
    main()
