"""Reports of a critical path: groups of repeated steps, totals, and the commands that print them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distir_relax.cli import app
from distir_relax.ir import Op
from distir_relax.report.critical_path import Group, by_line, by_op, critical_path_json, critical_path_text, group_steps
from distir_relax.simulation.critical_path import HOST, CriticalPath, PathStep, critical_path
from distir_relax.simulation.op_timer import COMMUNICATION, COMPUTE
from distir_relax.simulation.simulator import simulate_module
from tests.report.simulations import training, with_locations

PIPELINE = Path(__file__).parents[2] / "examples" / "paper" / "pipeline.distir"


def path_of(text: str) -> CriticalPath:
    """A path with an op for each letter, of distinct durations."""
    steps, start = [], 0
    for number, letter in enumerate(text):
        kind = COMMUNICATION if letter == "s" else COMPUTE
        op = Op(letter, (), (), {}, f"m.py:{ord(letter) - ord('a')}")
        steps.append(PathStep(op, (), 0, (0,), 0, kind, start, number + 1))
        start += number + 1
    return CriticalPath(tuple(steps))


def shape(groups: tuple[Group, ...] | list[Group]) -> str:
    """Groups as text: ``3(ab)`` for three times a, b."""
    texts = []
    for group in groups:
        inside = f"({shape(group.body)})" if group.body else group.step.name if group.step else ""
        texts.append(f"{group.times if group.times > 1 else ''}{inside}")
    return "".join(texts)


def written_out(groups: tuple[Group, ...] | list[Group]) -> str:
    parts = []
    for group in groups:
        assert (group.step is None) == bool(group.body)
        parts.append(group.times * (written_out(group.body) if group.body else group.step.name if group.step else ""))
    return "".join(parts)


@pytest.mark.parametrize(
    ("text", "grouped"),
    [
        ("", ""),
        ("abc", "abc"),
        ("aaab", "3ab"),
        ("abababc", "3(ab)c"),
        ("xaabaabaaby", "x3(2ab)y"),
        ("xababsababsz", "x2(2(ab)s)z"),
        ("abcabcab", "2(abc)ab"),
        ("aabb" * 3, "3(2a2b)"),
    ],
)
def test_repeated_steps_are_groups(text: str, grouped: str) -> None:
    assert shape(group_steps(path_of(text))) == grouped


@pytest.mark.parametrize("seed", range(40))
def test_groups_written_out_are_the_path(seed: int) -> None:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abs", k=draw.randint(1, 5))) for _ in range(3)]
    text = "".join(draw.choice(words) * draw.randint(1, 4) for _ in range(12))
    path = path_of(text)
    groups = group_steps(path)
    assert written_out(groups) == text
    assert sum(group.duration for group in groups) == path.makespan
    assert sum(group.steps for group in groups) == len(text)

    def check(items: tuple[Group, ...] | list[Group]) -> None:
        for group in items:
            if group.body:
                assert sum(item.duration for item in group.body) == group.duration
                assert group.body[0].start == group.start
                check(group.body)

    check(groups)


def test_totals_are_those_of_the_steps() -> None:
    simulation = training("1/1/3/7", 4)
    path = critical_path(simulation)
    for rows, name in ((by_line(path), "location"), (by_op(path), "name")):
        assert sum(row.steps for row in rows) == len(path.steps)
        assert sum(row.share for row in rows) == pytest.approx(1)
        for row in rows:
            host = "host" if name == "name" else "waiting for the host"
            names = [host if step.kind == HOST else getattr(step, name) or "no line" for step in path.steps]
            own = [step for step, of in zip(path.steps, names, strict=True) if of == row.name]
            assert row.seconds == pytest.approx(sum(step.duration for step in own) * 1e-15)
            assert row.steps == len(own)
    assert [row.seconds for row in by_op(path)] == sorted((row.seconds for row in by_op(path)), reverse=True)


def test_what_the_text_leaves_out_is_counted() -> None:
    simulation = training("1/1/3/7", 4)
    path = critical_path(simulation)
    whole, short = (critical_path_text(simulation, path, rows) for rows in (10_000, 3))
    assert "shorter step" not in whole
    assert whole.startswith(f"critical path: {simulation.makespan * 1e3:.4g} ms, {len(path.steps)} steps: compute")
    table = short.split("\n\n")[-1].splitlines()[1:]
    left_out = [line for line in table if "shorter step" in line]
    assert left_out
    assert len(table) <= 3 + 4
    assert critical_path_text(simulation, CriticalPath(())) == "critical path: nothing takes time"


def command(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["simulate", str(PIPELINE), "--profile", "dgx2-v100", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.output) if "--json" in arguments else done.output


def test_the_command_prints_the_path() -> None:
    text = command("--critical-path")
    plain = command("--critical-path", "--json")
    found = plain["critical_path"]
    assert found["makespan_s"] == pytest.approx(plain["makespan_s"], rel=1e-12)
    assert sum(step["duration_s"] for step in found["steps"]) == pytest.approx(plain["makespan_s"])
    kinds = ("compute", "communication", "host")
    assert sum(found[f"{kind}_s"] for kind in kinds) == pytest.approx(plain["makespan_s"])
    assert {step["kind"] for step in found["steps"]} == set(kinds)
    assert any(step["calls"] == ["@dense_grad"] for step in found["steps"])
    first = found["by_line"][0]
    assert f"{first['line']}  {first['share']:.1%}" in text
    assert f"{len(found['steps'])} steps" in text


def test_json_of_groups_has_the_steps_of_the_path() -> None:
    simulation = training("1/1/3/7", 4)
    path = critical_path(simulation)
    found = critical_path_json(simulation, path)

    def count(groups: list[dict[str, Any]]) -> int:
        return sum(group["times"] * (count(group["body"]) if "body" in group else 1) for group in groups)

    assert count(found["groups"]) == len(found["steps"]) == len(path.steps)
    assert json.loads(json.dumps(found)) == found


def test_lines_of_a_model_are_named() -> None:
    simulation = training("1/1/2/2", 3)
    moved = with_locations(simulation.module, "model.py:7")
    found = simulate_module(moved, simulation.profile)
    assert [row.name for row in by_line(critical_path(found))] == ["model.py:7", "waiting for the host"]
