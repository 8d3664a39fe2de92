"""Streams: communication beside computation, joined by `wait`, to the femtosecond."""

from __future__ import annotations

import pytest

from distir_relax.analysis.simulate import simulate_module
from distir_relax.analysis.simulation import Simulation
from distir_relax.analysis.types import infer_types
from distir_relax.ir import parse, verify
from distir_relax.ops import check
from tests.machines import link, machine

TEXT = """
module @distributed {
  mesh[0] = device_mesh((3,), ("d",))
  func @main(input %x: f64[5,5] @ {0..2}, input %w: f64[5,5] @ {0..2}) {
    %pending = all_reduce(%w) {axis="d", op="sum"STREAM}
    %a = matmul(%x, %w)
    %b = matmul(%a, %w)
    %ready = wait(%pending)
    %c = matmul(%b, %ready)
    return "c": %c
  }
}
"""
PRODUCT = 250 * 10**9
"""A product of 5 x 5 at a million operations a second, in femtoseconds."""


def run(stream: str, latency: float, text: str = TEXT) -> Simulation:
    module = infer_types(parse(text.replace("STREAM", f', stream="{stream}"' if stream else "")))
    verify(module, check)
    return simulate_module(module, machine(3, link(latency, float("inf")), flops=1e6))


@pytest.mark.parametrize("latency", [1e-6, 1e-4, 1e-3])
def test_communication_hides_behind_what_runs_beside_it(latency: float) -> None:
    # Two steps of doubling bring three devices together.
    reduce = round(2 * latency * 1e15)
    plain, overlapped = run("", latency), run("comm", latency)
    assert max(plain.clocks) == reduce + 3 * PRODUCT
    assert max(overlapped.clocks) == max(reduce, 2 * PRODUCT) + PRODUCT
    assert plain.busy[1] == [reduce]
    assert overlapped.busy[1] == [0]
    assert overlapped.beside == [reduce]
    assert plain.communication == pytest.approx(reduce / max(plain.clocks))
    assert overlapped.communication == 0.0
    assert overlapped.bubble == pytest.approx(max(0, reduce - 2 * PRODUCT) / max(overlapped.clocks))


def test_a_stream_begins_when_its_devices_have_come_to_it() -> None:
    """What is on a stream starts no earlier than what stands before it in the devices' own order."""
    moved = TEXT.replace("    %a = matmul(%x, %w)\n", "").replace(
        "    %pending", "    %a = matmul(%x, %w)\n    %pending"
    )
    reduce = round(2 * 1e-3 * 1e15)
    assert max(run("comm", 1e-3, moved).clocks) == PRODUCT + reduce + PRODUCT


def test_two_ops_of_one_stream_follow_each_other_and_those_of_two_do_not() -> None:
    second = '    %other = all_reduce(%x) {axis="d", op="sum", stream="SECOND"}\n    %a = matmul'
    last = "    %seen = wait(%other)\n    %c = matmul(%b, %ready)\n    %d = matmul(%c, %seen)\n"
    text = (
        TEXT.replace("    %a = matmul", second)
        .replace("    %c = matmul(%b, %ready)\n", last)
        .replace('"c": %c', '"d": %d')
    )
    reduce = round(2 * 1e-3 * 1e15)
    assert max(run("one", 1e-3, text.replace("SECOND", "one")).clocks) == 2 * reduce + 2 * PRODUCT
    assert max(run("one", 1e-3, text.replace("SECOND", "two")).clocks) == reduce + 2 * PRODUCT
