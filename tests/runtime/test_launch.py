"""Finding mpirun, and the command it is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distir_relax.errors import RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime import launch
from distir_relax.runtime.launch import Launcher, find_mpirun, mpirun_command
from distir_relax.runtime.world import check_size


def fake(folder: Path, answer: str) -> None:
    folder.mkdir(parents=True)
    file = folder / "mpirun"
    file.write_text(f"#!/bin/sh\necho '{answer}'\n")
    file.chmod(0o755)


def test_the_mpirun_beside_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "env" / "bin", "mpirun (Open MPI) 5.0.11")
    fake(tmp_path / "path", "HYDRA build details:\n    Version: 4.3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/bin:/usr/bin")
    monkeypatch.setattr(launch.sys, "prefix", str(tmp_path / "env"))
    assert find_mpirun() == Launcher(str(tmp_path / "env/bin/mpirun"), "Open MPI", "mpirun (Open MPI) 5.0.11")
    monkeypatch.setattr(launch.sys, "prefix", str(tmp_path))
    found = find_mpirun()
    assert (found.path, found.family) == (str(tmp_path / "path/mpirun"), "MPICH")


def test_no_mpirun_or_a_strange_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="no mpirun here"):
        find_mpirun()
    fake(tmp_path / "bin", "a play about launching")
    with pytest.raises(RunError, match="neither Open MPI nor MPICH"):
        find_mpirun()


def test_flags_of_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    launcher = Launcher("/opt/mpirun", "Open MPI", "5")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert mpirun_command(launcher, 2, ["a", "b"], "1") == [
        "/opt/mpirun", "--bind-to", "none", "-x", "OMP_NUM_THREADS", "-n", "2", "a", "b",
    ]  # fmt: skip
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    command = mpirun_command(launcher, 3, ["a"], "1")
    assert "--allow-run-as-root" in command
    assert "--oversubscribe" in command


def test_flags_of_mpich() -> None:
    command = mpirun_command(Launcher("mpirun", "MPICH", "4"), 3, ["a"], "2")
    assert command == ["mpirun", "-bind-to", "none", "-genv", "OMP_NUM_THREADS", "2", "-n", "3", "a"]


def test_the_number_of_ranks() -> None:
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    check_size(mesh, 6)
    with pytest.raises(RunError, match=r"expected 6 ranks for the mesh \(dp=2, tp=3\), found 4\n  hint: start 6"):
        check_size(mesh, 4)
