"""What is no valid order is refused, with the rank, the position and the task."""

from __future__ import annotations

import random

import pytest

from distir_relax.errors import DistIRError
from distir_relax.schedules import Order, Task, check, order_of, schedule_named, schedule_names
from tests.schedules.reference import is_valid


def order(*rows: str, rank_of: tuple[int, ...] | None = None) -> Order:
    """Rows of tasks such as ``0F0 0B0``, one stage on each rank unless said otherwise."""
    tasks = tuple(tuple(Task(t[1], int(t[0]), int(t[2:])) for t in row.split()) for row in rows)
    return Order(tasks, rank_of or tuple(range(len(rows))))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Order((), ()), "^a schedule has ranks and stages, found 0 ranks and 0 stages"),
        (order("0F0", rank_of=(1,)), "^stage 0 is on rank 1, and there are tasks for 1 ranks"),
        (order("0F0", "", rank_of=(0,)), "^rank 1 has no stage"),
        (order("0X0"), "^rank 0, position 0, task 0X0: a task is F, B, I or W, found 'X'"),
        (order("1F0"), "^rank 0, position 0, task 1F0: expected stages from 0 to 0"),
        (order("0F0 1F0", ""), "^rank 0, position 1, task 1F0: stage 1 is on rank 1"),
        (order("0F0 0B0 0F0"), "^rank 0, position 2, task 0F0: duplicate task, first at rank 0, position 0"),
        (order("0F0 0B0 0I0 0W0"), "^rank 0, position 2, task 0I0: 0B0 at rank 0, position 1 is the whole backward"),
        (order("0F0 0F1 0B0"), "^rank 0: there is neither 0B1 nor 0I1, of 2 microbatches through 1 stages"),
        (order("0F0 0I0"), "^rank 0: there is no 0W0, of 1 microbatches"),
        (order("0F0", ""), "^rank 1: there is no 1F0, of 1 microbatches through 2 stages"),
        (order("0F0 0F2", "1F0 1F2"), "^rank 0: there is no 0F1, of 3 microbatches"),
        (order("0F0 0B0", "1F0"), "^rank 1: there is neither 1B0 nor 1I0"),
        (order("0F0 0W0 0I0"), "^rank 0, position 1, task 0W0: needs 0I0, which comes later, at position 2"),
        (order("0B0 0F0"), "^rank 0, position 0, task 0B0: needs 0F0, which comes later, at position 1"),
        (order("1F0 0F0", rank_of=(0, 0)), "^rank 0, position 0, task 1F0: needs 0F0, which comes later"),
        (
            order("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "^ranks wait on each other: \n"
            "  rank 0, position 1, task 0B0 waits for 1B0, rank 1, position 2\n"
            "  rank 1, position 1, task 1F1 waits for 0F1, rank 0, position 2$",
        ),
    ],
)
def test_what_is_wrong_is_told(found: Order, message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        check(found)
    if found.rank_of == tuple(range(found.ranks)) and "X" not in message and found.tasks:
        assert "task 1F0: expected" in message or not is_valid(found)


def test_ranks_outside_of_a_circle_are_not_told() -> None:
    found = order("0F0 0B0", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1", rank_of=(0, 1, 2))
    with pytest.raises(DistIRError, match="there is no 0F1"):
        check(found)
    found = order("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    with pytest.raises(DistIRError) as error:
        check(found)
    lines = str(error.value).splitlines()
    assert [line.split(",")[0].strip() for line in lines[1:]] == ["rank 1", "rank 2"]


def test_a_number_without_end_is_told_at_once() -> None:
    with pytest.raises(DistIRError, match="there is no 0F1, of 1000000000 microbatches"):
        check(order("0F0 0F999999999"))


@pytest.mark.parametrize("name", schedule_names())
def test_orders_with_tasks_exchanged_are_valid_if_they_can_be_done(name: str) -> None:
    """Against the rules written down once more: neither is stricter than the other."""
    draw = random.Random(name)
    found = {True: 0, False: 0}
    for _ in range(150):
        chunks = schedule_named(name).chunks or draw.choice((1, 2))
        valid = order_of(name, draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 5)), chunks)
        rows = [list(tasks) for tasks in valid.tasks]
        for _ in range(draw.choice((1, 1, 2))):
            row = draw.choice(rows)
            if draw.random() < 0.9:
                i = draw.randrange(len(row))
                j = min(len(row) - 1, i + draw.choice((1, 2)))
                row[i], row[j] = row[j], row[i]
            else:
                draw.choice(rows).append(row.pop(draw.randrange(len(row)))) if len(row) > 1 else row.clear()
        mutant = Order(tuple(map(tuple, rows)), valid.rank_of)
        expected = is_valid(mutant)
        found[expected] += 1
        if expected:
            check(mutant)
        else:
            with pytest.raises(DistIRError):
                check(mutant)
    assert min(found.values()) > 10, found
