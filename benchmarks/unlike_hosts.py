"""SmolLM2-135M on three hosts of unlike speed: 1, 0.5 and 0.25 of a core (namespaces of this machine).

    PYTHONPATH=build/smollm python -m benchmarks.unlike_hosts [--requests 4] [--tokens 24] [--link 1gbit]

Calibrates the hosts, then measures tokens per second of requests that arrive together: stages with equally many blocks
on each rank, stages cut by the profile's speeds, the same with the slowest host first, with one request at a time, as a
serial pipeline has it, and the fastest host alone; beside each is the prediction. Measurements take turns, and medians
count. Needs root.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

SHARES = {"n0": 1.0, "n1": 0.5, "n2": 0.25}
DRIVER = "driver"
FOLDER = Path("build/unlike-hosts")
PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--link", default="1gbit", help="rate of each host, as tc writes it")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--budget", type=int, default=120, help="seconds of the calibration")
    parser.add_argument("--profile", help="a profile of an earlier calibration")
    parser.add_argument("--rsh", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rsh:
        measure(options)
    elif "inside" in os.environ.get("DISTIR_BENCHMARK", ""):
        laboratory(options)
    else:
        from tests.hosts.laboratory import UNSHARE

        command = [*UNSHARE, sys.executable, "-m", "benchmarks.unlike_hosts", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, "DISTIR_BENCHMARK": "inside"}, check=False).returncode)


def laboratory(options: argparse.Namespace) -> None:
    """Make the hosts, calibrate them, and run `measure` on a host of its own."""
    from tests.hosts.laboratory import Laboratory

    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), [*SHARES, DRIVER]) as laboratory:
        for name, share in SHARES.items():
            laboratory.rate(name, options.link)
            laboratory.share_of_core(name, share)
        print(f"n0 to n1: {laboratory.measure('n0', 'n1')}", flush=True)
        environment = {**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        profile = options.profile or str(FOLDER.absolute() / "hosts.toml")
        FOLDER.mkdir(parents=True, exist_ok=True)
        if not options.profile:
            command = [
                sys.executable, "-P", "-m", "distir_relax", "calibrate", "-o", profile, "--host", ",".join(SHARES),
                "--rsh", str(laboratory.shell), "--budget", str(options.budget), "--max-error", "2",
            ]  # fmt: skip
            if laboratory.start("n0", *command, env=environment).wait():
                raise SystemExit("the calibration failed")
        command = [
            sys.executable, "-m", "benchmarks.unlike_hosts", "--rsh", str(laboratory.shell), "--profile", profile,
            "--requests", str(options.requests), "--tokens", str(options.tokens), "--runs", str(options.runs),
        ]  # fmt: skip
        if laboratory.start(DRIVER, *command, env=environment).wait():
            raise SystemExit("the measurement failed")


def measure(options: argparse.Namespace) -> None:
    """Serve requests on the hosts, and print the rates beside the predicted ones."""
    import distir_relax as dr
    from benchmarks.serving import bundle, prompts
    from distir_relax.bundle import Bundle
    from distir_relax.runtime.hosts import Host, HostList
    from distir_relax.serving import Engine, EngineOptions, start_engine

    profile = dr.load_profile(options.profile)
    print("groups:", [(str(group), group.speed) for group in profile.groups])
    asked = [prompt[:PROMPT] for prompt in prompts(options.requests)]
    of_all = EngineOptions(max_requests=options.requests, share_prefixes=False)
    turned = profile.reordered([2, 1, 0])
    three, back, first = (
        HostList(tuple(Host(name, 1) for name in names), options.rsh) for names in (SHARES, [*SHARES][::-1], ["n0"])
    )
    machines = {three: profile, back: turned, first: profile.reordered([0]).of_one_device()}
    even = bundle("1/1/3/1")
    by_speed, slow_first = bundle("1/1/3/1", profile, "-hosts"), bundle("1/1/3/1", turned, "-hosts-turned")
    alone = bundle("1/1/1/1")
    kinds: dict[str, tuple[Bundle, HostList, EngineOptions]] = {
        "stages of equally many blocks": (even, three, of_all),
        "stages cut by speed": (by_speed, three, of_all),
        "stages cut by speed, slowest first": (slow_first, back, of_all),
        "the same, one request at a time": (slow_first, back, EngineOptions(1, share_prefixes=False)),
        "the fastest host alone": (alone, first, of_all),
        "the fastest host alone, one request at a time": (alone, first, EngineOptions(1, share_prefixes=False)),
    }

    def rate(engine: Engine, asked: Sequence[Any]) -> float:
        start = time.perf_counter()
        requests = [engine.submit(prompt, options.tokens) for prompt in asked]
        engine.run()
        return sum(len(request.tokens) for request in requests) / (time.perf_counter() - start)

    found: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(start_engine(made, limits, hosts))
            for name, (made, hosts, limits) in kinds.items()
        }
        for run in range(options.runs + 1):
            for name, engine in engines.items():
                value = rate(engine, asked)
                # The first is a warm-up.
                found[name] += [value] if run else []
    print(f"| {options.requests} requests of {PROMPT} + {options.tokens} tokens | tokens/s | predicted | error |")
    print("|---|---|---|---|")
    for name, values in found.items():
        made, hosts, limits = kinds[name]
        predicted = dr.simulate_generation(
            str(made.path), profile=machines[hosts], prompt=PROMPT, generate=options.tokens, requests=options.requests,
            options=limits,
        ).throughput  # fmt: skip
        measured = statistics.median(values)
        span = f"{measured:.1f} ({min(values):.1f} to {max(values):.1f})"
        print(f"| {name} | {span} | {predicted:.1f} | {predicted / measured - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
