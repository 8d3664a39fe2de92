"""The tasks of a pipeline: as text, in a picture, and in what a run reports."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.bundle import BundleFile, read_bundle
from distir_relax.ir import parse, print_module
from distir_relax.report.page import page
from distir_relax.report.pipeline_tasks import chart, predicted_rows, program_order, schedule_text, write_chart
from distir_relax.runtime.execute import RunOptions, run
from distir_relax.schedules import check, order_of
from distir_relax.simulation.pipeline_tasks import task_times
from tests.machines import machine


@pytest.fixture(scope="module")
def step() -> dr.TrainingStep:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    batch = torch.randn(7, 5), torch.randn(7, 5)
    how = {"strategy": "1/1/3/4,schedule=zb-h1", "stages": ["2", "4"]}
    return dr.compile_training(
        model, nn.functional.mse_loss, optimizer=dr.optim.SGD(lr=0.1), example_batch=batch, **how
    )


def test_a_program_has_the_order_of_its_schedule(step: dr.TrainingStep) -> None:
    module = step.plan.modules["distributed"]
    order = program_order(module)
    assert order is not None
    assert order == order_of("zb-h1", 3, 4)
    check(order)
    text = schedule_text(module)
    assert "rank 1     1F0 1F1" in text
    # It stands before the program's text, which is read as before.
    assert parse(text + print_module(module)) == module


def test_a_program_without_tasks_has_no_schedule() -> None:
    plan = dr.compile(nn.Linear(3, 3), (torch.ones(2, 3),), mesh=1)
    assert program_order(plan.modules["distributed"]) is None
    assert schedule_text(plan.modules["distributed"]) == ""


def test_every_task_is_drawn_once(step: dr.TrainingStep) -> None:
    simulation = dr.simulate(step.plan, profile=machine(3, overhead=1e-3))
    names = {task.name for task in task_times(simulation)}
    assert len(names) == 3 * 3 * 4
    rows = predicted_rows(simulation)
    assert [row.name for row in rows] == ["rank 0", "rank 1", "rank 2"]
    drawn = re.findall(r"<title>(\w+):", chart(rows))
    assert sorted(drawn) == sorted(names)
    assert "Schedule" in page(simulation, "a pipeline")


def test_a_run_reports_when_its_tasks_began_and_ended(step: dr.TrainingStep, tmp_path: Path) -> None:
    step.save(tmp_path / "m.dist", ("torch",))
    names = [d.name for d in read_bundle(tmp_path / "m.dist").manifest.divided_inputs]
    given = {name: np.ones((7, 5), np.float32) for name in names}
    np.savez(tmp_path / "x.npz", learning_rate=np.float64(0.1), **given)
    report = run(RunOptions(BundleFile(tmp_path / "m.dist"), tmp_path / "x.npz"))
    assert report is not None
    order = order_of("zb-h1", 3, 4)
    assert [[name for name, _, _ in row] for row in report.tasks] == [[str(t) for t in row] for row in order.tasks]
    for row in report.tasks:
        times = [time for _, begin, end in row for time in (begin, end)]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= report.step_seconds
    rows = predicted_rows(dr.simulate(step.plan, profile=machine(3, overhead=1e-3)))
    write_chart(rows[:1], list(rows), tmp_path / "t.svg")
    text = (tmp_path / "t.svg").read_text()
    assert text.count("rank 0, predicted") == 1
    assert "rank 2, predicted" not in text
