"""A backend added from outside: a rank's program as text, run op by op as the op table means it.

It compiles nothing and takes nothing from the torch backend's code, so that the two can be told apart when they differ;
and it can look anywhere: the environment variable SHOW is the name of a value to print on each rank. Run me::

    SHOW=relu python examples/extend/add_backend.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

import distir_relax as dr
from distir_relax.bundle import STAGE_FILES, Bundle
from distir_relax.errors import RunError
from distir_relax.ir import parse, print_op
from distir_relax.ir.symbols import specialize_op
from distir_relax.ops import evaluate
from distir_relax.runtime.backends import register_backend
from distir_relax.runtime.backends.weights import load_weights, memory
from distir_relax.runtime.communicator import Communicator


class Interpreted:
    """A `RankProgram`: from this rank's shards of the inputs to its shards of the outputs."""

    def __init__(self, bundle: Bundle, comm: Communicator, weights: dict[str, torch.Tensor]) -> None:
        ranked = parse(bundle.stage("ranked"), STAGE_FILES["ranked"])
        self.function = ranked.function(ranked.ranks[comm.rank])
        self.comm, self.weights = comm, weights
        # The weights that the program changes: its caller writes their new values there.
        self.state = {name: weights[name] for name in bundle.manifest.updates if name in weights}
        # What its caller's own results may not lie in.
        self.held = memory(weights.values())
        # What the watchdog says of a rank that waits.
        self.steps: Any = {op.attrs["step"]: print_op(op) for op in self.function.ops if "step" in op.attrs}

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Run once, for these values of symbolic sizes. `comm` counts and watches the communication."""
        names = [item.value.name for item in self.function.inputs if item.role == "input"]
        values = {**self.weights, **dict(zip(names, inputs, strict=True))}
        for op in self.function.ops:
            op = specialize_op(op, sizes)
            results = evaluate(op, [values[v.name] for v in op.operands], self.comm)
            values.update(zip((v.name for v in op.results), results, strict=True))
            if os.environ.get("SHOW") in {v.name for v in op.results}:
                print(f"rank {self.comm.rank}: {print_op(op)}\n{results[0]}")
        return [values[output.value.name] for output in self.function.outputs]


def load(bundle: Bundle, rank: int, comm: Communicator, device: str) -> Interpreted:
    """The program of `rank`, with its slices of the weights."""
    if device != "cpu":
        raise RunError(f"the interpreter runs on the CPU, found {device!r}", hint="run with device='cpu'")
    return Interpreted(bundle, comm, load_weights(bundle, rank, device))


register_backend("interpreted", load)


def main() -> None:
    """Run a plan with uneven shards, and an empty one, on the backend, and compare it with the project's own."""
    x, mesh = torch.randn(4, 6), dr.DeviceMesh((3,), ("tp",))
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 6)).eval()
    for placement in ("S[0]", "S[0: 5|0|0]"):
        plan = dr.compile(model, (x,), shardings={"0.weight": placement}, mesh=mesh)
        found = plan(x, backend="interpreted")
        for backend in ("torch", "tvm"):
            torch.testing.assert_close(found, plan(x, backend=backend))
        torch.testing.assert_close(found, model(x))
        print(f"{placement}: three ranks agree with torch")


if __name__ == "__main__":
    main()
