"""Fits find a machine again from the times that the cost model gives it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest

from distir_relax.calibration.fit import (
    coordinate_search,
    fit_device,
    fit_line,
    fit_links,
    fit_quantized,
    least_squares,
)
from distir_relax.calibration.measure import CollectiveSample
from distir_relax.calibration.microbenchmarks import OpSample, op_samples, payloads
from distir_relax.calibration.program_overhead import fit_programs, scale_communication, scale_ops
from distir_relax.calibration.programs import ProgramSample, program_makers
from distir_relax.cost.network import collective_seconds
from distir_relax.cost.profile import Level, Line, Matrix, Profile
from distir_relax.cost.roofline import repeated_seconds
from distir_relax.ir import TensorType
from distir_relax.simulation.simulator import simulate_module
from tests.machines import link, machine

ATTENTION = "nn.scaled_dot_product_attention"
TRUE = replace(
    machine(8, bandwidth=1.3e10, overhead=2e-7),
    matrix={"float32": Matrix(1.9e11, 5.0, 20.0, 12.0, 4e10, 7e9, call=5e-6)},
    packed={"float32": Matrix(2.6e11, 2.0, 30.0, 9.0, 1.1e11, 9e9, call=4e-6)},
    vector={"float32": 7e9},
    ops={"float32": {"add": 1.3e10, "tanh": 2e9}},
    calls={"float32": {"add": 2e-6, "tanh": 8e-6}},
    call=3e-6,
    products={"float32": {ATTENTION: Matrix(8e10, 9.0, 15.0, 4.0, call=3e-5)}},
    overlap=2.0,
    view=2e-6,
    recorded=float(1 << 24),
    cache=2e6,
    cache_bandwidth=6e10,
    kind="cpu",
)
# The size of the cache is read off the machine, not fitted.
START = replace(machine(8), cache=TRUE.cache, kind="cpu")


def seconds(profile: Profile, sample: OpSample) -> float:
    return repeated_seconds(profile, sample.work)


@pytest.fixture(scope="module")
def fitted() -> tuple[Profile, dict[str, float]]:
    """The made-up device as it is found again, and the errors of the fit."""
    samples = op_samples("float32", 1)
    return fit_device(START, "float32", samples, [seconds(TRUE, sample) for sample in samples])


def test_a_made_up_device_is_found_again(fitted: tuple[Profile, dict[str, float]]) -> None:
    samples = op_samples("float32", 1)
    times = [seconds(TRUE, sample) for sample in samples]
    found, errors = fitted
    products = {"products", "products, packed", "products, cold"}
    assert set(errors) == {*products, "elementwise", "updates", "views", "rows", "attention"}
    assert max(errors.values()) < 0.05
    off = [abs(seconds(found, sample) / time - 1) for sample, time in zip(samples, times, strict=True)]
    assert sum(off) / len(off) < 0.05
    assert found.matrix["float32"].flops == pytest.approx(TRUE.matrix["float32"].flops, rel=0.05)
    assert found.packed["float32"].flops == pytest.approx(TRUE.packed["float32"].flops, rel=0.05)
    assert found.matrix["float32"].thin == pytest.approx(4e10, rel=0.1)
    assert found.matrix["float32"].bandwidth == pytest.approx(7e9, rel=0.1)
    assert found.ops["float32"]["tanh"] == pytest.approx(2e9, rel=0.05)
    assert found.calls["float32"]["tanh"] == pytest.approx(8e-6, rel=0.05)
    assert found.calls["float32"]["add"] == pytest.approx(2e-6, rel=0.05)
    assert found.packed["float32"].call == pytest.approx(4e-6, rel=0.05)
    attention = found.products["float32"][ATTENTION]
    assert attention.flops == pytest.approx(8e10, rel=0.1)
    assert attention.half_rows == pytest.approx(9.0, rel=0.15)
    assert attention.call == pytest.approx(3e-5, rel=0.1)
    assert found.overhead == pytest.approx(TRUE.overhead, rel=0.05)
    assert found.matrix["float64"] == machine(8).matrix["float64"], "what was not measured stays"


def test_products_of_weights_of_8_bits_are_found_again(fitted: tuple[Profile, dict[str, float]]) -> None:
    samples = op_samples("int8", 1)
    true = replace(TRUE, packed={**TRUE.packed, "int8": Matrix(5e11, 3.0, 15.0, 7.0, 2e11, 1.5e10, call=3e-6)})
    times = [seconds(true, sample) for sample in samples]
    assert times[9] != seconds(TRUE, samples[9]), "weights have rates of their own"
    found, errors = fit_quantized(TRUE, "int8", samples, times)
    assert max(errors.values()) < 0.02
    assert found.packed["int8"].flops == pytest.approx(5e11, rel=0.05)
    assert found.packed["int8"].bandwidth == pytest.approx(1.5e10, rel=0.1)
    assert found.packed["int8"].call == pytest.approx(3e-6, rel=0.05)
    assert (found.packed["float32"], found.matrix) == (TRUE.packed["float32"], TRUE.matrix)


def test_a_second_dtype_keeps_what_does_not_depend_on_it(fitted: tuple[Profile, dict[str, float]]) -> None:
    samples = [s for s in op_samples("bfloat16", 1) if s.group in ("products", "rows")][::3]
    times = [3 * seconds(TRUE, sample) for sample in samples]
    profile, _ = fit_device(fitted[0], "bfloat16", samples, times, is_first=False)
    for key in ("overhead", "bandwidth", "cache_bandwidth", "overlap", "view"):
        assert getattr(profile, key) == getattr(fitted[0], key)
    assert profile.matrix["float32"] == fitted[0].matrix["float32"]
    assert profile.matrix["bfloat16"].flops < profile.matrix["float32"].flops / 2


def test_it_predicts_sizes_that_it_was_not_fitted_to(fitted: tuple[Profile, dict[str, float]]) -> None:
    found, _ = fitted
    for rows, inner, columns in ((5, 127, 127), (37, 513, 255), (200, 900, 1000), (1, 2000, 2000)):
        x, w = TensorType((rows, inner), "float32"), TensorType((columns, inner), "float32")
        sample = OpSample("products", "linear", (x, w))
        assert seconds(found, sample) == pytest.approx(seconds(TRUE, sample), rel=0.1)


@cache
def some_programs(dtype: str, scale: int, ranks: int) -> tuple[ProgramSample, ...]:
    """A few of the programs that calibration runs, of each kind: a fit to all takes long."""
    makers = program_makers(dtype, scale, ranks)
    return tuple(make() for make in (*makers[1:8:2], *makers[10::5]))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_programs_tell_how_much_slower_a_machine_is_in_them(ranks: int) -> None:
    start = replace(
        TRUE,
        levels=link(4e-6, 5e9),
        lines=tuple(
            Line(name, ranks, 1e-5, 2e-10, ((4e3, 1e-5), (4e6, 9e-4))) for name in ("all_reduce", "all_gather", "send")
        ),
    )
    true = scale_ops(start, 1.0, 2e-6)
    true = scale_communication(true, 1.5, 3e-5) if ranks > 1 else true
    samples = some_programs("float32", 1, ranks)
    times = [simulate_module(sample.module, true).makespan for sample in samples]
    found, errors = fit_programs(start, samples, times)
    assert set(errors) == ({"programs"} if ranks == 1 else {"programs", "programs of all ranks"})
    assert max(errors.values()) < 0.02
    if ranks > 1:
        assert found.python_collective == pytest.approx(3e-5, rel=0.1)
    assert found.python == pytest.approx(2e-6, rel=0.05)
    assert found.cache_bandwidth == pytest.approx(true.cache_bandwidth, rel=0.1)
    assert found.packed["float32"].flops == pytest.approx(true.packed["float32"].flops, rel=0.05)
    if ranks > 1:
        line = next(line for line in found.lines if line.collective == "all_reduce")
        assert line.seconds(1e6) == pytest.approx(true.lines[0].seconds(1e6), rel=0.1)


def test_samples_have_distinct_types_and_lie_within_reason() -> None:
    samples = op_samples("float32", 1)
    kinds = {(str(sample), str(sample.attrs), sample.fixed, sample.cold, sample.recorded) for sample in samples}
    assert len(kinds) == len(samples)
    assert max(sum(t.bytes for t in s.operands) for s in samples) < 64e6


def test_links_are_found_again() -> None:
    true = machine(8, link(4e-6, 5e9))
    times = [
        (
            CollectiveSample(name, n, 4 * size),
            collective_seconds(true, name, range(n), [4 * size / (n if name == "all_gather" else 1)] * n),
        )
        for name in ("all_gather", "reduce_scatter", "send")
        for n in ((2,) if name == "send" else (2, 3, 5))
        for size in payloads(1)
    ]
    found, errors = fit_links(machine(8), times)
    assert set(errors) == {"all_gather", "reduce_scatter", "send"}
    assert max(errors.values()) < 0.01
    lines = {(line.collective, line.ranks): line for line in found.lines}
    for size in (500, 50_000, 3_000_000, 40_000_000):
        assert lines["send", 2].seconds(size) == pytest.approx(4e-6 + size / 5e9, rel=0.02)
        assert lines["reduce_scatter", 5].seconds(size) == pytest.approx(4 * (4e-6 + size / 5 / 5e9), rel=0.02)
    assert found.levels[0].latency == pytest.approx(4e-6, rel=0.01)
    assert found.levels[0].bandwidth == pytest.approx(5e9, rel=0.01)


def test_links_of_each_level_are_found_again() -> None:
    levels = (Level("host", 2, 1e-6, 1e10), Level("network", 6, 1e-4, 1e8))
    true = machine(6, (Level("host", 2, 3e-6, 4e9), Level("network", 6, 2e-4, 1.2e8)))
    times = [
        (CollectiveSample("send", 2, 4 * size, level=name), collective_seconds(true, "send", pair, [4 * size]))
        for name, pair in (("host", (0, 1)), ("network", (0, 5)))
        for size in payloads(1)
    ]
    found, errors = fit_links(machine(6, levels), times)
    assert set(errors) == {"send, host", "send, network"}
    for level, expected in zip(found.levels, true.levels, strict=True):
        assert level.latency == pytest.approx(expected.latency, rel=0.02)
        assert level.bandwidth == pytest.approx(expected.bandwidth, rel=0.02)
    assert [line.level for line in found.lines] == ["host", "network"]


def test_a_line_through_noise() -> None:
    draw = random.Random(0)
    sizes = [10.0 ** (i / 4) for i in range(33)]
    times = [(2e-5 + 3e-9 * n) * math.exp(draw.gauss(0, 0.02)) for n in sizes]
    latency, slope = fit_line(sizes, times)
    assert latency == pytest.approx(2e-5, rel=0.05)
    assert slope == pytest.approx(3e-9, rel=0.05)


def test_minimise_finds_a_minimum() -> None:
    def loss(x: dict[str, float]) -> float:
        return math.log(x["a"] / 3e4) ** 2 + 5 * math.log(x["a"] * x["b"] / 7.0) ** 2

    found, value = coordinate_search(loss, {"a": 1.0, "b": 1.0})
    assert found["a"] == pytest.approx(3e4, rel=0.01)
    assert found["b"] == pytest.approx(7 / 3e4, rel=0.01)
    assert value == loss(found) < 1e-4


def test_least_squares_finds_a_minimum() -> None:
    def residuals(x: dict[str, float]) -> list[float]:
        return [math.log(x["a"] / 3e4), math.log(x["a"] * x["b"] / 7.0), 0.5 * math.log(x["a"] * x["a"] / 9e8)]

    found, value = least_squares(residuals, {"a": 1.0, "b": 1.0})
    assert found["a"] == pytest.approx(3e4, rel=1e-3)
    assert found["b"] == pytest.approx(7 / 3e4, rel=1e-3)
    assert value < 1e-6


def test_least_squares_leaves_alone_what_does_not_matter() -> None:
    found, value = least_squares(lambda x: [math.log(x["a"] / 5.0)], {"a": 1.0, "idle": 3.0})
    assert found["a"] == pytest.approx(5.0, rel=1e-3)
    assert found["idle"] == 3.0
    assert value < 1e-6
