"""`distir simulate` writes the reports that it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distir_relax.cli import app

PIPELINE = Path(__file__).parents[2] / "examples" / "paper" / "pipeline.distir"


def test_trace_page_and_json_tell_of_one_simulation(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "report.html"
    command = [
        "simulate",
        str(PIPELINE),
        "--profile",
        "dgx2-v100",
        "--trace",
        str(trace),
        "--html",
        str(page),
        "--json",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    makespan = json.loads(done.output)["makespan_s"]
    ends = [e["ts"] + e["dur"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert max(ends) == pytest.approx(makespan * 1e6, abs=1e-3)
    text = page.read_text()
    assert f"<dd>{makespan * 1e6:.4g} us</dd>" in text
    assert "pipeline.distir on dgx2-v100</title>" in text
