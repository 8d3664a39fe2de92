"""Training with collectives that overlap with computation: the bits of one in program order, and its prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.compiler.training import Training, TrainingStep
from distir_relax.cost.profile import Level
from distir_relax.errors import VerificationError
from distir_relax.ir import Module, Op, parse, verify
from distir_relax.lowering import OverlapCollectives, Project
from distir_relax.ops import check
from tests.machines import machine
from tests.runtime.processes import mpirun, torchrun

WIDTH, ROWS, STEPS = 15, 9, 3
ADAM = dr.optim.AdamW(lr=1e-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def made(strategy: str, overlap: float, **options: Any) -> TrainingStep:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 7))
    return dr.compile_training(
        model, nn.functional.cross_entropy, optimizer=ADAM, example_batch=batch(0), strategy=strategy, overlap=overlap,
        verify=True, **options,
    )  # fmt: skip


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(7, (ROWS,), generator=generator)


def started(step: TrainingStep) -> list[Op]:
    functions = step.plan.modules["ranked"].functions
    return [op for f in functions for op in f.ops if op.name in {"start_all_reduce", "start_reduce_scatter"}]


def trained(step: TrainingStep) -> tuple[list[float], dict[str, torch.Tensor]]:
    return [step(*batch(number)) for number in range(STEPS)], step.parameters()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("2/1/1/1", {}),
        ("3/1/1/1", {"clip_norm": 0.5}),
        ("2/2/1/1", {}),
        ("3/1/1/1,zero=2", {}),
        ("2/1/2/3", {}),
        ("2/1/1/1", {"outline": False}),
    ],
    ids=str,
)
def test_the_same_bits(strategy: str, options: dict[str, Any]) -> None:
    """With buckets of one tensor, of some, and of a call's."""
    losses, parameters = trained(made(strategy, 0, **options))
    for size in (640.0, 4e6):
        step = made(strategy, size, **options)
        # Small tensors without calls are not worth it, and a pipeline has a schedule.
        assert bool(started(step)) == (options.get("outline", True) and strategy.split("/")[2] == "1")
        found, values = trained(step)
        assert found == losses
        assert all(torch.equal(values[name], value) for name, value in parameters.items())


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.parametrize(
    ("launch", "ranks", "places"), [(mpirun, 3, []), (mpirun, 2, ["apart"]), (torchrun, 2, [])],
    ids=["shared memory", "threads of MPI", "gloo"],
)  # fmt: skip
def test_the_same_bits_in_processes(launch: Callable[..., Any], ranks: int, places: list[str], tmp_path: Path) -> None:
    for name, size in (("in_order", 0.0), ("overlapped", 4e6)):
        step = made(f"{ranks}/1/1/1", size)
        step.save(tmp_path / f"{name}.dist", backends=("torch",))
        batches = [dict(zip(("input", "targets"), batch(number), strict=True)) for number in range(STEPS)]
        torch.save(batches, tmp_path / f"{name}.pt")
    done = launch(ranks, Path(__file__).with_name("ranks.py"), tmp_path, *places)
    assert done.returncode == 0, done.stderr
    losses, state = torch.load(tmp_path / "in_order.found")
    found, values = torch.load(tmp_path / "overlapped.found")
    assert found == losses
    assert all(torch.equal(values[name], value) for name, value in state.items())


def test_a_simulation_overlaps_what_ranks_do() -> None:
    """A network so slow that a step takes its time: overlap hides the backward passes of the blocks after the first."""
    slow = machine(2, (Level("network", 2, 0.0, 2e5),), flops=1e6)
    in_order, overlapped = (dr.simulate(made("2/1/1/1", size).plan, profile=slow) for size in (0.0, 4e6))
    assert overlapped.makespan < 0.95 * in_order.makespan
    assert overlapped.streamed != in_order.streamed
    shared = replace(slow, levels=(replace(slow.levels[0], overlaps=False),))
    blocked = dr.simulate(made("2/1/1/1", 4e6).plan, profile=shared)
    assert blocked.makespan == pytest.approx(in_order.makespan, rel=0.01)


@pytest.mark.parametrize("strategy", ["2/1/1/5", "2/1/2/5"])
def test_repeated_microbatches_overlap_as_all_do(strategy: str) -> None:
    profile = machine(4, (Level("network", 4, 1e-6, 2e5),), flops=1e6)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 7))
    batch = torch.randn(10, WIDTH), torch.randint(7, (10,))
    source = Training(model, nn.functional.cross_entropy, ADAM, batch).read({"strategy": strategy})
    every = dr.simulate(source.distributed(), profile=profile)
    assert source.simulate(profile).clocks == every.clocks
    assert any(every.streamed)


UPDATED = """
module @distributed {
  mesh[0] = device_mesh((3,), ("d",))
  func @main(parameter %w: f32[600,512] @ {0..2}, input %x: f32[600,512] @ {0..2}) {
    %sum: f32[600,512] @ {0..2} = all_reduce(%w) {axis="d", op="sum"}
    %a: f32[600,512] @ {0..2} = negative(%x)
    %w.new: f32[600,512] @ {0..2} = assign(%w, %a)
    %b: f32[600,512] @ {0..2} = add(%sum, %a)
    return "w": %w.new, "b": %b
  }
}
"""


def test_an_operand_is_not_updated_before_it_is_reduced() -> None:
    module = parse(UPDATED)
    found = OverlapCollectives().run(module)
    verify(found, check)
    assert [op.name for op in found.main.ops] == ["all_reduce", "negative", "wait", "assign", "add"]


def test_a_program_that_drops_or_swaps_is_refused() -> None:
    module = made("3/1/1/1", 4e6).plan.modules["ranked"]
    main = module.function(module.ranks[1])
    apart = replace(
        module,
        functions=(*module.functions, replace(main, name="main_1_alone")),
        ranks=(module.ranks[0], "main_1_alone", *module.ranks[2:]),
    )
    verify(apart, check)

    def changed(ops: list[Op]) -> Module:
        return replace(apart, functions=(*module.functions, replace(main, name="main_1_alone", ops=tuple(ops))))

    finish = next(op for op in main.ops if op.name == "finish_collective")
    dropped = [replace(op, operands=tuple(finish.operands[0] if v in finish.results else v for v in op.operands))
               for op in main.ops if op is not finish]  # fmt: skip
    with pytest.raises(VerificationError, match="is used before it is finished"):
        verify(changed(dropped), check)
    ops = list(main.ops)
    first, second = [number for number, op in enumerate(ops) if op.name == "start_all_reduce"][:2]
    ops.insert(second, ops.pop(first))
    with pytest.raises(VerificationError, match="two ranks are at different places of the schedule"):
        verify(changed(ops), check)


def test_streams_of_a_users_program() -> None:
    """Values that are used on their stream, or never, are finished where ranks need them."""
    text = UPDATED.replace('op="sum"}', 'op="sum", stream="mine"}').replace(
        "    %a:", '    %more: f32[600,512] @ {0..2} = all_reduce(%sum) {axis="d", op="max", stream="mine"}\n    %a:'
    )
    module = parse(
        text.replace("%b: f32[600,512] @ {0..2} = add(%sum, %a)", "%b: f32[600,512] @ {0..2} = negative(%a)")
    )
    verify(module, check)
    ranked = Project().run(module)
    verify(ranked, check)
    names = ["start_all_reduce", "finish_collective", "start_all_reduce", "negative", "assign", "negative"]
    assert [op.name for op in ranked.functions[0].ops] == [*names, "finish_collective"]
