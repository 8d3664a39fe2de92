"""Streams: communication beside computation, joined by `wait`, to the femtosecond."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import parse, verify
from distir_relax.ops import check
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
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
    assert overlapped.streamed == [reduce]
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


def test_processors_that_compute_also_reduce_in_shared_memory() -> None:
    """A level without overlap: the stream takes its devices' time, as without one."""
    module = infer_types(parse(TEXT.replace("STREAM", ', stream="comm"')))
    level = replace(link(1e-4, float("inf"))[0], size=3, overlaps=False)
    found = simulate_module(module, machine(3, (level,), flops=1e6))
    plain = run("", 1e-4)
    assert (max(found.clocks), found.busy, found.streamed) == (max(plain.clocks), plain.busy, plain.streamed)
    between = (replace(level, size=2), replace(level, size=4, overlaps=True))
    assert simulate_module(module, machine(3, between, flops=1e6)).clocks == run("comm", 1e-4).clocks


SENT = """
module @distributed {
  mesh[0] = device_mesh((2,), ("d",))
  func @main(input %x: f64[5,5] @ {0}, input %w: f64[5,5] @ {0,1}) {
    %v @ {0} = restrict(%w)
    %u @ {1} = restrict(%w)
    %a = matmul(%x, %v)
    %sent @ {1} = send(%a, stream="up")
    %b = matmul(%a, %v)
    %c = matmul(%u, %u)
    %here = wait(%sent)
    %d = matmul(%here, %c)
    return "b": %b, "d": %d
  }
}
"""


@pytest.mark.parametrize("beside", [1.0, 0.25, 0.0])
def test_what_is_sent_may_keep_both_ends_from_their_work(beside: float) -> None:
    """The sender goes on later, and so does the receiver, who has worked before it comes."""
    module = infer_types(parse(SENT.replace('send(%a, stream="up")', 'send(%a) {stream="up"}')))
    verify(module, check)
    found = simulate_module(module, replace(machine(2, link(1e-4, float("inf")), flops=1e6), beside=beside))
    sent = 10**11
    held = round(sent * (1 - beside))
    first, second = (int(c) for c in found.class_of)
    assert found.clocks[first] == 2 * PRODUCT + held
    # It has come by the time that the first product of the receiver is done, which began behind what it lost.
    assert found.clocks[second] == max(PRODUCT + sent, PRODUCT + held) + PRODUCT
    assert found.busy[1][first] == found.busy[1][second] == held
    assert found.streamed[first] == found.streamed[second] == sent - held


BUFFERS = """
module @distributed {
  mesh[0] = device_mesh((2,), ("d",))
  func @main(input %x: f64[7,5] @ {0}) {
    %a = nn.relu(%x)
    %sent.0 @ {1} = send(%a)STREAM
    %b = nn.relu(%x)
    %c = nn.relu(%b)
    %sent.1 @ {1} = send(%c)STREAM
    %d = nn.relu(%x)
    %e = add(%d, %d)
    %f = add(%e, %e)
    %y.0 = USE(%sent.0)
    %y.1 = USE(%sent.1)
    return "f": %f, "y.0": %y.0, "y.1": %y.1
  }
}
"""


@pytest.mark.parametrize(("stream", "use", "buffers"), [("", "nn.relu", 0), (' {stream="up"}', "wait", 1)])
def test_a_buffer_is_kept_until_its_device_communicates_again(stream: str, use: str, buffers: int) -> None:
    """The first device has x, an op's operand and result, and the buffer under way: of two transfers one at a time."""
    module = infer_types(parse(BUFFERS.replace("STREAM", stream).replace("USE", use)))
    verify(module, check)
    found = simulate_module(module, replace(machine(2), in_place=False))
    assert found.peak_memory[0] == (3 + buffers) * 7 * 5 * 8
