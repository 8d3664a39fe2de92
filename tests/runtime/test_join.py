"""Which rank says that the ranks have not met."""

from __future__ import annotations

import threading

import pytest

from distir_relax.runtime import join


class Ended(Exception):
    pass


def end_of(rank: int, half_way: dict[int, str], at_the_end: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `rank` does where the others are as two looks find them."""
    looks = iter([half_way, at_the_end])

    def end(code: int) -> None:
        assert code == 2
        raise Ended

    monkeypatch.setattr(join, "ranks_of_this_node", lambda: next(looks))
    monkeypatch.setattr(join, "rank_in", lambda: rank)
    monkeypatch.setattr(join.os, "_exit", end)
    monkeypatch.setattr(join.time, "sleep", lambda seconds: None)
    with pytest.raises(Ended):
        join._end_unless(threading.Event(), 0.02)


THERE, STOPPED = "is there (process 7)", "is stopped (process 8)"


@pytest.mark.parametrize(
    ("half_way", "at_the_end", "speaks"),
    [
        # All are there: the first that is not stopped.
        ({0: THERE, 1: STOPPED, 2: THERE}, {0: THERE, 1: STOPPED, 2: THERE}, 0),
        ({0: STOPPED, 1: THERE, 2: THERE}, {0: STOPPED, 1: THERE, 2: THERE}, 1),
        # Rank 0 has said it and ended: the launcher has not yet ended rank 2.
        ({0: THERE, 1: STOPPED, 2: THERE}, {1: STOPPED, 2: THERE}, 0),
        # Rank 0 began so late that it would say it long after rank 2.
        ({1: STOPPED, 2: THERE}, {0: THERE, 1: STOPPED, 2: THERE}, 2),
        # Rank 0 was stopped later.
        ({0: THERE, 2: THERE}, {0: STOPPED, 2: THERE}, 2),
    ],
)
def test_one_rank_says_that_the_ranks_have_not_met(
    half_way: dict[int, str],
    at_the_end: dict[int, str],
    speaks: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank in (0, 1, 2):
        end_of(rank, half_way, at_the_end, monkeypatch)
        said = capsys.readouterr().err
        assert said.count("error: the ranks have not met within 0.02 s") == (rank == speaks)
        if rank == speaks:
            assert [line.strip() for line in said.splitlines()[1:]] == [
                f"rank {one} {state}" for one, state in sorted(at_the_end.items())
            ]
