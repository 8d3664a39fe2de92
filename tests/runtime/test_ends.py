"""How launches end: with a rank that was stopped, by a signal, over weights that change under them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from handmade import SUM_COLUMNS, example_input, mlp_bundle
from torch import nn

import distir_relax as dr
from distir_relax.bundle import write_bundle
from distir_relax.runtime.launch import find_mpirun, mpirun_command
from tests.runtime.processes import environment, interpreter, mpirun, start

pytestmark = [pytest.mark.mpirun, pytest.mark.timeout(120)]
# Longer than any test: products, so that the rank computes in C++.
ENDLESS = SUM_COLUMNS.replace(
    "    z =", "    import torch\n    for _ in range(10**6): torch.randn(700, 700) @ torch.randn(700, 700)\n    z ="
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the input `x.npz`."""
    np.savez(tmp_path / "x.npz", x=example_input())
    return tmp_path


def arguments(folder: Path, command: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "distir_relax", command, str(folder / "m.dist"), "--input", str(folder / "x.npz"),
            "--output", str(folder / "y.npz"), *more]  # fmt: skip


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`command`, running; whatever of it is left at the end is killed."""
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            for one in (
                (*psutil.Process(process.pid).children(recursive=True), process) if process.poll() is None else ()
            ):
                one.kill()


def rank_process(launch: subprocess.Popen[str], rank: int) -> psutil.Process:
    for _ in range(1000):
        for child in psutil.Process(launch.pid).children(recursive=True):
            try:
                if child.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
                    return child
            except psutil.Error:
                continue
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} has not started")


# Where a rank is stopped: while it starts, once it has met the others, in its program.
STOPS = {
    "start": "if {}: os.kill(os.getpid(), signal.SIGSTOP)",
    "late": "import time\nif {}: time.sleep(60)",
    "agree": "import distir_relax.runtime.execute as e; f = e._prepare\n"
    "def stop(*a):\n    if {}: os.kill(os.getpid(), signal.SIGSTOP)\n    return f(*a)\ne._prepare = stop",
    "run": "import distir_relax.runtime.session as e; f = e.run_step\n"
    "def stop(*a):\n    if {}: os.kill(os.getpid(), signal.SIGSTOP)\n    return f(*a)\ne.run_step = stop",
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("where", "rank"), [("start", 1), ("late", 0), ("agree", 0), ("run", 2)])
def test_a_stopped_rank_ends_the_launch_and_is_named(files: Path, where: str, rank: int) -> None:
    write_bundle(mlp_bundle([3, 0, 2]), files / "m.dist")
    program = files / "main.py"
    hook = STOPS[where].format(f"os.environ['OMPI_COMM_WORLD_RANK'] == '{rank}'")
    program.write_text(f"import os, signal\n{hook}\nfrom distir_relax.cli import main\nmain()\n")
    begin = time.monotonic()
    done = mpirun(3, program, *arguments(files, "run", "--timeout", "4")[3:], fresh=True)
    assert done.returncode == 75, done.stderr
    assert time.monotonic() - begin < 45
    assert done.stderr.count("error: ") == 1
    if where == "start":
        assert re.search(
            rf"the ranks have not connected within 4 s\n(.*\n)*  rank {rank} is stopped \(process", done.stderr
        )
    elif where == "late":
        late = (
            rf"  rank {rank} has started, but has not reached the rendezvous \(process \d+\)\n  rank 1 waits for the "
        )
        assert re.search(rf"the ranks have not connected within 4 s\n{late}", done.stderr)
    else:
        assert "a rank has waited for more than 4 s" in done.stderr
        assert f"rank {rank} does not answer: it is stopped (process" in done.stderr
        for other in {0, 1, 2} - {rank}:
            assert f"rank {other} waits in " in done.stderr
    assert not (files / "y.npz").exists()


@pytest.mark.sweep
def test_a_stage_that_is_stopped_is_named_with_its_task(files: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    plan = dr.compile(model, (torch.ones(4, 3),), strategy="1/1/3/4", stages=["1", "2"])
    plan.save(files / "m.dist", ("torch",))
    np.savez(files / "x.npz", **{plan.bundle().manifest.divided_inputs[0].name: np.ones((4, 3), np.float32)})
    program = files / "main.py"
    program.write_text(
        "import os, signal\nfrom distir_relax.runtime.point_to_point import Messages\nbegin = Messages.begin\n"
        "def stop(self, *task):\n    begin(self, *task)\n"
        "    if task == (1, 'F', 2): os.kill(os.getpid(), signal.SIGSTOP)\n"
        "Messages.begin = stop\nfrom distir_relax.cli import main\nmain()\n"
    )
    done = mpirun(3, program, *arguments(files, "run", "--timeout", "4")[3:], fresh=True)
    assert done.returncode == 75, done.stderr
    assert "a rank has waited for more than 4 s" in done.stderr
    assert "rank 1 does not answer: it is stopped (process" in done.stderr
    waits = r"rank 2 \(after task 2F1\) waits in step #\d+ .* = finish_recv\(.*\).*, of task 1F2 of rank 1"
    assert re.search(waits, done.stderr)
    assert re.search(r"rank 0 \(after task 0F3\) waits in ", done.stderr)


def test_a_rank_that_is_killed_is_named_with_the_step_that_waits_for_it(files: Path) -> None:
    kill = "    import os, time\n    if comm.rank == 1:\n        time.sleep(0.5)\n        os.kill(os.getpid(), 9)\n"
    write_bundle(mlp_bundle([3, 0, 2], SUM_COLUMNS.replace("    z =", kill + "    z =")), files / "m.dist")
    done = mpirun(3, *arguments(files, "run", "--trust-code")[1:], fresh=True)
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(
        r"^error: rank 1 has ended \(process \d+\): killed, or crashed\n"
        r"  rank 0 waits in step #2 %z = all_reduce\(%y\) \(model.py:8\)\n  hint: the launcher names the signal",
        done.stderr, re.MULTILINE,
    )  # fmt: skip
    assert done.stderr.count("error: ") == 1
    assert not (files / "y.npz").exists()


def test_a_launch_with_a_killed_rank_leaves_a_post_mortem(files: Path) -> None:
    kill = "    import os, time\n    if comm.rank == 1:\n        time.sleep(0.5)\n        os.kill(os.getpid(), 9)\n"
    write_bundle(mlp_bundle([3, 0, 2], SUM_COLUMNS.replace("    z =", kill + "    z =")), files / "m.dist")
    done = start(arguments(files, "launch", "--trust-code"), TMPDIR=str(files))
    assert done.returncode == 75, done.stderr
    (path,) = files.glob("distir-post-mortem-*.json")
    assert f"  missing from step #2 %z = all_reduce(%y) (model.py:8): rank 1\n  post-mortem: {path}\n" in done.stderr
    content = json.loads(path.read_text())
    assert content["failure"] == "the launch has failed; rank 1 left no record"
    waits = [rank.get("collective", {}).get("profiling_name") for rank in content["ranks"]]
    assert waits == ["all_reduce", None, "all_reduce"]
    assert not [*files.glob("distir-launch-*")]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("command", ["run", "launch"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_within_two_seconds(files: Path, command: str, number: signal.Signals) -> None:
    write_bundle(mlp_bundle([3, 0, 2], ENDLESS), files / "m.dist")
    before = sorted(files.rglob("*"))
    with started(arguments(files, command, "--trust-code")) as process:
        if command == "launch":
            rank = rank_process(process, 2)
            while rank.cpu_times().user < 1.5:
                time.sleep(0.05)
        else:
            # The ranks, the main thread and the watchdog's.
            while psutil.Process(process.pid).num_threads() < 5:
                time.sleep(0.05)
            time.sleep(0.3)
        begin = time.monotonic()
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=30)
        taken = time.monotonic() - begin
    assert process.returncode == 128 + number
    assert taken < 2
    assert f"interrupted ({number.name})" in err
    assert "terminate called" not in err
    assert "Traceback" not in err
    assert [p for p in psutil.process_iter(["cmdline"]) if str(files / "m.dist") in (p.info["cmdline"] or [])] == []
    assert sorted(files.rglob("*")) == before


def test_ranks_with_other_weights_or_inputs_do_not_run(files: Path) -> None:
    write_bundle(mlp_bundle([3, 0, 2]), files / "m.dist")
    # The manifest is that of m.dist, the weights are not.
    bundle = mlp_bundle([3, 0, 2])
    write_bundle(bundle, files / "other.dist")
    weights = files / "other.dist" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    np.savez(files / "x2.npz", x=example_input() + 1)
    for second, message in (
        (["other.dist", "x.npz"], "the weights are damaged"),
        (["m.dist", "x2.npz"], "the ranks disagree on the inputs: rank 0 has"),
    ):
        command = mpirun_command(find_mpirun(), 3, [*interpreter(), *arguments(files, "run")[1:]], "1")
        command[command.index("-n") + 1] = "1"
        more = ["-m", "distir_relax", "run", str(files / second[0]), "--input", str(files / second[1])]
        done = start([*command, ":", "-n", "2", *interpreter(), *more])
        assert done.returncode == 2, done.stderr
        assert done.stderr.count(message) == 1
        assert not (files / "y.npz").exists()
