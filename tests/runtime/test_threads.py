"""Communicators over threads: every collective on many meshes, and failures that release the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import every_collective
import numpy as np
import pytest
import torch

from distir_relax.errors import RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.communicator import Communicator, collective
from distir_relax.runtime.progress import Point
from distir_relax.runtime.transports.threads import RankReleased, RankThreads, ThreadWorld
from tests.runtime.processes import python

pytestmark = pytest.mark.timeout(60)


def on_all_ranks(mesh: DeviceMesh, work: Callable[[Communicator], None]) -> list[Communicator]:
    """Run `work` on every rank of `mesh`, in threads; the communicators. Raises the first error."""
    world = ThreadWorld(mesh)
    comms = [world.communicator(rank) for rank in range(mesh.size)]

    def guarded(comm: Communicator) -> None:
        try:
            work(comm)
        except RankReleased:
            pass
        except BaseException as error:
            world.abort(error)

    ranks = RankThreads([partial(guarded, comm) for comm in comms])
    ranks.start()
    assert ranks.wait(20), "a rank hangs"
    if world.error is not None:
        raise world.error
    return list(comms)


@pytest.mark.parametrize(
    "mesh",
    [
        DeviceMesh((1,), ("tp",)),
        DeviceMesh((2,), ("tp",)),
        DeviceMesh((3,), ("tp",)),
        DeviceMesh((5,), ("tp",)),
        DeviceMesh((7,), ("tp",)),
        DeviceMesh((2, 3), ("dp", "tp")),
        DeviceMesh((2, 1, 2), ("dp", "pp", "tp")),
    ],
    ids=lambda mesh: "x".join(map(str, mesh.shape)),
)
def test_every_collective(mesh: DeviceMesh) -> None:
    on_all_ranks(mesh, every_collective.check_all)


def test_an_error_of_one_rank_releases_the_others() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 2:
            raise ValueError("rank 2 broke")
        comm.all_reduce(torch.ones(3), "tp", "sum")

    with pytest.raises(ValueError, match="rank 2 broke"):
        on_all_ranks(DeviceMesh((3,), ("tp",)), work)


def test_an_error_releases_ranks_that_wait_for_what_they_have_started() -> None:
    waiting = []

    def work(comm: Communicator) -> None:
        started = comm.start_all_reduce(torch.ones(3), "tp", "sum") if comm.rank != 2 else None
        if comm.rank == 2:
            while len(waiting) < 2:
                time.sleep(0.01)
            raise ValueError("rank 2 broke")
        waiting.append(comm.rank)
        comm.finish_collective(started, step=4)

    with pytest.raises(ValueError, match="rank 2 broke"):
        on_all_ranks(DeviceMesh((3,), ("tp",)), work)


def test_the_program_says_where_it_waits_for_what_it_has_started() -> None:
    seen = []

    def work(comm: Communicator) -> None:
        comm.checks_steps = False
        if comm.rank == 1:
            while comms[0].progress.current is None or comms[0].progress.current.kind != "finish_collective":
                time.sleep(0.01)
            seen.append(comms[0].progress.current)
        comm.finish_collective(comm.start_all_reduce(torch.ones(3), "tp", "sum", step=4), step=4)

    world = ThreadWorld(DeviceMesh((2,), ("tp",)))
    comms = [world.communicator(rank) for rank in range(2)]
    ranks = RankThreads([partial(work, comm) for comm in comms])
    ranks.start()
    assert ranks.wait(20)
    assert seen == [Point(4, "finish_collective")]
    for comm in comms:
        assert comm.traffic.calls == {"all_reduce": 1}
        assert comm.progress.waited > 0


def test_bytes_are_those_of_a_ring() -> None:
    sizes = [3, 0, 5]

    def work(comm: Communicator) -> None:
        x = torch.zeros(8, 2)
        comm.all_reduce(x, "tp", "sum")
        comm.all_reduce(x, "tp", "max")
        comm.reduce_scatter(x, "tp", 0, sizes, "sum")
        comm.all_gather(x[: sizes[comm.rank]], "tp", 0, sizes)
        comm.all_to_all(x[: sizes[comm.rank]], "tp", 1, [1, 1, 0], 0, sizes)
        comm.shard(x, "tp", 0, sizes)
        if comm.rank == 0:
            comm.send(x, 1)
        if comm.rank == 1:
            comm.recv((8, 2), "float32", 0)

    comms = on_all_ranks(DeviceMesh((3,), ("tp",)), work)
    row = 2 * 4
    for rank, comm in enumerate(comms):
        sent = comm.traffic.bytes
        assert sent["all_reduce"] == 2 * (2 * 2 * 8 * row // 3)
        assert comm.traffic.calls["all_reduce"] == 2
        assert sent["reduce_scatter"] == (8 - sizes[rank]) * row
        assert sent["all_gather"] == (8 - sizes[(rank + 1) % 3]) * row
        assert sent["all_to_all"] == sizes[rank] * 4 * (2 - [1, 1, 0][rank])
        assert sent.get("send") == (8 * row if rank == 0 else None)
        assert "shard" not in sent
        assert comm.traffic.total_bytes == sum(sent.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.all_reduce(torch.ones(2), "pp", "sum"), "no axis 'pp'"),
        (lambda c: c.all_reduce(torch.ones(2), "tp", "product"), "unknown reduction 'product'"),
        (lambda c: c.all_reduce(torch.ones(2, dtype=torch.int32), "tp", "mean"), "the mean of int32"),
        (lambda c: c.all_reduce(torch.ones(2, dtype=torch.bool), "tp", "sum"), "cannot be summed"),
        (lambda c: c.all_gather(torch.ones(2), "tp", 0, [1, 1]), "do not fit its dim 0"),
        (lambda c: c.all_gather(torch.ones(2), "tp", 0, [2]), "do not fit"),
        (lambda c: c.all_gather(torch.ones(2), "tp", 1, [2, 2]), "do not fit its dim 1"),
        (lambda c: c.reduce_scatter(torch.ones(3), "tp", 0, [1, 1], "sum"), "do not fit"),
        (lambda c: c.shard(torch.ones(3), "tp", 0, [1, 1]), "do not fit"),
        (lambda c: c.all_to_all(torch.ones(2), "tp", 0, [1, 1], 0, [2, 2]), "two dims"),
        (lambda c: c.send(torch.ones(2), c.rank), "cannot exchange with rank"),
        (lambda c: c.recv((2,), "float32", 2), "rank 2 of 2"),
        (lambda c: c.recv((2,), "float31", 1 - c.rank), "unknown dtype 'float31'"),
    ],
)
def test_calls_that_do_not_fit(call: Callable[[Communicator], None], message: str) -> None:
    with pytest.raises(RunError, match=message):
        on_all_ranks(DeviceMesh((2,), ("tp",)), call)


def test_ranks_that_disagree_on_a_message() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(torch.ones(3), 1)
        else:
            comm.recv((4,), "float32", 0)

    with pytest.raises(RunError, match="expects 4 x float32 from rank 0, which sends 3 x float32"):
        on_all_ranks(DeviceMesh((2,), ("tp",)), work)


def test_ranks_that_disagree_on_a_shape() -> None:
    with pytest.raises(RunError, match="elements"):
        on_all_ranks(DeviceMesh((2,), ("tp",)), lambda comm: comm.all_reduce(torch.ones(3 + comm.rank), "tp", "sum"))


def test_every_rank_gets_the_same_bits() -> None:
    results: dict[int, torch.Tensor] = {}

    def work(comm: Communicator) -> None:
        x = torch.from_numpy(np.random.default_rng(comm.rank).standard_normal(1001).astype("float32"))
        results[comm.rank] = comm.all_reduce(x, "tp", "sum")

    on_all_ranks(DeviceMesh((5,), ("tp",)), work)
    assert all(torch.equal(results[0], result) for result in results.values())


def test_a_method_is_added_once_to_every_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is added in the test goes with it.
    monkeypatch.setattr(Communicator, "largest_place", None, raising=False)
    monkeypatch.delattr(Communicator, "largest_place")

    @collective
    def largest_place(comm: Communicator, x: torch.Tensor, axis: str) -> torch.Tensor:
        found: torch.Tensor = comm.all_reduce(x * 0 + comm.index(axis), axis, "max")
        return found

    def work(comm: Communicator) -> None:
        assert comm.largest_place(torch.zeros(2), "b").tolist() == [2.0, 2.0]  # type: ignore[attr-defined]
        assert comm.index("b") == comm.mesh.coordinates(comm.rank)[1]

    comms = on_all_ranks(DeviceMesh((2, 3), ("a", "b")), work)
    assert all(comm.traffic.calls == {"all_reduce": 1} for comm in comms)
    with pytest.raises(ValueError, match="communicators have 'largest_place' already"):
        collective(largest_place)


def test_ranks_that_meet_in_different_steps_are_told() -> None:
    def other_step(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(3), "tp", "sum", step=10 if comm.rank == 1 else 15)

    with pytest.raises(RunError, match=r"rank \d is at step #1[05], all_reduce, rank \d at step #1[05], all_reduce"):
        on_all_ranks(DeviceMesh((3,), ("tp",)), other_step)

    def other_kind(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.all_gather(torch.ones(1), "tp", 0, (1, 1, 1), step=4)
        else:
            comm.all_reduce(torch.ones(3), "tp", "sum", step=4)

    with pytest.raises(RunError, match=r"step #4, all_(reduce|gather), rank \d at step #4, all_"):
        on_all_ranks(DeviceMesh((3,), ("tp",)), other_kind)

    def other_message(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(torch.ones(3), 2, step=7)
            comm.send(torch.ones(3), 2, step=6)
        if comm.rank == 2:
            comm.recv((3,), "float32", 0, step=6)
            comm.recv((3,), "float32", 0, step=7)

    with pytest.raises(RunError, match="rank 2 is at step #6, recv, rank 0 at step #7, send"):
        on_all_ranks(DeviceMesh((3,), ("tp",)), other_message)

    def other_time(comm: Communicator) -> None:
        for _ in range(3 - comm.rank):
            comm.all_reduce(torch.ones(0), "tp", "sum", step=1)
        comm.all_gather(torch.ones(1), "tp", 0, (1, 1, 1), step=2)

    with pytest.raises(RunError, match=r"step #1, all_reduce, for time|step #2, all_gather"):
        on_all_ranks(DeviceMesh((3,), ("tp",)), other_time)


FREES_LATE = """
import sys, threading, time
import numpy as np
import torch
from distir_relax.runtime.transports.threads import RankThreads

class Slow:
    __array_interface__ = np.ones(3).__array_interface__

    def __del__(self):
        time.sleep(0.3)

local = threading.local()

def work():
    # Freed when the thread ends, by C++ that gives the interpreter lock away and takes it back.
    local.tensor = torch.from_numpy(np.asarray(Slow()))

ranks = RankThreads([work] * 3)
ranks.start()
assert ranks.wait(20)
sys.exit(2)
"""


def test_the_process_exits_after_ranks_have_freed_their_tensors(tmp_path: Path) -> None:
    program = tmp_path / "frees_late.py"
    program.write_text(FREES_LATE)
    done = python(program)
    assert (done.returncode, done.stderr) == (2, "")


def test_ranks_are_waited_for_until_their_threads_have_ended() -> None:
    freed, local = [], threading.local()

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.1)
            freed.append(self)

    def work() -> None:
        local.slow = Slow()

    ranks = RankThreads([work] * 2)
    ranks.start()
    assert not ranks.wait(0.05)
    assert ranks.wait(20)
    assert len(freed) == 2
