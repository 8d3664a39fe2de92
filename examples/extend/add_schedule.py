"""A pipeline schedule added from outside: GPipe in groups, so that no rank keeps more than a group.

A schedule is an order of tasks, data that knows no model. This one does all forwards of a group, then its backwards,
and then the next group. Run me::

    python examples/extend/add_schedule.py
"""

from __future__ import annotations

import distir_relax as dr
from distir_relax.schedules import Order, Shape, Task, Times, from_csv, grid, order_of, schedule, timeline, to_csv


@schedule("gpipe-in-groups")
def gpipe_in_groups(shape: Shape) -> Order:
    """Groups of as many microbatches as there are ranks; the last may be smaller."""
    groups = [range(shape.microbatches)[i : i + shape.ranks] for i in range(0, shape.microbatches, shape.ranks)]

    def tasks(rank: int) -> tuple[Task, ...]:
        return tuple(Task(kind, rank, m) for group in groups for kind in ("F", "B") for m in group)

    return Order(tuple(map(tasks, range(shape.ranks))), rank_of=shape.loop())


def main() -> None:
    # Whatever is entered is checked when it is asked for, and known by its name from then on.
    assert dr.Strategy.parse("1/1/3/7,schedule=gpipe-in-groups").schedule == "gpipe-in-groups"
    times = Times(forward=(2, 1, 2), inputs=(2, 1, 2), weights=(2, 1, 2), send=0.5)
    for name in ("gpipe", "gpipe-in-groups", "1f1b", "zb-h1", "auto"):
        order = order_of(name, ranks=3, microbatches=7, times=times)
        found = timeline(order, times)
        kept = ", ".join(f"{float(peak):g}" for peak in found.peak)
        print(f"{name:16}ends at {found.makespan:g}, idle {found.bubble:.0%}, keeps {kept} stage activations")
        assert from_csv(to_csv(order)) == order
    own = order_of("gpipe-in-groups", ranks=3, microbatches=7)
    assert timeline(own).peak == (3, 3, 3)
    print(grid(own))


if __name__ == "__main__":
    main()
