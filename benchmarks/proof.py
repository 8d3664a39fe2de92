"""Time and memory of the proof of training plans for Llama 3 405B, from 2 to 8,192 ranks.

    python benchmarks/proof.py                      # all rows, an hour
    python benchmarks/proof.py 64/8/16/16           # one strategy

Each plan is compiled in a process of its own, with 16 microbatches and the model of `benchmarks/llama.py` on the meta
device. Compared are: communication between ranks (and the types of all programs), the ranks' programs with the
schedule, the schedule with the sharded program, and that with the model, its gradients and its microbatches.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

STRATEGIES = ("1/2/1/16", "1/8/1/16", "1/8/8/16", "4/8/16/16", "16/8/16/16", "64/8/16/16")
SEQUENCES = 2048
"""The batch: two sequences in each of 16 microbatches on 64 devices."""


def measure(strategy: str) -> str:
    """Return a row of the table."""
    from benchmarks.llama import llama_405b
    from distir_relax.compiler.compile import compile_source
    from distir_relax.proof import prove

    start = time.perf_counter()
    plan = compile_source(llama_405b(SEQUENCES).read({"strategy": strategy}))
    compiled, before = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    modules = plan.modules
    start = time.perf_counter()
    proof = prove(modules["ranked"], modules["distributed"], modules["sharded"], plan.imported.module)
    total, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not any(proof.statements.values()), proof.lines
    parts = " / ".join(f"{seconds:.1f}" for seconds in proof.seconds.values())
    sizes = f"{proof.ranks:,} | {proof.programs} | {proof.ops:,}"
    memory = f"{before / 2**20:.1f} | {peak / 2**20:.1f}"
    return f"| {strategy} | {sizes} | {compiled:.1f} | **{total:.1f}** | {parts} | {memory} |"


def main(strategies: list[str]) -> int:
    """Print the table."""
    print("| strategy | ranks | programs | their ops | compile, s | proof, s | of it | GiB before | GiB peak |")
    print("|---|---|---|---|---|---|---|---|---|")
    for strategy in strategies or STRATEGIES:
        command = [sys.executable, "-m", "benchmarks.proof", "--row", strategy]
        print(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip(), flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--row"]:
        print(measure(sys.argv[2]))
    else:
        raise SystemExit(main(sys.argv[1:]))
