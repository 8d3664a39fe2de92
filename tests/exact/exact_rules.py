"""Every op under every combination of placements of its operands, in exact arithmetic.

    python -m tests.exact.exact_rules [OP ...]    prints what is not equal, what cannot be said, and how many were run

As `tests/ops/validator.py`, on the same samples and meshes, with numbers of a prime field (`exact_numbers.py`) in place
of floats: the sharded program gives the numbers of the op run whole, and not nearly so. On 2x3 devices combinations are
drawn. Factor rules, linearity and the ops of `Split.expand` are checked, padded and ragged.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch

from distir_relax.errors import DistIRError, RunError
from distir_relax.interpret import interpret, scatter
from distir_relax.interpret.distributed_executor import run_devices
from distir_relax.ir import DTensorType
from distir_relax.layout import DeviceMesh, Partial, local_intervals
from distir_relax.lowering import ToDistIR
from distir_relax.ops import Trait
from distir_relax.sharding import DelayReductions, Propagate
from tests.exact.exact_numbers import Field
from tests.exact.exact_tensors import Exact, Unsupported, drawn, lifted
from tests.ops.validator import GRID, MESHES, SAMPLES, TAILS, Layout, Setting, combinations, validated

MOST = 1000
"""Combinations of each sample on 2 and on 3 devices; of ops of five operands there are more."""
DRAWN = 40
"""Combinations of each sample on 2x3 devices."""


class ExactSetting(Setting):
    """A sample of an op whose operands of floats are numbers of a prime field."""

    def __init__(self, name: str, number: int, mesh: DeviceMesh, seed: int = 0) -> None:
        super().__init__(name, SAMPLES[name][number], mesh)
        self.numbers = Field(seed)
        self.operands = [
            drawn(self.numbers, x, f"operand {i}") if x.is_floating_point() else x for i, x in enumerate(self.operands)
        ]

    def wrong(self, layouts: tuple[Layout, ...], tail: str) -> str:
        """Return the mistake of the sharded program; empty if there is none.

        Raises RunError or Unsupported if the op has no exact form.
        """
        if Trait.FOREIGN in self.entry.traits:
            raise Unsupported(f"{self.entry.name} runs machine code")
        module, data = self.module(layouts), self.data(layouts)
        whole = interpret(module.main, data)
        try:
            sharded = DelayReductions().run(Propagate().run(module))
            distributed = ToDistIR(tail).run(sharded)
            inputs = {
                item.value.name: scatter(data[item.value.name], item.value.dtensor, self.mesh)
                for item in sharded.main.inputs
            }
            found = run_devices(distributed, inputs)
            for output in sharded.main.outputs:
                if why := difference(
                    self.numbers, found[output.name], output.value.dtensor, self.mesh, whole[output.name]
                ):
                    return f"{tail}: {output.name}: {why}"
        except (DistIRError, ValueError, AssertionError, RuntimeError) as error:
            return f"{tail}: {type(error).__name__}: {str(error).splitlines()[0]}"
        return ""


def difference(
    numbers: Field, parts: Mapping[int, torch.Tensor], layout: DTensorType, mesh: DeviceMesh, whole: torch.Tensor
) -> str:
    """Return the first element of devices' tensors that is not the whole tensor's; empty if there is none."""
    combined = {mesh.coordinates(rank): part for rank, part in parts.items()}
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            assert placement.reduction == "sum"
            combined = {
                at: _sum(numbers, [combined[(*at[:axis], i, *at[axis + 1 :])] for i in range(mesh.shape[axis])])
                for at in combined
            }
    count = torch.zeros(layout.shape, dtype=torch.int64)
    expected = _values(numbers, whole)
    for rank in parts:
        at = mesh.coordinates(rank)
        index = [
            [i for a, b in local_intervals(layout.placements, dim, size, at) for i in range(a, b)]
            for dim, size in enumerate(layout.shape)
        ]
        where = torch.meshgrid(*(torch.tensor(x, dtype=torch.int64) for x in index), indexing="ij") if index else ()
        if _values(numbers, combined[at]) != [expected[i] for i in _places(layout.shape, where)]:
            return f"rank {rank} has other numbers"
        count[where] += 1
    return "" if bool((count > 0).all()) else "no device has some elements"


def _places(shape: Sequence[int], where: Sequence[torch.Tensor]) -> list[int]:
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return places[where].reshape(-1).tolist() if where else [0]  # type: ignore[no-any-return]


def _sum(numbers: Field, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _values(numbers: Field, x: torch.Tensor) -> list[Any]:
    """Return the elements as what tells numbers apart: the residue of the first prime."""
    if not x.is_floating_point() and not isinstance(x, Exact):
        return x.reshape(-1).tolist()  # type: ignore[no-any-return]
    pairs = [numbers.values[i] for i in lifted(numbers, x).reshape(-1).tolist()]
    return [pair if pair[0] < 0 else pair[0] for pair in pairs]


@dataclass(frozen=True)
class Task:
    """One sample of an op on one mesh; at most `most` combinations, drawn."""

    name: str
    number: int
    mesh: DeviceMesh
    most: int | None = None
    seed: int = 0


@dataclass
class Outcome:
    """The result: the combinations run, those that are wrong, and why the op has no exact form."""

    task: Task
    combinations: int = 0
    wrong: list[str] = field(default_factory=list)
    unsupported: str = ""


def run(task: Task) -> Outcome:
    """Check combinations of placements of one sample."""
    torch.set_num_threads(1)
    setting, outcome = ExactSetting(task.name, task.number, task.mesh, task.seed), Outcome(task)
    chosen = list(combinations(SAMPLES[task.name][task.number], task.mesh))
    if task.most is not None and len(chosen) > task.most:
        chosen = random.Random(f"{task.name} {task.number} {task.seed}").sample(chosen, task.most)
    for count, layouts in enumerate(chosen):
        try:
            why = setting.wrong(layouts, TAILS[count % len(TAILS)])
        except (RunError, Unsupported) as error:
            outcome.unsupported = str(error).splitlines()[0]
            continue
        outcome.combinations += 1
        if why:
            outcome.wrong.append(f"{task.name} #{task.number} on {task.mesh.shape} with {layouts}: {why}")
    return outcome


def tasks(names: Sequence[str] = ()) -> list[Task]:
    """All the work for some ops, or all of them."""
    chosen = [(name, number) for name, number in validated() if not names or name in names]
    return [Task(*one, mesh, MOST) for mesh in MESHES for one in chosen] + [Task(*one, GRID, DRAWN) for one in chosen]


def main(names: Sequence[str]) -> int:
    """Check ops, all of them by default, on all cores; the exit code says whether any is wrong."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(run, tasks(names)))
    for outcome in outcomes:
        for text in outcome.wrong:
            print(f"wrong: {text}")
    reasons = {(o.task.name, o.task.number): o.unsupported for o in outcomes if o.unsupported}
    for (name, number), reason in reasons.items():
        print(f"no exact form: {name} #{number}: {reason}")
    ops = Counter(o.task.name for o in outcomes if o.combinations)
    samples = {(o.task.name, o.task.number) for o in outcomes if o.combinations}
    wrong = sum(len(o.wrong) for o in outcomes)
    run_in_all = sum(o.combinations for o in outcomes)
    print(f"{len(ops)} ops, {len(samples)} samples, {run_in_all:,} combinations, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
