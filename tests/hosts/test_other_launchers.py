"""mpirun and torchrun over hosts, by the commands of docs/clusters.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from distir_relax.bundle import write_bundle
from distir_relax.cli import app
from tests.hosts.laboratory import in_namespaces, why_not
from tests.hosts.other_launchers import commands
from tests.runtime.handmade import example_input, mlp_bundle

pytestmark = [pytest.mark.mpirun, pytest.mark.timeout(150)]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    if reason := why_not():
        pytest.skip(reason)
    write_bundle(mlp_bundle([3, 1, 2]), tmp_path / "mlp.dist")
    np.savez(tmp_path / "x.npz", x=example_input())
    return tmp_path


def run(launcher: str, files: Path, *kill: str) -> dict[str, Any]:
    done = in_namespaces("tests.hosts.other_launchers", launcher, str(files), *kill)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ranks of b"] == 1
    ends: dict[str, Any] = found["ends"]
    return ends


CODES = {
    ("mpirun", "rank"): {"a": 137},
    ("mpirun", "host"): {"a": 0},
    ("torchrun", "rank"): {"a": 1, "b": 1},
    ("torchrun", "host"): {"a": 1, "b": -9},
}
"""The exit codes of launchers on hosts a and b after a rank on b, or all of b, was killed."""


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_commands_of_the_page_have_the_outputs_of_one_process(launcher: str, files: Path) -> None:
    ends = run(launcher, files)
    assert [end["code"] for end in ends.values()] == [0] * len(commands(launcher)), ends
    arguments = ["run", files / "mlp.dist", "--input", files / "x.npz", "--output", files / "one.npz"]
    assert CliRunner().invoke(app, list(map(str, arguments))).exit_code == 0
    with np.load(files / "y.npz") as found, np.load(files / "one.npz") as expected:
        assert set(found) == set(expected) == {"z", "h"}
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize(("launcher", "kill"), list(CODES))
def test_exit_codes_are_those_of_the_page(launcher: str, kill: str, files: Path) -> None:
    ends = run(launcher, files, kill)
    assert {host: end["code"] for host, end in ends.items()} == CODES[launcher, kill], ends
