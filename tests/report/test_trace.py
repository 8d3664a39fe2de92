"""The trace against the format that Perfetto reads, and against the simulation that it shows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from distir_relax.errors import DistIRError
from distir_relax.report.trace import trace, write_trace
from distir_relax.simulation.memory_categories import CATEGORIES
from distir_relax.simulation.simulation import Simulation
from tests.report.simulations import streams, training


def nanoseconds(value: float) -> int:
    """As Perfetto reads a time of the trace: microseconds, cut off below a nanosecond."""
    return int(value * 1000.0)


def tracks(found: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The (start, end) of the slices on each track, in nanoseconds."""
    by_track: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            by_track.setdefault((event["pid"], event["tid"]), []).append((start, start + nanoseconds(event["dur"])))
    return by_track


@pytest.fixture(scope="module", params=["1/1/3/5", "3/1/1/2", "2/1/3/3", "1/1/1/1"])
def simulation(request: pytest.FixtureRequest) -> Simulation:
    return training(request.param)


def test_events_of_a_track_never_overlap(simulation: Simulation) -> None:
    for spans in tracks(trace(simulation)).values():
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start


def test_busy_and_idle_of_a_track_are_the_makespan(simulation: Simulation) -> None:
    found = trace(simulation)
    own = {
        (e["pid"], e["tid"])
        for e in found["traceEvents"]
        if e["name"] == "thread_name" and e["args"]["name"] == "ops in order"
    }
    assert len(own) == len(simulation.members)
    for pid, tid in own:
        spans = tracks(found)[pid, tid]
        device = int(simulation.members[pid - 1][0])
        idle, before = 0, 0
        for start, end in spans:
            idle += start - before
            before = end
        idle += round(simulation.makespan * 1e9) - before
        # Starts and ends are rounded to whole nanoseconds.
        assert idle == pytest.approx(simulation.idle[device] * 1e9, abs=len(spans) + 1)
        busy = sum(end - start for start, end in spans)
        assert busy + idle == round(simulation.makespan * 1e9)
        assert busy == pytest.approx((simulation.compute + simulation.communicate)[device] * 1e9, abs=len(spans) + 1)


def test_every_event_has_what_its_phase_needs(simulation: Simulation) -> None:
    found = trace(simulation)
    assert json.loads(json.dumps(found)) == found
    for event in found["traceEvents"]:
        assert event["ph"] in "XCM"
        assert isinstance(event["name"], str)
        assert event["pid"] > 0
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["tid"] > 0
            assert event["cat"] in {"compute", "communication"}


def test_each_track_is_named_once_and_has_a_number_of_its_own(simulation: Simulation) -> None:
    events = trace(simulation)["traceEvents"]
    named = [e["tid"] for e in events if e["name"] == "thread_name"]
    assert len(named) == len(set(named))
    assert {e["tid"] for e in events if e["ph"] == "X"} == set(named)
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len(processes) == len(set(processes)) == len(simulation.members)


def test_counters_follow_the_memory_curve(simulation: Simulation) -> None:
    for c, members in enumerate(simulation.members):
        curve = simulation.memory_curve(int(members[0]))
        counters = [e for e in trace(simulation)["traceEvents"] if e["ph"] == "C" and e["pid"] == c + 1]
        assert len(counters) == len(curve)
        for counter, (time, split) in zip(counters, curve, strict=True):
            assert nanoseconds(counter["ts"]) == round(time * 1e9)
            assert counter["args"] == {**dict(zip(CATEGORIES[:-1], split, strict=False)), "all": sum(split)}


def test_a_stream_is_a_track_beside_the_ops_in_order() -> None:
    found = trace(streams())
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["ops in order", "stream comm"]
    spans = {names[tid]: spans for (_, tid), spans in tracks(found).items()}
    # The product starts while the reduction is under way.
    assert spans["ops in order"][0][0] < spans["stream comm"][0][1]


def test_a_place_that_cannot_be_written_is_an_error(simulation: Simulation, tmp_path: Path) -> None:
    with pytest.raises(DistIRError, match="cannot be written"):
        write_trace(simulation, tmp_path / "none" / "trace.json")
