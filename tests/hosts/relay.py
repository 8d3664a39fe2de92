"""Relay Ethernet frames between hosts with a delay, a rate and random loss: ``python -m tests.hosts.relay``.

The switch of a laboratory whose links have a delay, on a kernel without netem. Each host is a port: a TAP device, which
the laboratory moves into the host's network namespace. The devices have virtio headers, so that checksums and
segmentation are left to the receiver: a frame is a TCP segment of up to 64 KB, and the relay handles a forty-fifth of
the frames of a wire with an MTU of 1,500. A loss is that of such a frame.

    host --read--> [ uplink: rate ] --> [ downlink of the destination: rate ] --> [ delay ] --write--> host

A link is full duplex, each direction a queue; a frame that would wait for more than `QUEUE` seconds is dropped. The
switch is cut-through: a frame that waits for nobody is serialized once.

Standard input takes commands, ``cut NAME``, ``mend NAME`` or ``statistics``; each is answered by a line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

QUEUE = 0.02
"""Seconds that a frame waits at most, as in a token bucket of the laboratory."""
EARLY = 20e-6
"""Seconds by which a frame may be early, if the relay is awake anyway: fewer wake-ups, which are half of its cost."""
_SLACK_OPTION = 29  # PR_SET_TIMERSLACK
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFORMATION, _VIRTIO_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS_4, _SEGMENTS_6 = 0x01, 0x02, 0x04
_HEADER = 10
"""Bytes of a virtio header, which the frame follows."""
_FRAME = 66_000


def hardware_address(number: int) -> bytes:
    """Return the hardware address of a port; ports are numbered from 0."""
    return bytes((0x02, 0, 0, 0, 0, number + 1))


@dataclass
class Port:
    """A host's TAP device, and when its link is free again in each direction."""

    name: str
    descriptor: int
    is_cut: bool = False
    uplink_free: float = 0.0
    downlink_free: float = 0.0
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    """Frames for the host, and when they arrive."""


class Relay:
    """A switch between TAP devices: `delay` in seconds and one way, `rate` in bytes a second, `loss` a probability.

    Losses are drawn by `seed` in the order of frames, which depends on time.
    """

    def __init__(self, names: Sequence[str], delay: float, rate: float, loss: float, seed: int) -> None:
        self.ports = [Port(name, open_tap(f"v{name}")) for name in names]
        self.delay, self.rate, self.loss = delay, rate, loss
        self.frames = self.dropped = self.bytes = 0
        self._random = random.Random(seed).random
        self._by_address = {hardware_address(number): [port] for number, port in enumerate(self.ports)}
        self._by_descriptor = {port.descriptor: port for port in self.ports}

    def run(self, commands: int) -> None:
        """Relay frames until the descriptor of commands is closed."""
        clock, readable = time.monotonic, [*self._by_descriptor, commands]
        while True:
            due = [port.queue[0][0] for port in self.ports if port.queue]
            # select, not epoll: it waits for microseconds instead of milliseconds.
            ready, _, _ = select.select(readable, (), (), max(0.0, min(due) - clock()) if due else None)
            for descriptor in ready:
                if descriptor != commands:
                    self._receive(self._by_descriptor[descriptor])
                elif not self._obey(os.read(commands, 1 << 12).decode()):
                    return
            now = clock() + EARLY
            for port in self.ports:
                queue = port.queue
                while queue and queue[0][0] <= now:
                    try:
                        os.write(port.descriptor, queue.popleft()[1])
                    except OSError:
                        # The host's device is down, or has no room.
                        self.dropped += 1

    def _receive(self, source: Port) -> None:
        """Read a frame of a host and put it into the queues of its destinations.

        One frame at a time: a read that fails, since there are no more, costs more than another `select`.
        """
        try:
            frame = os.read(source.descriptor, _FRAME)
        except OSError:
            # The host's device was taken down after `select`.
            return
        now, seconds = time.monotonic(), len(frame) / self.rate
        self.frames += 1
        self.bytes += len(frame)
        if source.is_cut or source.uplink_free > now + QUEUE or (self.loss and self._random() < self.loss):
            self.dropped += 1
            return
        source.uplink_free = sent = max(now, source.uplink_free) + seconds
        for port in self._destinations(source, frame):
            if port.is_cut or port.downlink_free > sent + QUEUE:
                self.dropped += 1
                continue
            port.downlink_free = arrived = max(sent, port.downlink_free + seconds)
            port.queue.append((arrived + self.delay, frame))

    def _destinations(self, source: Port, frame: bytes) -> Sequence[Port]:
        address = frame[_HEADER : _HEADER + 6]
        if address[0] & 1:
            return [port for port in self.ports if port is not source]
        return self._by_address.get(address, ())

    def _obey(self, text: str) -> bool:
        """Execute commands; return whether there may be more."""
        for line in text.splitlines():
            command, _, name = line.partition(" ")
            for port in self.ports:
                if port.name == name:
                    port.is_cut = command == "cut"
            print(json.dumps(self.statistics()), flush=True)
        return bool(text)

    def statistics(self) -> dict[str, float]:
        """Return the traffic until now, and the CPU time of this process with its share of the kernel's network."""
        return {"frames": self.frames, "bytes": self.bytes, "dropped": self.dropped, "cpu": time.process_time()}


def open_tap(name: str) -> int:
    """Create a TAP device in this network namespace; return its descriptor, with which it ends."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFORMATION | _VIRTIO_HEADER
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS_4 | _SEGMENTS_6)
    return descriptor


def be_punctual() -> None:
    """Let this process wake when it asks for, also while ranks use all cores."""
    ctypes.CDLL(None).prctl(_SLACK_OPTION, 1, 0, 0, 0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    """Relay frames between the hosts that are named, and print an empty line once their devices are there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--delay", type=float, default=0.0, help="Seconds, one way.")
    parser.add_argument("--gbit", type=float, default=1.0, help="Gbit/s of each link.")
    parser.add_argument("--loss", type=float, default=0.0, help="Probability that a frame is lost.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the losses.")
    options = parser.parse_args()
    relay = Relay(options.names, options.delay, options.gbit * 1e9 / 8, options.loss, options.seed)
    be_punctual()
    print(flush=True)
    # Nothing here has cycles.
    gc.disable()
    relay.run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
