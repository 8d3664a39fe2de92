"""Predicted peak memory against torch's own record of what it allocates, on real runs of the torch backend."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import distir_relax as dr
from distir_relax.bundle import Bundle
from distir_relax.compiler.simulate import simulate
from distir_relax.ir import Module
from distir_relax.runtime.backends import load_program
from distir_relax.runtime.transports.threads import ThreadWorld
from distir_relax.simulation.kept_values import kept_storage
from distir_relax.simulation.simulator import simulate_module
from tests import mlp
from tests.machines import machine
from tests.zoo import gpt2

ALONE = dr.DeviceMesh((1,), ("alone",))
# What is allocated besides the program's tensors: scalars, and what a kernel takes for its own use.
TOLERANCE = 0.01


def measured_peak(bundle: Bundle, inputs: Sequence[torch.Tensor]) -> int:
    """The most bytes that the program of rank 0 has allocated at once, beside its inputs and weights."""
    comm = ThreadWorld(bundle.manifest.mesh).communicator(0, "cpu")
    program = load_program("torch", bundle, 0, comm, "cpu")
    program(*inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        program(*inputs)
    results = found.profiler
    assert results is not None
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    assert len(events) > 4, "the profiler records no allocations"
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def predicted_peak(model: Module | dr.Plan) -> int:
    """The same, by the simulator: its peak without the inputs and weights of the program."""
    found = simulate(model, profile=machine(1))
    main = found.module.main
    values = [i.value for i in main.inputs if i.role == "input"]
    values += {v.name: v for v in kept_storage(found.module, main).values()}.values()
    return int(found.peak_memory[0]) - sum(v.local.bytes for v in values)


@pytest.mark.parametrize(
    ("layers", "width", "batch", "microbatches"), [(3, 512, 700, 1), (3, 600, 3003, 3), (4, 600, 3600, 5)]
)
def test_training(layers: int, width: int, batch: int, microbatches: int) -> None:
    """Tensors of more than a megabyte, which the backend lets go after their last use."""
    model = mlp.perceptron(layers, width, torch.float32, "cpu")
    batch_of = torch.randn(batch, width), torch.randn(batch, width)
    step = dr.compile_training(
        model, mlp.half_squared_error, optimizer=dr.optim.SGD(lr=0.01), example_batch=batch_of,
        strategy=f"1/1/1/{microbatches}",
    )  # fmt: skip
    kinds = [i.value.tensor for i in step.plan.modules["ranked"].functions[0].inputs if i.role == "input"]
    given = [torch.zeros(kind.shape, dtype=getattr(torch, kind.dtype)) for kind in kinds]
    measured = measured_peak(step.plan.bundle(("torch",)), given)
    assert predicted_peak(step.plan) == pytest.approx(measured, rel=TOLERANCE)


def test_inference_of_an_mlp() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 1023), torch.nn.GELU(), torch.nn.Linear(1023, 700), torch.nn.ReLU()]
    x = torch.randn(1000, 512)
    plan = dr.compile(torch.nn.Sequential(*layers).eval(), (x,), mesh=ALONE)
    assert predicted_peak(plan) == pytest.approx(measured_peak(plan.bundle(("torch",)), [x]), rel=TOLERANCE)


def test_inference_of_gpt2() -> None:
    case = gpt2(layers=2, vocabulary=1997, width=384, heads=6)
    tokens = torch.zeros(15, 63, dtype=torch.long)
    plan = dr.compile(case.model, (tokens,), case.kwargs, mesh=ALONE)
    assert predicted_peak(plan) == pytest.approx(measured_peak(plan.bundle(("torch",)), [tokens]), rel=TOLERANCE)


def test_memory_is_told_apart_by_what_it_is_for() -> None:
    width, rows = 7, 6
    module = mlp.program(3, width, "1/1/1/2", rows, torch.float64)
    found = simulate_module(module, machine(1))
    weight = width * width * 8
    first, last = found.memory_curve(0)[0][1], found.memory_curve(0)[-1][1]
    # The gradient of the loss by each of its terms is one number, which does not depend on data.
    assert first[0] == last[0] == 3 * weight + 8
    peak = found.peak(0)
    assert sum(peak.split) == peak.bytes
    most = max(split[2] for _, split in found.memory_curve(0))
    # All three weights' gradients, and one of the next microbatch's, which is added to it.
    assert most == 4 * weight
    assert last[2] == 0, "gradients are gone after the update"
