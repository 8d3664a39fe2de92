"""Finding mpirun, and the command it is given."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from handmade import example_input, expected_outputs, mlp_bundle

from distir_relax.bundle import write_bundle
from distir_relax.errors import RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime import launch
from distir_relax.runtime.hosts import interface_to, read_hosts
from distir_relax.runtime.launch import Launcher, find_mpirun, launch_environment, mpirun_command
from distir_relax.runtime.transports import torch_distributed
from distir_relax.runtime.world import check_size
from tests.runtime.processes import interpreter, start


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


@pytest.mark.mpirun
def test_files_of_an_mpirun_that_was_killed_do_not_matter(tmp_path: Path) -> None:
    """Open MPI names the folder of its files after its process, whose number a killed one may have had."""
    command = mpirun_command(find_mpirun(), 1, ["true"], "1")
    script = tmp_path / "again.sh"
    script.write_text(
        f'mkdir -p "{tmp_path}/ompi.$$"\ntouch "{tmp_path}/ompi.$$/pmix.vm.tool"\nexec {shlex.join(command)}\n'
    )
    codes = []
    for folder in (tmp_path, tmp_path / "of this launch"):
        environment = {**launch_environment("1", str(folder)), "TMPDIR": str(tmp_path)}
        codes.append(subprocess.run(["sh", script], env=environment, capture_output=True, timeout=60).returncode)
    assert codes[0] != 0
    assert codes[1] == 0


def test_flags_of_mpich() -> None:
    command = mpirun_command(Launcher("mpirun", "MPICH", "4"), 3, ["a"], "2")
    assert command == ["mpirun", "-bind-to", "none", "-genv", "OMP_NUM_THREADS", "2", "-n", "3", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:2,b:2", "expected hosts with 3 ranks together, found 4"),
        ("a:2,a:1", "'a' is listed twice"),
        ("a:0,b:3", "expected HOST or HOST:RANKS, found 'a:0'"),
        ("a:many", "expected HOST or HOST:RANKS"),
        ("", "expected HOST or HOST:RANKS"),
        ("-oProxyCommand=x:3", "expected HOST or HOST:RANKS"),
        ("a b:3", "expected HOST or HOST:RANKS"),
    ],
)
def test_hosts_that_are_none(text: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        read_hosts(text, 3)


@pytest.mark.mpirun
def test_a_file_in_the_folder_of_a_launch_is_no_standard_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks do not import from the folder that they are started in."""
    write_bundle(mlp_bundle([3, 2]), tmp_path / "m.dist")
    np.savez(tmp_path / "x.npz", x=example_input())
    (tmp_path / "json.py").write_text("raise SystemExit('json.py of the folder was imported')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = start([*interpreter(fresh=True), "-P", "-m", "distir_relax", "launch", "m.dist", "-i", "x.npz"])
    assert done.returncode == 0, done.stderr
    assert "mlp: 2 ranks (mpi)" in done.stdout


@pytest.mark.mpirun
def test_agents_on_two_hosts(tmp_path: Path) -> None:
    """Addresses of the loopback are hosts; the remote shell takes the address and the command."""
    write_bundle(mlp_bundle([3, 0, 2]), tmp_path / "m.dist")
    np.savez(tmp_path / "x.npz", x=example_input())
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\necho "to $1" >&2\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    done = start([
        *interpreter(), "-m", "distir_relax", "launch", str(tmp_path / "m.dist"), "-i", str(tmp_path / "x.npz"),
        "-o", str(tmp_path / "y.npz"), "--host", "127.0.0.2:2,127.0.0.3:1", "--rsh", str(shell),
    ])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "to 127.0.0.2" in done.stderr
    assert "to 127.0.0.3" in done.stderr
    assert "mlp: 3 ranks (torch)" in done.stdout
    expected = expected_outputs(mlp_bundle([3, 0, 2]), example_input())["z"]
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["z"], expected, rtol=1e-5, atol=1e-5)


def test_gloo_uses_the_interface_that_routes_to_the_master(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    assert interface_to("127.0.0.1") == ("lo", "127.0.0.1")
    assert interface_to("no.such.host.invalid") is None

    def chosen(master: str, local: int, found: tuple[str, str] | None, given: str = "") -> str:
        for name, value in {"MASTER_ADDR": master, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": str(local)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
        if not given:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        monkeypatch.setattr(torch_distributed, "interface_to", lambda host: found)
        torch_distributed.choose_interface()
        return os.environ.get("GLOO_SOCKET_IFNAME", "")

    assert chosen("10.0.0.1", 2, ("ib0", "10.0.0.2")) == "ib0"
    assert chosen("10.0.0.1", 2, ("ib0", "10.0.0.2"), given="eth7") == "eth7"
    assert chosen("10.0.0.1", 3, ("ib0", "10.0.0.2")) == ""
    assert chosen("10.0.0.1", 2, None) == ""
    assert chosen("127.0.0.1", 2, ("lo", "127.0.0.1")) == "lo"
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"node0 is 127\.0\.1\.1 on this host, where ranks of other"):
        assert chosen("node0", 2, ("lo", "127.0.1.1")) == ""


def test_the_number_of_ranks() -> None:
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    check_size(mesh, 6)
    with pytest.raises(RunError, match=r"expected 6 ranks for the mesh \(dp=2, tp=3\), found 4\n  hint: start 6"):
        check_size(mesh, 4)
