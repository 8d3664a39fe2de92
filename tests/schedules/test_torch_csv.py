"""Orders as torch's pipelining has them: read, written, and compared with torch's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir_relax.errors import DistIRError
from distir_relax.schedules import Order, check, from_csv, order_of, schedule_named, schedule_names, to_csv
from tests.schedules.torch_orders import runs_in_torch, torch_csv

# Where torch has an order: not for fewer microbatches than stages (DualPipeV), nor for uneven rounds (interleaved).
SAME = [
    ("gpipe", "ScheduleGPipe", 1, [(2, 3), (3, 1), (5, 7)]),
    ("interleaved", "ScheduleInterleaved1F1B", 2, [(2, 4), (3, 2), (3, 6), (4, 10), (5, 15), (7, 7)]),
    ("interleaved", "ScheduleInterleaved1F1B", 3, [(2, 3), (4, 10), (5, 5), (8, 16)]),
    ("zb-h1", "ScheduleInterleavedZeroBubble", 1, [(2, 1), (3, 4), (4, 4), (5, 12), (7, 3)]),
    ("zb-v", "ScheduleZBVZeroBubble", 2, [(2, 1), (2, 3), (3, 4), (5, 9), (5, 12), (8, 15)]),
    ("dualpipe-v", "ScheduleDualPipeV", 2, [(2, 4), (3, 6), (3, 8), (5, 11), (8, 19)]),
]
CASES = [(ours, theirs, chunks, p, m) for ours, theirs, chunks, shapes in SAME for p, m in shapes]


@pytest.mark.parametrize(("ours", "theirs", "chunks", "p", "m"), CASES)
def test_orders_of_torch_are_ours(ours: str, theirs: str, chunks: int, p: int, m: int, tmp_path: Path) -> None:
    found = from_csv(torch_csv(theirs, p, m, chunks, tmp_path))
    assert found == order_of(ours, p, m, chunks)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (5, 7)])
def test_other_orders_of_torch_are_valid(p: int, m: int, tmp_path: Path) -> None:
    for theirs in ("ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"):
        found = from_csv(torch_csv(theirs, p, 2 * p, 2, tmp_path))
        assert (found.ranks, found.chunks, found.microbatches) == (p, 2, 2 * p)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (5, 7)])
def test_one_of_torchs_orders_for_1f1b_is_refused(p: int, m: int, tmp_path: Path) -> None:
    """What torch writes of its 1F1B counts the last rank's forwards from 1 (what it runs is another piece of code)."""
    text = torch_csv("Schedule1F1B", p, m, 1, tmp_path)
    with pytest.raises(DistIRError, match=f"rank {p - 1}: there is no {p - 1}F0, of {m + 1} microbatches"):
        from_csv(text)
    *rows, last = text.splitlines()
    moved = [*rows, ",".join(f"{p - 1}F{int(a[2:]) - 1}" if a[1] == "F" else a for a in last.split(","))]
    assert from_csv("\n".join(moved)) == order_of("1f1b", p, m)


@pytest.mark.parametrize("name", [name for name in schedule_names() if name not in ("auto", "streaming")])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (3, 5), (4, 9)])
def test_torch_takes_ours(name: str, p: int, m: int, tmp_path: Path) -> None:
    chunks = schedule_named(name).chunks or 3
    order = order_of(name, p, m, chunks)
    assert runs_in_torch(to_csv(order), p, chunks, m, tmp_path) == dict(enumerate(order.rank_of))


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "auto"])
def test_what_is_written_is_read(name: str) -> None:
    chunks = schedule_named(name).chunks or 2
    order = order_of(name, 3, 13, chunks)
    assert from_csv(to_csv(order)) == order
    assert from_csv(to_csv(order).replace("\r\n", "\n").replace(",", ", , ")) == order


def test_what_is_said_of_weights_is_passed_over_and_overlapped_tasks_follow_each_other() -> None:
    text = "0UNSHARD,0F0,,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0RESHARD,0REDUCE_GRAD\n"
    (found,) = from_csv(text).tasks
    assert [str(task) for task in found] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "^a.csv: a schedule has ranks and stages, found 0 ranks"),
        (
            "0F0,forward",
            "^a.csv:1:2: expected an action: stage, F, B, I or W, microbatch, such as 2F0, found 'forward'",
        ),
        (
            "0F0\n0SEND_F0",
            "^a.csv:2:1: expected an action.*'0SEND_F0'\n  hint: use the schedule before torch",
        ),
        ("0F٣", "^a.csv:1:1: expected an action"),
        ("0F0\n1F0\n1B0", "^a.csv: stage 1 is on rank 1 and on rank 2"),
        ("0F0\n2F0", "^a.csv: there is no stage 1, and one 2"),
        ("999999999F0", "^a.csv: there is no stage 0, and one 999999999"),
        ("0F999999999", "^a.csv: rank 0: there is no 0F0, of 1000000000 microbatches"),
        ("0F" + "1" * 5000, "^a.csv:1:1: expected an action"),
        ("0F0,0B0,0B0", "^a.csv: rank 0, position 2, task 0B0: duplicate task"),
        ("(0F0;0B0OVERLAP_F_B", "^a.csv:1:1: expected an action"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(DistIRError, match=message):
        from_csv(text, where="a.csv")


def test_ranks_can_be_given() -> None:
    with pytest.raises(DistIRError, match="schedule: rank 0, position 0, task 0F0: stage 0 is on rank 1"):
        from_csv("0F0\n1F0", rank_of=(1, 0))
    assert from_csv("0F0\n1F0", rank_of=(0, 1)) == order_of("streaming", 2, 1)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.sampled_from('0123FBIW,;()\n\r "OVERLAP_F_BSEND\x0b\u2028x')) | st.text())
def test_any_text_is_an_order_or_an_error(text: str) -> None:
    try:
        order = from_csv(text)
    except DistIRError:
        return
    check(order)
    assert from_csv(to_csv(order)) == order


def test_damaged_texts_are_orders_or_errors() -> None:
    """Characters of a true schedule lost, doubled, exchanged: what is read is valid, written, and read again."""
    draw = random.Random(5)
    found: list[Order] = []
    for _ in range(1500):
        text = list(to_csv(order_of(draw.choice(("1f1b", "streaming", "zb-h1")), draw.choice((1, 2, 3)), 2)))
        for _ in range(draw.choice((1, 2, 4))):
            i = draw.randrange(len(text))
            text[i : i + draw.choice((0, 1, 3))] = draw.choice((text[i], "", ",", "\n", "W", "9", "\x00", "0F1"))
        try:
            found.append(from_csv("".join(text)))
        except DistIRError:
            continue
        assert from_csv(to_csv(found[-1])) == found[-1]
    assert len(found) > 30
