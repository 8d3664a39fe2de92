"""Intervals of predictions: on machines whose errors are drawn, they cover as often as they say."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

import distir_relax as dr
from distir_relax.calibration.program_overhead import scale_communication
from distir_relax.cost.profile import Profile, load_profile, read_profile
from distir_relax.cost.profile_writer import print_profile
from distir_relax.cost.roofline import error_kind
from distir_relax.cost.scaling import faster
from distir_relax.cost.uncertainty import OP_KINDS, Uncertainty
from distir_relax.errors import ProfileError
from distir_relax.ops import lookup
from distir_relax.report.page import page
from distir_relax.simulation.simulator import simulate_module
from tests.calibration.test_fit import some_programs

DRAWN = Uncertainty(0.2, 0.1, 0.0, 0.15, 0.25, 0.06, 0.03)
CPU = replace(load_profile("cpu-local"), overhead=0.0, view=0.0)


def test_kinds_of_ops() -> None:
    of = {
        "linear": "products", "quantized_linear": "products", "add": "elementwise", "adam_step": "elementwise",
        "nn.layer_norm": "rows", "nn.scaled_dot_product_attention": "rows", "sum": "rows", "all_reduce": "collectives",
        "send": "collectives", "permute_dims": "views",
    }  # fmt: skip
    assert {name: error_kind(CPU, lookup(name)) for name in of} == of
    assert set(of.values()) == set(OP_KINDS)


def test_an_interval_is_that_of_a_sum_of_independent_parts() -> None:
    seconds = {"products": 3.0, "rows": 1.0}
    low, high = Uncertainty(products=0.2, rows=0.4).interval(8.0, seconds)
    deviation = math.hypot(0.2 * 3 / 4, 0.4 / 4)
    assert math.log(high / 8) == pytest.approx(1.6449 * deviation, rel=1e-4)
    assert low * high == pytest.approx(64.0)
    assert Uncertainty(products=0.2).interval(8.0, {}) == (8.0, 8.0)


def drawn_machine(draw: random.Random) -> tuple[Profile, float]:
    """A machine whose products, other ops and communications are off by what is drawn, and a factor of all times."""
    products, collectives = (math.exp(draw.gauss(0, s)) for s in (DRAWN.products, DRAWN.collectives))
    rest = {"elementwise": math.exp(draw.gauss(0, DRAWN.elementwise)), "rows": math.exp(draw.gauss(0, DRAWN.rows))}
    machine = scale_communication(faster(CPU, ("device.bandwidth",), 1e9), collectives, 0.0)
    tables = {
        name: {dtype: replace(m, flops=m.flops / products) for dtype, m in getattr(machine, name).items()}
        for name in ("matrix", "packed")
    }
    ops = {
        dtype: {name: rate / rest[error_kind(CPU, lookup(name))] for name, rate in rates.items() if name in KNOWN}
        for dtype, rates in machine.ops.items()
    }
    noise = math.exp(draw.gauss(0, math.hypot(DRAWN.programs, DRAWN.repeatability)))
    return replace(machine, ops=ops, **tables), noise


KNOWN = ("add", "multiply", "nn.gelu", "nn.relu", "relu_grad", "tanh", "nn.layer_norm", "nn.softmax",
         "nn.scaled_dot_product_attention")  # fmt: skip


@pytest.mark.sweep
def test_nine_of_ten_machines_are_within_the_interval() -> None:
    """Each machine has errors of its own, drawn from the deviations that the profile states."""
    draw = random.Random(7)
    predicted = replace(faster(CPU, ("device.bandwidth",), 1e9), uncertainty=DRAWN)
    programs = [sample.module for sample in some_programs("float32", 1, 2)[::5]]
    intervals = [simulate_module(module, predicted).interval for module in programs]
    inside = []
    for _ in range(150):
        machine, noise = drawn_machine(draw)
        for module, interval in zip(programs, intervals, strict=True):
            assert interval is not None
            inside.append(interval[0] <= noise * simulate_module(module, machine).makespan <= interval[1])
    assert 0.86 < sum(inside) / len(inside) < 0.94


def test_reports_have_the_interval() -> None:
    program = "examples/paper/pipeline.distir"
    without = dr.simulate(program, profile=CPU)
    assert without.interval is None
    assert "90 %" not in str(without)
    assert without.as_json()["interval_s"] is None
    found = dr.simulate(program, profile=replace(CPU, uncertainty=DRAWN))
    assert found.interval is not None
    assert found.interval[0] < found.makespan == without.makespan < found.interval[1]
    assert json.loads(json.dumps(found.as_json()))["interval_s"] == list(found.interval)
    assert "90 %" in str(found)
    assert "90 %: " in page(found, "title")
    assert "90 %: " not in page(without, "title")


def test_a_profile_keeps_its_uncertainty_and_processor() -> None:
    profile = replace(
        CPU, uncertainty=DRAWN, processor='A "fast" CPU', instructions="AVX-512 bf16, AMX", cores=3,
    )  # fmt: skip
    text = print_profile(profile)
    assert read_profile(text) == profile
    for old, new, message in (
        ("products = 0.2", "products = -0.2", "expected a number from 0 to 10 'products', found -0.2"),
        ("products = 0.2", "product = 0.2", "unknown key 'product' in [uncertainty]"),
        ("cores = 3", "cores = 2.5", "expected a whole number 'cores' in [device]"),
        ("instructions =", "instructions = 3 #", "expected text 'instructions', found 3"),
    ):
        assert old in text
        with pytest.raises(ProfileError) as raised:
            read_profile(text.replace(old, new), "own")
        assert message in str(raised.value)


def test_devices_without_cores_of_their_own_share_them() -> None:
    module = some_programs("float32", 1, 2)[-1].module
    uncached = replace(CPU, cache=0.0)
    own = simulate_module(module, replace(uncached, cores=2))
    assert own.makespan == simulate_module(module, uncached).makespan
    shared = simulate_module(module, replace(uncached, cores=1))
    assert shared.compute == pytest.approx(2 * own.compute)
    assert shared.communicate == pytest.approx(own.communicate, rel=0.2)
    assert simulate_module(module, shared.profile).makespan == shared.makespan, "once"
    assert simulate_module(module, replace(CPU, cores=1)).profile.cache == CPU.cache / 2


def test_a_program_of_one_device_has_the_memory_alone() -> None:
    shared = replace(
        CPU, bandwidth_alone=3 * CPU.bandwidth,
        packed={"float32": replace(CPU.packed["float32"], bandwidth=2e9)},
    )  # fmt: skip
    alone = shared.of_one_device()
    assert alone.bandwidth == 3 * CPU.bandwidth
    assert alone.packed["float32"].bandwidth == pytest.approx(6e9)
    assert alone.matrix["float32"].bandwidth == CPU.matrix["float32"].bandwidth == 0.0
    assert alone.of_one_device() == alone
    module = some_programs("float32", 1, 2)[0].module
    assert simulate_module(module, shared).makespan == simulate_module(module, alone).makespan
