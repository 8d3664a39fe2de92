"""Parts of sessions of processes: frames, shared memory, turns, requests in flight, errors as messages."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from distir_relax.errors import BundleError, DistIRError, RunError
from distir_relax.runtime.error_messages import error_from_json, error_to_json, name_rank
from distir_relax.runtime.process_session.connection import Connection, Disconnected
from distir_relax.runtime.process_session.rank_processes import RankProcesses
from distir_relax.runtime.process_session.requests import RanksLost, Requests
from distir_relax.runtime.process_session.shared_memory import Segment
from distir_relax.runtime.process_session.tensor_frames import pack, shared_size, unpack
from distir_relax.runtime.turns import Turns

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    one, other = map(Connection, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_frames_of_any_size_in_both_directions(ends: tuple[Connection, Connection]) -> None:
    """Both ends send more than a socket holds before either receives."""
    sizes = (0, 1, 7, 1_000_003, 65_536, 3_000_000)
    payloads = [os.urandom(size) for size in sizes]

    def talk(end: Connection) -> list[tuple[Any, bytes]]:
        for number, payload in enumerate(payloads):
            end.send({"number": number, "text": "ä" * number}, payload)
        frames = [end.receive() for _ in payloads]
        return [(frame.header, frame.payload) for frame in frames]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(talk, ends):
            assert found == [({"number": n, "text": "ä" * n}, payload) for n, payload in enumerate(payloads)]


def test_only_reading_a_frame_waits_for_it(ends: tuple[Connection, Connection]) -> None:
    """A rank behind a cut link sends nothing and does not end, while the driver looks at all ranks."""
    one, other = ends
    with ThreadPoolExecutor(1) as pool:
        filled = pool.submit(other.fill)
        try:
            assert filled.result(5.0)
            assert other.take() is None
        finally:
            one.send({})
    assert other.receive().header == {}


def test_files_in_frames_and_the_end(ends: tuple[Connection, Connection]) -> None:
    one, other = ends
    segments = [Segment.create(4096), Segment.create(8192)]
    one.send({"first": 1}, b"abc", [segment.file for segment in segments])
    one.send({"second": 2})
    frame = other.receive()
    copies = [Segment(file) for file in frame.files]
    assert [copy.size for copy in copies] == [4096, 8192]
    segments[1].tensor(64, "int16", (2, 3)).copy_(torch.arange(6).view(2, 3))
    assert copies[1].tensor(64, "int16", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert other.receive().header == {"second": 2}
    one.close()
    with pytest.raises(Disconnected):
        other.receive()
    with pytest.raises(Disconnected):
        other.send({})
    for segment in (*segments, *copies):
        segment.close()


def test_tensors_of_every_form() -> None:
    big = torch.randn(301, 101)
    tensors = {
        "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "bf": torch.randn(5).bfloat16(), "big": big,
        "flipped": torch.randn(211, 307).T, "mask": torch.rand(7, 9) > 0.5, "tokens": torch.arange(9).view(3, 3)[:, 1:],
    }  # fmt: skip
    room = shared_size(x.numel() * x.element_size() for x in tensors.values())
    assert room == 121_664 + 259_136
    segment = Segment.create(room)
    # The second, the larger one, does not fit.
    small = Segment.create(150_000)
    for memory, shared in ((segment, 2), (small, 1), (None, 0)):
        descriptors, payload = pack(tensors, memory)
        assert sum(descriptor[3] for descriptor in descriptors) == shared
        for copy in (False, True):
            found = unpack(descriptors, payload, memory, copy)
            assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in tensors.items())
    kept = unpack(*pack(tensors, segment), segment, copy=True)["big"]
    segment.tensor(0, "float32", big.shape).zero_()
    assert torch.equal(kept, big)
    for one in (segment, small):
        one.close()


class Echo:
    """Ranks in threads, which reply with the tensors they get, after `delay`; some requests end otherwise."""

    def __init__(self, ranks: int) -> None:
        pairs = [socket.socketpair() for _ in range(ranks)]
        self.ends = [Connection(theirs) for _, theirs in pairs]
        self.delay = 0.0
        self.handled: list[int] = []
        launch = subprocess.Popen(["true"])
        launch.wait()
        connections = [Connection(ours) for ours, _ in pairs]
        self.requests = Requests(RankProcesses("threads", ranks, launch, None, connections, [None] * ranks))
        for rank in range(ranks):
            threading.Thread(target=self._run, args=(rank,), daemon=True).start()

    def _run(self, rank: int) -> None:
        with suppress(Disconnected):
            self._serve(rank)

    def _serve(self, rank: int) -> None:
        segments: dict[str, Segment] = {}
        while True:
            frame = self.ends[rank].receive()
            header, number = frame.header, frame.header["number"]
            segments.update((name, Segment(file)) for name, file in zip(header["segments"], frame.files, strict=True))
            tensors = unpack(header["tensors"], frame.payload, segments.get("inputs"), copy=True)
            time.sleep(self.delay + 0.1 * (rank == header.get("late")))
            if rank in header.get("fails", ()):
                error = error_to_json(RunError(f"no {header.get('word', '')}"))
                self.ends[rank].send({"number": number, "error": error, "at": [header.get("at", [0, 0])[rank]]})
            elif rank == 0:
                self.handled.append(number)
                descriptors, payload = pack(tensors, segments.get("outputs") if header["shares"] else None)
                self.ends[0].send({"number": number, "tensors": descriptors}, payload)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo(2)
    yield made
    for end in made.ends:
        end.close()
    made.requests.close()


def test_requests_in_flight_keep_their_tensors(echo: Echo) -> None:
    requests = echo.requests
    echo.delay = 0.01
    values = [torch.full((100, 200), float(n)) for n in range(6)]
    numbers = [requests.submit("echo", {}, {"x": x}, 0, 1 << 20) for x in values]
    requests.abandon(numbers[1])
    for number, x in reversed([pair for pair in zip(numbers, values, strict=True) if pair[0] != numbers[1]]):
        assert torch.equal(requests.result(number).tensors["x"], x)
    assert echo.handled == numbers
    # Larger segments replace the first ones, and replies belong to the caller.
    kept = requests.result(requests.submit("echo", {}, {"x": values[2]}, 0, 1 << 20)).tensors["x"]
    large = torch.randn(700, 900)
    assert torch.equal(requests.result(requests.submit("echo", {}, {"x": large}, 0, 4 << 20)).tensors["x"], large)
    assert torch.equal(kept, values[2])


def test_an_error_of_all_ranks_is_that_of_its_request(echo: Echo) -> None:
    requests = echo.requests
    numbers = [requests.submit("echo", values, {}, 0) for values in ({}, {"fails": [0, 1], "word": "way"}, {})]
    with pytest.raises(RunError, match=r"^no way$"):
        requests.result(numbers[1])
    requests.result(numbers[2])
    requests.result(numbers[0])


@pytest.mark.parametrize(("values", "message"), [
    ({"fails": [1], "late": 0}, r"^no  \(on rank 1 of 2\)$"),
    ({"fails": [0, 1], "at": [1, 2]}, r"^no  \(on rank 0 of 2\)$"),
])  # fmt: skip
def test_other_errors_end_the_session(echo: Echo, values: dict[str, Any], message: str) -> None:
    requests = echo.requests
    for _ in range(2):
        with pytest.raises(RanksLost) as caught:
            requests.result(requests.submit("echo", values, {}, 0))
        with pytest.raises(RunError, match=message):
            raise caught.value.error


def test_an_error_after_the_reply_is_that_of_later_requests(echo: Echo) -> None:
    requests = echo.requests
    requests.result(requests.submit("echo", {"fails": [1], "late": 1}, {}, 0))
    time.sleep(0.2)
    with pytest.raises(RanksLost, match="no"):
        requests.result(requests.submit("echo", {}, {}, 0))


def test_the_first_error_of_a_launch_is_that_of_its_ranks() -> None:
    """Agents that lose the launcher, which ends, say so after it has named the loss."""
    with tempfile.TemporaryFile() as output:
        output.write(b"error: host b was lost\n  hint: none\nerror: the launcher cannot be reached\n")
        launch = subprocess.Popen([sys.executable, "-c", "raise SystemExit(75)"])
        launch.wait()
        ranks = RankProcesses("the launch", 2, launch, output, are_local=False)
        assert ranks.lost([1]).message == "host b was lost"


def test_turns_come_in_order_and_waiting_may_be_given_up() -> None:
    turns, order = Turns("in use by a stream, of the same caller"), []

    def thread(name: str) -> None:
        with turns.taken():
            order.append(name)

    async def task(name: str) -> None:
        async with turns.taken_async():
            order.append(name)

    async def main() -> None:
        async with turns.taken_async():
            first = threading.Thread(target=thread, args=("thread",))
            first.start()
            while len(turns._waiting) < 1:
                await asyncio.sleep(0.001)
            given_up, second = asyncio.create_task(task("given up")), asyncio.create_task(task("task"))
            await asyncio.sleep(0.01)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            with pytest.raises(RunError, match="of the same caller"):
                await task("self")
            with pytest.raises(RunError, match="of the same caller"):
                thread("would block the loop")
            assert turns.is_taken
        await second
        first.join()

    asyncio.run(main())
    assert order == ["thread", "task"]
    assert not turns.is_taken


def test_errors_as_messages() -> None:
    error = error_from_json(error_to_json(BundleError("expected a, found b", "file.py:3", "do c")))
    assert isinstance(error, BundleError)
    assert str(error) == "file.py:3: expected a, found b\n  hint: do c"
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as raised:
        found = name_rank(error_from_json(error_to_json(raised)), 2, 3)
    assert isinstance(found, ZeroDivisionError)
    assert "test_process_session_parts.py" in found.__notes__[0]
    assert found.__notes__[1] == "raised on rank 2 of 3"

    class Odd(Exception):
        pass

    class Named(DistIRError):
        pass

    assert str(error_from_json(error_to_json(Odd("x")))) == "Odd: x"
    assert type(error_from_json(error_to_json(Named("x")))) is RunError
    assert type(error_from_json(error_to_json(UnicodeDecodeError("utf-8", b"", 0, 1, "x")))) is RuntimeError
