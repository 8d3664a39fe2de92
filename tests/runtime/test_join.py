"""Which rank reports that the ranks have not met, and which ranks it names."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from distir_relax.runtime import join, lost_ranks
from distir_relax.runtime.arrivals import report
from distir_relax.runtime.lost_ranks import LostRanks
from distir_relax.runtime.transports import torch_distributed


class Ended(Exception):
    pass


def end_of(rank: int, half_way: dict[int, str], at_the_end: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `rank` does where the others are as two looks find them."""
    looks = iter([half_way, at_the_end])

    def end(code: int) -> None:
        assert code == 75
        raise Ended

    monkeypatch.setattr(join, "arrivals", lambda: next(looks))
    monkeypatch.setattr(join, "rank_in", lambda: rank)
    monkeypatch.setattr(join.os, "_exit", end)
    monkeypatch.setattr(join.time, "sleep", lambda seconds: None)
    with pytest.raises(Ended):
        join._end_unless(threading.Event(), 0.02)


THERE, STOPPED = "waits for the others (process 7)", "is stopped (process 8)"
LATE = "has started, but has not reached the rendezvous (process 9)"


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
        # Rank 0 loads something.
        ({0: LATE, 1: STOPPED, 2: THERE}, {0: LATE, 1: STOPPED, 2: THERE}, 2),
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
        assert said.count("error: the ranks have not connected within 0.02 s") == (rank == speaks)
        if rank == speaks:
            lines = [line.strip() for line in said.splitlines()[1:-1]]
            assert lines == report(at_the_end)
            assert set(lines) >= {f"rank {one} {state}" for one, state in at_the_end.items()}
            assert said.splitlines()[-1].startswith("  hint: look at what the missing ranks printed")


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "7")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "7")
    lines = ["rank 0 waits for the others (process 7)", "rank 1 is missing: not started, or ended already"]
    lines += [f"rank 2 {LATE}", f"rank 3 {STOPPED}", "ranks 4 to 6 are missing: not started, or ended already"]
    assert report({0: THERE, 2: LATE, 3: STOPPED}) == lines
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "3")
    assert report({0: THERE, 1: THERE, 2: THERE})[3:] == ["ranks 3 to 6 are not on this node, or missing"]


def test_under_torchrun_the_store_knows_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"RANK": 3, "WORLD_SIZE": 5, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}.items():
        monkeypatch.setenv(name, str(value))
    for rank in (1, 3):
        torch_distributed._announce(rank)
    missing = f"missing: not started, or unable to reach 127.0.0.1:{store.port}"
    assert report({3: THERE}) == [
        f"rank 0 is {missing}", "rank 1 is waiting for the others, elsewhere", f"rank 2 is {missing}",
        f"rank 3 {THERE}", f"rank 4 is {missing}",
    ]  # fmt: skip
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert report({3: THERE})[0] == (
            f"ranks 0 to 2 are not visible: no response from {address}, the store on rank 0"
        )


def test_ranks_that_have_ended_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two other ranks one is killed, and not yet waited for."""
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        ranks = {1: psutil.Process(first.pid), 2: psutil.Process(second.pid)}
        monkeypatch.setattr(lost_ranks, "processes_of_this_node", lambda: ranks)
        handler = signal.getsignal(signal.SIGTERM)
        world: Any = SimpleNamespace(rank=0)
        with LostRanks(world):
            assert world.ended() == []
            first.kill()
            while not world.ended():
                time.sleep(0.01)
            assert world.ended() == [f"rank 1 has ended (process {first.pid})"]
        assert signal.getsignal(signal.SIGTERM) == handler
        second.kill()


def test_a_rank_that_ends_the_launch_itself_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranks, "processes_of_this_node", lambda: dict.fromkeys(range(3), None))
    worlds: list[Any] = [SimpleNamespace(rank=rank) for rank in range(3)]
    with LostRanks(worlds[0]) as first, LostRanks(worlds[1]) as second, LostRanks(worlds[2]) as third:
        worlds[2].announce()
        assert (first._announced(), second._announced(), third._announced()) == ({2}, {2}, set())
        assert first._announced() == set()
