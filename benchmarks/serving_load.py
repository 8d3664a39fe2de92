"""Load on a running server: clients that send one chat after the other, with streamed replies of different lengths.

``distir serve BUNDLE --port 8000 &``, then ``python benchmarks/serving_load.py http://127.0.0.1:8000 --minutes 10``.
It exits 1 after any error. Memory is that of the server's processes, every minute.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

TOPICS = ("rivers", "the moon", "bread", "trains", "clouds", "chess", "bees", "salt")


@dataclass
class Found:
    """Seconds to the first token and between tokens, and errors."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    requests: int = 0


async def client(http: httpx.AsyncClient, number: int, end: float, found: Found) -> None:
    """Send requests until `end`."""
    rng = random.Random(number)
    while time.perf_counter() < end:
        text = f"Client {number}: tell me {'a little ' * rng.randint(1, 40)}about {rng.choice(TOPICS)}."
        body = {
            "messages": [{"role": "user", "content": text}], "max_tokens": rng.randint(4, 48), "stream": True,
            "temperature": 0.7, "seed": number, "stream_options": {"include_usage": True},
        }  # fmt: skip
        start = last = time.perf_counter()
        count = 0
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    found.errors.append(f"{answer.status_code}: {answer.text[:200]}")
                    continue
                async for line in answer.aiter_lines():
                    if '"content"' not in line:
                        found.errors += [line] if '"error"' in line else []
                        continue
                    now = time.perf_counter()
                    (found.between if count else found.first).append(now - last if count else now - start)
                    last, count = now, count + 1
        except httpx.HTTPError as error:
            found.errors.append(repr(error))
        found.requests += 1
        found.tokens += count


async def watch(process: Any, end: float) -> list[int]:
    """Return the memory of a process and its children each minute, in bytes; pages that they share are counted once."""
    found = []
    while time.perf_counter() < end:
        await asyncio.sleep(min(60.0, max(0.1, end - time.perf_counter())))
        found.append(sum(p.memory_full_info().pss for p in (process, *process.children(recursive=True))))
    return found


def server(port: int) -> Any:
    """Return the process that listens at a port."""
    pids = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"}
    return psutil.Process(next(pid for pid in pids if pid))


async def run(address: str, clients: int, seconds: float) -> tuple[Found, list[int]]:
    """Run all clients."""
    found = Found()
    end = time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as http:
        watched = asyncio.create_task(watch(server(http.base_url.port or 80), end))
        await asyncio.gather(*(client(http, number, end, found) for number in range(clients)))
        return found, await watched


def percentiles(values: Sequence[float]) -> str:
    """Return p50 and p95 in milliseconds."""
    cuts = statistics.quantiles(values, n=20)
    return f"p50 {statistics.median(values) * 1e3:.0f} ms, p95 {cuts[-1] * 1e3:.0f} ms"


def main() -> int:
    """Run the load, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    found, memory = asyncio.run(run(options.address, options.clients, options.minutes * 60))
    print(f"{found.requests} requests, {found.tokens / options.minutes / 60:.0f} pieces/s, {len(found.errors)} errors")
    for error in found.errors[:5]:
        print(f"  {error}")
    print(f"first: {percentiles(found.first)}; between: {percentiles(found.between)}")
    print("memory in MB: " + ", ".join(f"{each / 1e6:.0f}" for each in memory))
    return 1 if found.errors else 0


if __name__ == "__main__":
    sys.exit(main())
