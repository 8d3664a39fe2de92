"""The program of a step of several requests computes what the program of one sequence computes for each of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import distir_relax as dr
from distir_relax.compiler.simulate_generation import request_steps
from distir_relax.executable.hoist import PREPARE, SIZED, SIZES
from distir_relax.interpret.distributed_executor import LocalTensors, run_devices
from distir_relax.ir import Module, TensorType, Value, verify
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.ops import check
from distir_relax.simulation.request_steps import Chunk, RequestSteps
from tests.incremental.language_models import VOCABULARY
from tests.serving.test_engine import compiled

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.shares("engine")]
STEPS: list[dict[Chunk, int]] = [
    {Chunk(0, 7, 1): 1},
    {Chunk(11, 1, 1): 3},
    {Chunk(5, 3, 1): 1, Chunk(0, 4, 0): 1, Chunk(2, 1, 1): 2, Chunk(0, 2, 2): 1},
    {Chunk(0, 5, 0): 1, Chunk(5, 1, 0): 1},
]


def steps_of(generation: dr.Generation, packed: bool = False) -> RequestSteps:
    return request_steps(generation.plan.modules["distributed"], generation.plan.bundle(()).manifest, packed)


def drawn(name: str, kind: TensorType, most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if kind.dtype.startswith("float"):
        return torch.randn(kind.shape, generator=generator, dtype=getattr(torch, kind.dtype)) / 3
    return torch.randint(most, kind.shape, generator=generator).to(getattr(torch, kind.dtype))


def local_tensors(value: Value, name: str, most: int) -> LocalTensors:
    """Tensors of a value on each device, drawn by a name: equal on devices of equal types; integers below `most`."""
    placed = value.placed
    return {device: drawn(name, placed.local(i), most) for i, device in enumerate(placed.devices)}


def alone(steps: RequestSteps, chunk: Chunk, number: int) -> tuple[dict[str, LocalTensors], dict[str, LocalTensors]]:
    """The inputs and outputs of a request that runs alone; a request's own inputs are drawn by its number."""
    module = specialize(steps.single, {s: n for s, n in chunk.sizes.items() if s in module_symbols(steps.single)})
    inputs = {
        item.value.name: local_tensors(item.value, item.value.name + str(number), VOCABULARY)
        if item.role == "input"
        else local_tensors(item.value, item.value.name, 2)
        for item in module.main.inputs
    }
    return inputs, run_devices(module, inputs)


def part(steps: RequestSteps, end: str, chunk: Chunk, given: Mapping[str, LocalTensors]) -> dict[str, LocalTensors]:
    """The results of a part of the entry, that is run once, for the sizes of a chunk; none without one."""
    function = steps.functions(chunk).get(steps.batched.main.name + end)
    if function is None:
        return {}
    others = tuple(f for f in steps.batched.functions if f.name != function.name)
    return dict(run_devices(replace(steps.batched, functions=(function, *others)), given))


def joined(parts: list[LocalTensors], dim: int) -> LocalTensors:
    return {device: torch.cat([part[device] for part in parts], dim) for device in parts[0]}


def compare(found: LocalTensors, expected: LocalTensors) -> None:
    assert found.keys() == expected.keys()
    for device, tensor in expected.items():
        torch.testing.assert_close(found[device], tensor, rtol=1e-5, atol=5e-6)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "strategy", "tail"),
    [
        ("falcon with alibi", "1/1/1/1", "ragged"),
        ("gpt2", "1/3/1/1", "pad"),
        ("gpt2", "1/1/2/1", "ragged"),
        ("mixtral", "1/3/1/1", "ragged"),
        ("gemma2 with a window of 5", "1/2/2/1", "pad"),
    ],
)
def test_a_step_computes_what_requests_compute_alone(name: str, strategy: str, tail: str) -> None:
    steps = steps_of(compiled(name, strategy, tail))
    # Products and norms run once, attention for each request, masks for each choice of sizes.
    assert any(".each_" in function.name for function in steps.batched.functions)
    for chunks in STEPS:
        step = steps.program(chunks)
        verify(step.module, check)
        requests = [alone(steps, chunk, number) for number, chunk in enumerate(chunks)]
        outputs = run_devices(step.module, inputs_of(step.module, steps, chunks, [given for given, _ in requests]))
        counts = list(chunks.values())
        for output in steps.single.main.outputs:
            found = [values[output.name] for _, values in requests]
            if output.name in steps.states.values():
                for number, expected in enumerate(found):
                    compare(outputs[f"{output.name}.{number}"], expected)
            else:
                rows = [part for part, count in zip(found, counts, strict=True) for _ in range(count)]
                compare(outputs[output.name], joined(rows, 1))


def inputs_of(
    module: Module, steps: RequestSteps, chunks: Mapping[Chunk, int], requests: list[dict[str, LocalTensors]]
) -> dict[str, LocalTensors]:
    """The inputs of a step: those of one request have its number after their name."""
    known = {i.value.name for i in steps.single.main.inputs if i.role == "input"} - set(steps.states)
    constants = {**requests[0], **part(steps, PREPARE, next(iter(chunks)), requests[0])}
    sized = [part(steps, SIZES, chunk, constants) for chunk in chunks]
    assert all(sized)
    inputs: dict[str, LocalTensors] = {}
    for item in module.main.inputs:
        name = item.value.name
        own, _, number = name.rpartition(".")
        if name in known:
            parts = [given[name] for given, n in zip(requests, chunks.values(), strict=True) for _ in range(n)]
            inputs[name] = joined(parts, 1)
        elif number.isdigit() and own in steps.states:
            inputs[name] = requests[int(number)][own]
        else:
            inputs[name] = sized[int(number)][own] if item.role == SIZED else constants[name]
    return inputs


def test_requests_of_equal_sizes_are_in_a_program_once() -> None:
    steps = steps_of(compiled("gpt2"))
    one, many = steps.program({Chunk(9, 1, 1): 1}), steps.program({Chunk(9, 1, 1): 50})
    assert set(many.repeats.values()) == {50}
    assert one.repeats == {}
    # A step of more requests than are recorded together.
    assert (one.is_recorded, many.is_recorded) == (True, False)
    assert not steps.program({Chunk(0, 9, 1): 1}).is_recorded, "it reads a prompt"
    joins = [op.name for op in many.module.main.ops if op.name in ("concat", "split")]
    assert len(many.module.main.ops) <= len(one.module.main.ops) + len(joins)
