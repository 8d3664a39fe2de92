"""The DistIR paper's listings (figures 2, 8 and 9), as text in ``examples/paper``: read, executed, simulated, run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from distir_relax.compiler.compile import program_bundle
from distir_relax.interpret.distributed_executor import execute_program
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import Module, inline, parse, print_module, verify
from distir_relax.ops import check
from distir_relax.runtime.session import Session
from distir_relax.simulation.simulator import simulate_module
from tests.machines import link, machine

FOLDER = Path(__file__).parents[1] / "examples" / "paper"
LISTINGS = ("pipeline", "checkpointing", "zero")
RATE = 0.1


def text(name: str) -> str:
    return (FOLDER / f"{name}.distir").read_text()


@cache
def program(name: str) -> Module:
    return infer_types(parse(text(name), f"{name}.distir"))


@cache
def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (70, 127), "y": (70, 31), "w1": (127, 63), "w2": (63, 31)}
    found = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / (8 if name[0] == "w" else 1)
        for name, shape in shapes.items()
    }
    for name in "xy":
        found[f"{name}_1"], found[f"{name}_2"] = found[name].split(35)
    return found


@cache
def trained() -> dict[str, torch.Tensor]:
    """The weights after a step, by autograd."""
    weights = {name: data()[name].clone().requires_grad_() for name in ("w1", "w2")}
    p = ((data()["x"] @ weights["w1"]).relu() @ weights["w2"]).relu()
    (0.5 * (p - data()["y"]).square().sum() / 70).backward()
    return {name: (w - RATE * w.grad).detach() for name, w in weights.items()}  # type: ignore[operator]


def agrees(found: dict[str, torch.Tensor]) -> None:
    assert set(found) == {"w1", "w2"}
    for name, expected in trained().items():
        assert (expected - data()[name]).abs().max() > 1e-3, "the step changes nothing"
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", LISTINGS)
def test_it_round_trips_and_verifies(name: str) -> None:
    module = parse(text(name))
    assert parse(print_module(module)) == module
    typed = program(name)
    verify(typed, check)
    verify(inline(typed), check)
    assert parse(print_module(typed)) == typed


@pytest.mark.parametrize("name", LISTINGS)
def test_it_trains_as_autograd_does(name: str) -> None:
    for module in (program(name), inline(program(name))):
        agrees(execute_program(module, data()))


@pytest.mark.parametrize("name", LISTINGS)
def test_its_ranks_train_as_autograd_does(name: str) -> None:
    weights = {key: data()[key].clone() for key in ("w1", "w2")}
    session = Session(program_bundle(name, program(name), weights), timeout=20)
    inputs = [i.value.name for i in program(name).main.inputs if i.role == "input"]
    agrees(session({key: data()[key] for key in inputs}))


def test_swapping_two_lines_of_the_pipeline_makes_it_slower() -> None:
    lines = text("pipeline").splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith("%p_1 ="))
    second = next(i for i, line in enumerate(lines) if line.strip().startswith("%ar_2 @"))
    lines[first], lines[second] = lines[second], lines[first]
    swapped = infer_types(parse("\n".join(lines)))
    agrees(execute_program(swapped, data()))
    for flops, bandwidth in ((1e9, 1e9), (1e9, 1e8), (1e12, 1e9)):
        profile = machine(2, link(1e-6, bandwidth), flops)
        before = simulate_module(program("pipeline"), profile)
        after = simulate_module(swapped, profile)
        assert after.makespan > before.makespan
        assert after.busy == before.busy


def test_the_slower_pipeline_waits_for_the_second_microbatch() -> None:
    """Figure 3: what device 1 computes first begins only when device 0 has sent the second microbatch too."""
    lines = text("pipeline").splitlines()
    p1 = next(line for line in lines if line.strip().startswith("%p_1 ="))
    ar2 = next(line for line in lines if line.strip().startswith("%ar_2 @"))
    swapped = infer_types(parse(text("pipeline").replace(f"{p1}\n{ar2}", f"{ar2}\n{p1}")))

    def computing_begins(module: Module) -> tuple[int, int]:
        """When device 1 first multiplies, and when the second send ends."""
        found = simulate_module(module, machine(2))
        events = list(found.events())
        of_1 = int(found.class_of[1])
        first = next(start for event, start in events if event.op.name == "matmul" and of_1 in event.classes)
        sends = [start + event.duration for event, start in events if event.op.name == "send"]
        return first, sends[1]

    begin, sent = computing_begins(program("pipeline"))
    assert begin < sent
    begin, sent = computing_begins(swapped)
    assert begin == sent


def test_checkpointing_frees_the_first_activation() -> None:
    kept = text("checkpointing").replace("    %as_b = call @dense(%w1, %x) on {0}\n", "").replace("%as_b", "%as_f")
    module = infer_types(parse(kept))
    agrees(execute_program(module, data()))
    recomputed = simulate_module(program("checkpointing"), machine(1))
    remembered = simulate_module(module, machine(1))
    assert recomputed.makespan > remembered.makespan
    activation = 70 * 63 * 8
    # Until the gradient of the loss is made, the one program holds the activation and the other does not.
    held = []
    for found in (recomputed, remembered):
        live = [0]
        for event, start in found.events():
            if event.op.name == "squared_error_grad":
                curve = [sum(split) for time, split in found.memory_curve(0) if time <= start / 1e15]
                live.append(curve[-1])
        held.append(live[-1])
    assert held[1] - held[0] == activation


DEEPER = """
module @distributed {
  mesh[0] = device_mesh((1,), ("device",))
  func @main(
    parameter %w1: f64[31,511] @ {0}, parameter %w2: f64[511,7] @ {0}, parameter %w3: f64[7,1023] @ {0},
    input %x: f64[70,31] @ {0}, input %y: f64[70,1023] @ {0},
  ) {
    %a = call @dense(%w1, %x) on {0}
    %b = call @dense(%w2, %a) on {0}
    %p = call @dense(%w3, %b) on {0}
    %dp = call @loss_grad(%p, %y) on {0}
    %dw3, %db = call @dense_grad(%w3, %b, %p, %dp) on {0}
    %again = call @dense(%w1, %x) on {0}
    %dw2, %da = call @dense_grad(%w2, %again, %b, %db) on {0}
    %dw1, %dx = call @dense_grad(%w1, %x, %again, %da) on {0}
    return "w1": %dw1, "w2": %dw2, "w3": %dw3
  }
"""


def test_a_deeper_network_peaks_lower_by_what_it_lets_go() -> None:
    source = DEEPER + text("checkpointing")[text("checkpointing").index("  func @dense(") :]
    kept = source.replace("    %again = call @dense(%w1, %x) on {0}\n", "").replace("%again", "%a")
    low, high = (simulate_module(infer_types(parse(t)), machine(1)).peak_memory[0] for t in (source, kept))
    assert high - low == 70 * 511 * 8


def test_zero_frees_the_borrowed_weights_before_the_backward_pass() -> None:
    found = simulate_module(program("zero"), machine(2))
    w1, w2, a, p = (8 * n for n in (127 * 63, 63 * 31, 35 * 63, 35 * 31))
    inputs = 8 * 35 * (127 + 31)
    live = {time: sum(split) for time, split in found.memory_curve(1)}
    of_1 = int(found.class_of[1])

    def begins(name: str) -> list[float]:
        return [
            start / 1e15 for event, start in found.events() if event.op.name == name and of_1 in event.classes
        ]  # fmt: skip

    assert live[0.0] == w2 + inputs + w1, "w1 is sent for the forward pass"
    (loss,) = begins("squared_error_grad")
    assert live[loss] == w2 + inputs + a + 2 * p, "and gone before the loss: activation, result and its gradient"
    last = begins("relu_grad")[-1]
    # The gradient of w2 waits to be reduced; beside it the activation, its gradient twice.
    assert live[last] == w2 + inputs + w1 + w2 + 3 * a, "it is sent again for the backward pass"
