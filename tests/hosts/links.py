"""Measure a link between two hosts: its latency and its bandwidth, by TCP."""

from __future__ import annotations

from dataclasses import dataclass

TRIPS, BYTES = 200, 64 << 20


@dataclass(frozen=True)
class Link:
    """Latency, half of the median round trip, in seconds, and bandwidth in bytes a second."""

    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.latency * 1e6:4.0f} us, {self.bandwidth * 8e-9:5.2f} Gbit/s"


SERVER = f"""
import socket, sys
s = socket.socket(); s.setsockopt(1, 2, 1); s.bind((sys.argv[1], 4711)); s.listen(); print(flush=True)
c, _ = s.accept()
c.setsockopt(6, 1, 1)
for _ in range({TRIPS}): c.sendall(c.recv(1))
left = {BYTES}
while left: left -= len(c.recv(min(left, 1 << 20)))
c.sendall(b"x"); c.recv(1)
"""
"""The program of one end, with its address: it prints a line when it listens."""
CLIENT = f"""
import socket, statistics, sys, time
c = socket.create_connection((sys.argv[1], 4711), 10); c.setsockopt(6, 1, 1); c.settimeout(60); t = []
for _ in range({TRIPS}):
    a = time.perf_counter(); c.sendall(b"x"); c.recv(1); t.append(time.perf_counter() - a)
a = time.perf_counter(); c.sendall(bytes({BYTES})); c.recv(1); b = time.perf_counter() - a
print(statistics.median(t) / 2, {BYTES} / b)
"""
"""The program of the other end, with the address of the first: it prints latency and bandwidth."""
