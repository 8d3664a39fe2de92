"""Our simulator next to the DistIR paper's public reference implementation, on the same MLP training programs.

    git clone https://github.com/microsoft/dist-ir
    pip install frozendict roundrobin prettyprinter networkx pandas scikit-learn
    python benchmarks/paper/reference.py --dist-ir dist-ir

Both distribute a model that they have read in and simulate it, in turns, in one process. Speed is counted as the paper
counts it: one op on one device is one op. For the comparison of latency and memory both cost models are set equal:
matrix products and element-wise ops by their operations alone, 10 us an op, sends by bandwidth, all-reduces by one
line; sends keep both ends from their work.

Without --dist-ir only ours is measured.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from models import mlp

from distir_relax import Strategy
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Level, Line, Matrix, Profile

FLOPS, LINK = 9.7e13, 1.25e10
SLOPE, START = 2.0e-11, 6.0e-5
PROFILE = Profile(
    "equal", 1 << 16, 32e9, 1e30, 1e-5, {"float16": Matrix(FLOPS)}, {"float16": FLOPS},
    (Level("link", 1 << 16, 1e-30, LINK),),
    tuple(Line("all_reduce", n, START, SLOPE) for n in (2, 4, 8, 16)),
    beside=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and how it is distributed."""

    layers: int
    width: int
    strategy: str
    batch: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, {self.strategy}, batch {self.batch}"


@dataclass(frozen=True)
class Found:
    """What a simulator says, and how fast: device-ops a second, building included."""

    latency: float
    peak: float
    ops: int
    seconds: float


@cache
def read(layers: int, width: int, batch: int) -> Source:
    """A model that was read in, which takes torch's export, and not our time."""
    return mlp(layers, width, batch).read(CompileOptions(profile=PROFILE))


def ours(case: Case) -> Found:
    """Distribute and simulate with distir-relax."""
    source = read(case.layers, case.width, case.batch)
    start = time.perf_counter()
    found = source.with_strategy(Strategy.parse(case.strategy)).simulate(PROFILE)
    seconds = time.perf_counter() - start
    return Found(found.makespan, float(found.peak_memory.max()), found.device_ops, seconds)


def reference(root: Path) -> Callable[[Case], Found]:
    """Build and simulate with the checkout at `root`."""
    sys.path.insert(0, str(root))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    # Importers that its simulator does not need, of packages that need not be installed.
    for name in ("dist_ir.importer", "dist_ir.importer.mlir_parser"):
        sys.modules.setdefault(name, types.ModuleType(name))
    from dist_ir.executor import infer_types
    from dist_ir.ir import get_uniform_topology
    from dist_ir.ir.type import Float16
    from dist_ir.transforms import mlp_dhp_transform

    from examples.mlp import add_optimizer_ops, get_typed_input_values, mlp, simulate

    def run(case: Case) -> Found:
        s = Strategy.parse(case.strategy)
        start = time.perf_counter()
        topology = get_uniform_topology(s.devices, FLOPS, float("inf"), 1e-5, LINK * 8 / 1e9)
        function: Any = mlp(case.width, case.width, case.width, case.layers, topology.devices[0], Float16)
        before, after = mlp_dhp_transform(
            function, s.data, s.tensor, s.pipeline, s.microbatches, topology.devices, skip_allgathers=True
        )
        typed = get_typed_input_values(before.inputs, case.batch, case.width, case.width)
        before = infer_types(before, typed)
        after = add_optimizer_ops(infer_types(after, before.outputs))
        parameters = dict.fromkeys((2, 4, 8, 16), (SLOPE * 125000000.0, 0.0, START))
        state = simulate(after, tuple(output.type for output in before.outputs), topology, parameters)
        seconds = time.perf_counter() - start
        return Found(state.get_latency(), state.get_peak_memory(), len(state.trace), seconds)

    return run


SPEED = Case(96, 32768, "4/2/2/32", 131072)
SCALING = tuple(Case(96, 32768, f"{d}/2/2/32", 32768 * d) for d in (4, 1024))
AGREEMENT = (
    Case(16, 8192, "16/1/1/1", 16384), Case(16, 8192, "1/16/1/1", 4096), Case(16, 8192, "4/4/1/1", 4096),
    Case(16, 8192, "1/1/4/16", 4096), Case(16, 8192, "2/2/2/4", 4096), Case(16, 8192, "1/1/16/128", 4096),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist-ir", type=Path, help="a checkout of github.com/microsoft/dist-ir")
    parser.add_argument("--repeat", type=int, default=9, help="runs of ours; the median counts")
    options = parser.parse_args()
    theirs = reference(options.dist_ir) if options.dist_ir else None
    ours(SPEED)
    print("speed, building included:")
    runs = [timed(ours, SPEED) for _ in range(options.repeat)]
    rate = statistics.median(found.ops / found.seconds for found in runs)
    seconds = statistics.median(found.seconds for found in runs)
    print(f"  {SPEED}: ours {runs[0].ops:,} device-ops in {seconds:.3f} s, {rate / 1e6:.2f} million a second")
    if theirs:
        found = timed(theirs, SPEED)
        theirs_rate = found.ops / found.seconds
        print(f"    reference {found.ops:,} device-ops in {found.seconds:.1f} s, {theirs_rate:,.0f} a second")
        print(
            f"    {rate / theirs_rate:.0f} times as many device-ops a second, "
            f"{found.seconds / seconds:.0f} times as fast"
        )
    small, large = (statistics.median(timed(ours, case).seconds for _ in range(options.repeat)) for case in SCALING)
    print(f"  16 devices {small:.3f} s, 4,096 devices {large:.3f} s: {large / small:.2f} times as long")
    if theirs:
        print("agreement, cost models equal:")
        for case in AGREEMENT:
            mine, other = ours(case), theirs(case)
            print(
                f"  {case!s:36} latency {mine.latency * 1e3:8.2f} ms, reference {other.latency * 1e3:8.2f} "
                f"({mine.latency / other.latency - 1:+.1%}); peak {mine.peak / 1e9:6.2f} GB, "
                f"reference {other.peak / 1e9:6.2f} ({mine.peak / other.peak - 1:+.1%})"
            )


def timed(run: Callable[[Case], Found], case: Case) -> Found:
    """One run, with the memory of those before it collected."""
    gc.collect()
    return run(case)


if __name__ == "__main__":
    main()
