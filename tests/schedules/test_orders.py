"""Every schedule for any numbers of ranks, microbatches and chunks that it takes; and what is asked for wrongly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from distir_relax.errors import DistIRError
from distir_relax.schedules import (
    Memory,
    Order,
    Shape,
    Task,
    Times,
    check,
    order_of,
    schedule,
    schedule_named,
    schedule_names,
    timeline,
)
from distir_relax.schedules.registry import temporary_schedules
from tests.schedules.reference import starts

UNEQUAL = Times(forward=Fraction(3, 7), inputs=2, weights=Fraction(5, 3), send=Fraction(1, 11))


@pytest.mark.parametrize("p", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "auto"])
def test_it_is_valid_for_any_numbers(name: str, p: int) -> None:
    """Fewer microbatches than ranks, and numbers that do not divide each other, are no exceptions."""
    entry = schedule_named(name)
    for m in (1, 2, 3, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 2):
        for chunks in (entry.chunks,) if entry.chunks else (1, 2, 3):
            if m < 1:
                continue
            order = order_of(name, p, m, chunks)
            check(order)
            assert (order.ranks, order.stages, order.microbatches, order.chunks) == (p, p * chunks, m, chunks)
            assert order.trains == (entry.weights != "none")
            if entry.weights != "either":
                assert order.splits == (entry.weights == "apart")
            assert [len(order.stages_of(rank)) for rank in range(p)] == [chunks] * p


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "auto"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 2), (3, 7)])
def test_tasks_begin_when_they_can(name: str, p: int, m: int) -> None:
    order = order_of(name, p, m, schedule_named(name).chunks or 2)
    factors = (1,) * (m - 1) + (Fraction(2, 5),)
    for times in (UNEQUAL, Times(UNEQUAL.forward, 2, Fraction(5, 3), Fraction(1, 11), factors)):
        found = timeline(order, times)
        expected = starts(order, times)
        assert {task: start for task, start, _ in found.tasks()} == expected
        assert found.makespan == max(start + times.of(task) for task, start in expected.items())
        for rank in range(p):
            gaps = sum(end - start for start, end in found.bubbles(rank))
            assert gaps == found.idle[rank] == found.makespan - found.work[rank]
            assert found.span_idle[rank] <= found.idle[rank]


def test_a_task_is_named_as_torch_names_it() -> None:
    assert [str(Task(kind, 3, 0)) for kind in "FIWB"] == ["3F0", "3I0", "3W0", "3B0"]
    assert sorted([Task("W", 0, 1), Task("F", 2, 0), Task("F", 1, 3)])[0] == Task("F", 1, 3)


def test_stages_go_round_or_there_and_back() -> None:
    assert Shape(3, 1, 2).loop() == (0, 1, 2, 0, 1, 2)
    assert Shape(3, 1, 2).vee() == (0, 1, 2, 2, 1, 0)
    assert Shape(2, 1, 3).vee() == (0, 1, 1, 0, 0, 1)


def test_a_name_that_is_none_lists_those_that_are() -> None:
    with pytest.raises(DistIRError, match=r"expected a schedule, one of gpipe, 1f1b, interleaved, .*, found 'gpip'"):
        order_of("gpip", 2, 3)


def test_chunks_that_a_schedule_does_not_take() -> None:
    with pytest.raises(DistIRError, match=r"the schedule 1f1b takes 1 chunk a rank, found 2\n  hint: chunks=1, or a"):
        order_of("1f1b", 2, 3, 2)


@pytest.mark.parametrize(("p", "m", "v"), [(0, 3, 1), (3, 0, 1), (-1, 1, 1), (3, 3, 0)])
def test_a_pipeline_of_nothing_is_refused(p: int, m: int, v: int) -> None:
    with pytest.raises(DistIRError, match=f"found {p} ranks, {m} microbatches, {v} chunks"):
        order_of("gpipe", p, m, v)


def test_memory_that_an_order_does_not_fit_into() -> None:
    order_of("1f1b", 3, 5, memory=Memory((3, 2, 1)))
    with pytest.raises(DistIRError, match=r"^schedule 1f1b: rank 1 keeps 2 stage activations, and may keep 1\n  hint"):
        order_of("1f1b", 3, 5, memory=Memory((3, 1, 1)))
    with pytest.raises(DistIRError, match="rank 0 keeps activations of 33, and may keep 30"):
        order_of("1f1b", 3, 5, memory=Memory(30, sizes=(11, 3, 7)))
    with pytest.raises(DistIRError, match="expected 3 caps of memory, one for each rank, found 2"):
        order_of("1f1b", 3, 5, memory=Memory((3, 1)))
    with pytest.raises(DistIRError, match="expected 3 sizes of activations, one for each stage, found 1"):
        order_of("1f1b", 3, 5, memory=Memory(3, sizes=(1,)))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (Times(forward=(1, 2)), "expected 3 times forward, one for each stage, found 2"),
        (Times(send=(1,)), "expected 3 times send"),
        (Times(factors=(1, 2)), "expected 5 factors of times, one for each microbatch, found 2"),
    ],
)
def test_times_of_other_numbers_of_stages(times: Times, message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        order_of("1f1b", 3, 5, times=times)


def test_negative_times_are_refused() -> None:
    for wrong in (-1, (1, -2), float("nan"), float("inf")):
        with pytest.raises(DistIRError, match="the times of tasks are finite and not negative, found forward"):
            Times(forward=wrong)
    with pytest.raises(DistIRError, match="not negative, found -1"):
        Memory((3, -1))


def test_sends_take_their_time_between_ranks_alone() -> None:
    times = Times(forward=(1, 2, 3), inputs=0, weights=0, send=(10, 100))
    assert timeline(order_of("streaming", 3, 1), times).makespan == 1 + 10 + 2 + 100 + 3
    one_rank = Order((tuple(Task("F", stage, 0) for stage in range(3)),), (0, 0, 0))
    assert timeline(one_rank, times).makespan == 6


def test_an_inference_that_keeps_nothing() -> None:
    found = timeline(order_of("streaming", 3, 7), Times(factors=(1,) * 6 + (Fraction(1, 3),)))
    assert found.peak == (1, 1, 1)
    assert found.makespan == 8 + Fraction(1, 3)
    assert found.starts[2] == (2, 3, 4, 5, 6, 7, 8)


def test_a_schedule_of_ones_own_is_checked() -> None:
    with temporary_schedules():

        @schedule("one by one")
        def order_microbatches(shape: Shape) -> Order:
            return Order(
                tuple(
                    tuple(Task(kind, rank, m) for m in range(shape.microbatches) for kind in "FB")
                    for rank in range(shape.ranks)
                ),
                shape.loop(),
            )

        assert timeline(order_of("one by one", 3, 5)).makespan == 5 * 9

        @schedule("wrong")
        def wrong(shape: Shape) -> Order:
            return Order(tuple((Task("B", rank, 0), Task("F", rank, 0)) for rank in range(shape.ranks)), shape.loop())

        with pytest.raises(DistIRError, match=r"^schedule wrong, rank 0, position 0, task 0B0: needs 0F0"):
            order_of("wrong", 3, 1)
        with pytest.raises(DistIRError, match="schedule 'wrong' already exists"):
            schedule("wrong")(wrong)
    assert "wrong" not in schedule_names()
