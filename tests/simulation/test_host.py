"""Host and device as two clocks: against the recurrence that the queue of a device follows, by hand and at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from distir_relax.cost.profile import Level
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import Module, parse
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine as made

MACHINE = made(4, (Level("link", 100, 2e-6, 1e12),), flops=1e9)
"""An element-wise op of n thousand elements takes n microseconds, a send hardly more than 2."""
DISPATCH, SHAPE_OP = 5e-6, 3e-6
HOSTED = replace(MACHINE, dispatch=DISPATCH, shape_op=SHAPE_OP)
WAITS = replace(HOSTED, waits=frozenset({"shape_op"}))

Step = tuple[str, int, int]
"""``("op", device, microseconds)``, ``("shape", device, count)``, ``("send", device, to)``."""


def body(steps: Sequence[Step]) -> tuple[str, list[str]]:
    """The text of the steps, and the inputs that they need."""
    lines, inputs = [], set()
    for number, (kind, device, amount) in enumerate(steps):
        thousands = amount if kind == "op" else 1
        name = f"%x{device}_{thousands}"
        inputs.add(f"input {name}: f32[{thousands},1000] @ {{{device}}}")
        text = {
            "op": f"%v{number} = nn.relu({name})",
            "shape": f"%v{number} = shape_ops({name}) {{count={amount}}}",
            "send": f"%v{number} @ {{{amount}}} = send({name})",
        }
        lines.append(text[kind])
    return "\n    ".join(lines), sorted(inputs)


def program(steps: Sequence[Step], calls: int = 0) -> Module:
    """The steps in the entry function, or in a function on device 0 that it calls so many times."""
    text, inputs = body(steps)
    last = len(steps) - 1
    if not calls:
        main = f'  func @main({", ".join(inputs)}) {{\n    {text}\n    return "y": %v{last}\n  }}\n'
    else:
        names = ", ".join(item.split()[1].rstrip(":") for item in inputs)
        rows = "\n    ".join(f"%y{i} = call @f({names}) on {{0}}" for i in range(calls))
        arguments = ", ".join(item.split(":")[0] for item in inputs)
        main = (
            f'  func @main({", ".join(inputs)}) {{\n    {rows}\n    return "y": %y{calls - 1}\n  }}\n'
            f'  func @f({arguments}) {{\n    {text}\n    return "y": %v{last}\n  }}\n'
        )
    return infer_types(parse(f'module @distributed {{\n  mesh[0] = device_mesh((4,), ("d",))\n{main}}}\n'))


def queued(steps: Sequence[Step], waits: Sequence[str] = ()) -> tuple[list[float], list[float]]:
    """When each host and each device has finished, and nothing but the recurrence: microseconds."""
    host, device = [0.0] * 4, [0.0] * 4
    for kind, here, amount in steps:
        if kind == "shape":
            host[here] = max(host[here], device[here] if "shape_op" in waits else 0.0) + 3.0 * amount
        elif kind == "op":
            host[here] += 5.0
            device[here] = max(device[here], host[here]) + amount
        else:
            both = (here, amount)
            for i in both:
                host[i] += 5.0
            end = max(*(host[i] for i in both), *(device[i] for i in both)) + 2.0 + 4000 / 1e6
            for i in both:
                device[i] = end
                host[i] = end if "send" in waits else host[i]
    return host, device


def close(found: Simulation, expected: tuple[list[float], list[float]]) -> bool:
    """Whether a simulation ends as expected."""
    return found.makespan == pytest.approx(max(*expected[0], *expected[1]) * 1e-6, rel=1e-9)


def test_where_the_host_is_slow_an_op_costs_its_issue() -> None:
    found = simulate_module(program([("op", 0, 2)] * 7), HOSTED)
    assert found.makespan == pytest.approx(7 * 5e-6 + 2e-6)
    assert found.compute[0] == pytest.approx(7 * 2e-6)
    assert found.awaiting_host[0] == pytest.approx(5e-6 + 6 * 3e-6)
    assert found.awaiting_host[0] <= found.idle[0] + 1e-15
    assert "for the host" in repr(found)


def test_where_the_device_is_slow_the_host_is_hidden() -> None:
    found = simulate_module(program([("op", 0, 11)] * 7), HOSTED)
    assert found.makespan == pytest.approx(5e-6 + 7 * 11e-6)
    assert found.awaiting_host[0] == pytest.approx(5e-6)


def test_a_host_that_reads_its_device_adds_up_with_it() -> None:
    steps: list[Step] = [("op", 0, 11), ("shape", 0, 4)] * 5
    assert simulate_module(program([*steps, ("op", 0, 11)]), WAITS).makespan == pytest.approx(6 * 16e-6 + 5 * 12e-6)
    ahead = simulate_module(program([*steps, ("op", 0, 11)]), HOSTED).makespan
    assert ahead == pytest.approx(5 * 17e-6 + 5e-6 + 11e-6)


def test_a_host_that_sends_waits_for_both_ends() -> None:
    steps: list[Step] = [("op", 0, 40), ("send", 0, 1), ("op", 0, 1), ("op", 1, 1)]
    found = simulate_module(program(steps), HOSTED)
    assert close(found, queued(steps))
    blocked = replace(HOSTED, waits=frozenset({"send"}))
    held = simulate_module(program(steps), blocked)
    assert close(held, queued(steps, ("send",)))
    assert held.makespan == pytest.approx(found.makespan + 5e-6)


@pytest.mark.parametrize("waits", [(), ("shape_op",), ("send",), ("send", "shape_op")], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_random_steps_end_as_the_recurrence_says(seed: int, waits: tuple[str, ...]) -> None:
    draw = random.Random(seed)
    steps: list[Step] = []
    for _ in range(draw.randint(3, 40)):
        here = draw.randrange(4)
        steps.append(
            draw.choice([
                ("op", here, draw.choice((1, 3, 5, 9, 30))),
                ("shape", here, draw.randint(1, 9)),
                ("send", here, (here + draw.randint(1, 3)) % 4),
            ])
        )  # fmt: skip
    found = simulate_module(program(steps), replace(HOSTED, waits=frozenset(waits)))
    assert close(found, queued(steps, waits))


@pytest.mark.parametrize("waits", [(), ("shape_op",)], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_function_that_is_called_again_keeps_the_lead_of_its_host(seed: int, waits: tuple[str, ...]) -> None:
    draw = random.Random(seed)
    kinds = ("op", "op", "op", "shape")[: 4 if seed % 3 else 3]
    steps: list[Step] = []
    for _ in range(draw.randint(2, 9)):
        kind = draw.choice(kinds)
        steps.append((kind, 0, draw.choice((1, 2, 4, 5, 6, 9)) if kind == "op" else draw.randint(1, 3)))
    found = simulate_module(program(steps, calls=60), replace(HOSTED, waits=frozenset(waits)))
    assert close(found, queued(steps * 60, waits))


def test_devices_that_take_turns_with_their_host_pay_for_both() -> None:
    turns = replace(MACHINE, overhead=2e-6, shape_op=SHAPE_OP)
    found = simulate_module(program([("op", 0, 11), ("shape", 0, 4), ("op", 0, 1)]), turns)
    assert found.makespan == pytest.approx(13e-6 + 12e-6 + 3e-6)
    assert not found.awaiting_host.any()
