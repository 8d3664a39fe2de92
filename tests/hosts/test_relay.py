"""The relay of the laboratory, with sockets in place of devices."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.hosts import relay
from tests.hosts.relay import Relay, hardware_address

NAMES = ("n0", "n1", "n2")
EVERYONE = b"\xff" * 6
Start = Callable[..., tuple[Relay, list[socket.socket]]]


@contextmanager
def running(switch: Relay) -> Iterator[None]:
    commands, end = os.pipe()
    thread = threading.Thread(target=switch.run, args=[commands])
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        os.close(commands)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a relay; return it, and the other ends of its devices."""
    with ExitStack() as stack:

        def started(
            delay: float = 0.0, rate: float = 1e9, loss: float = 0.0, seed: int = 0
        ) -> tuple[Relay, list[socket.socket]]:
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in NAMES]
            for device, host in pairs:
                device.setblocking(False)
                host.settimeout(10)
                stack.enter_context(device)
                stack.enter_context(host)
            descriptors = {f"v{name}": device.fileno() for name, (device, _) in zip(NAMES, pairs, strict=True)}
            monkeypatch.setattr(relay, "open_tap", descriptors.__getitem__)
            switch = Relay(NAMES, delay, rate, loss, seed)
            stack.enter_context(running(switch))
            return switch, [host for _, host in pairs]

        yield started


def frame(destination: bytes, content: bytes) -> bytes:
    return bytes(relay._HEADER) + destination + hardware_address(0) + content


def received(switch: Relay, sent: int, host: socket.socket) -> list[bytes]:
    """The contents of the frames that have arrived at a host, of `sent` frames of all hosts."""
    until = time.monotonic() + 10
    while switch.frames < sent or any(port.queue for port in switch.ports):
        assert time.monotonic() < until
        time.sleep(0.001)
    host.settimeout(0.05)
    contents = []
    try:
        while True:
            contents.append(host.recv(1 << 17)[relay._HEADER + 12 :])
    except TimeoutError:
        return contents


def test_frames_go_to_their_destination_and_broadcasts_to_all_others(start: Start) -> None:
    switch, (sender, one, other) = start()
    for destination, content in ((hardware_address(1), b"1"), (EVERYONE, b"all"), (b"\x02" * 6, b"nobody")):
        sender.send(frame(destination, content))
    assert received(switch, 3, one) == [b"1", b"all"]
    assert received(switch, 3, other) == [b"all"]
    assert received(switch, 3, sender) == []


def test_a_frame_is_delayed_and_the_next_is_behind_it(start: Start) -> None:
    _, (sender, one, _) = start(delay=0.05, rate=1e6)
    begin = time.monotonic()
    for _ in range(2):
        sender.send(frame(hardware_address(1), bytes(10_000)))
    times = []
    for _ in range(2):
        one.recv(1 << 17)
        times.append(time.monotonic() - begin)
    assert times[0] >= 0.06 - relay.EARLY
    assert times[1] >= 0.07 - relay.EARLY


def test_a_queue_that_is_full_drops_frames(start: Start) -> None:
    switch, (sender, one, _) = start(rate=1e5)
    for _ in range(10):
        sender.send(frame(hardware_address(1), bytes(10_000)))
    arrived = len(received(switch, 10, one))
    assert 1 <= arrived < 10
    assert switch.dropped == 10 - arrived


def test_a_host_that_is_cut_off_neither_sends_nor_receives(start: Start) -> None:
    switch, (sender, one, other) = start()
    switch.ports[1].is_cut = True
    one.send(frame(hardware_address(2), b"from"))
    sender.send(frame(EVERYONE, b"all"))
    assert received(switch, 2, other) == [b"all"]
    assert received(switch, 2, one) == []
    assert switch.dropped == 2


def test_a_seed_draws_the_frames_that_are_lost(start: Start) -> None:
    arrived = []
    for seed in (1, 1, 2):
        switch, (sender, one, _) = start(loss=0.5, seed=seed)
        for number in range(64):
            sender.send(frame(hardware_address(1), bytes([number])))
        arrived.append(received(switch, 64, one))
        assert switch.dropped == 64 - len(arrived[-1])
    assert arrived[0] == arrived[1] != arrived[2]
    assert 16 < len(arrived[0]) < 48
