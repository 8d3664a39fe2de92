"""The command line, as a user meets it: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# The hand-written bundles and the launching helpers are the runtime tests'.
sys.path.insert(0, str(Path(__file__).parent / "runtime"))

from handmade import RAISES_ON_1, example_input, expected_outputs, mlp_bundle

from distir_relax.bundle import read_bundle, write_bundle
from distir_relax.cli import run_command_line
from tests.runtime.processes import python, start

pytestmark = pytest.mark.timeout(120)
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a bundle for 3 ranks and its input."""
    write_bundle(mlp_bundle([3, 0, 2]), tmp_path / "m.dist")
    np.savez(tmp_path / "x.npz", x=example_input())
    return tmp_path


def distir(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python("-m", "distir_relax", *arguments)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command line in this process, which has imported what the compiler needs, and is afterwards as it was."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = ["distir", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_command_line()
        code = ended.value.code
        return subprocess.CompletedProcess(words, code if isinstance(code, int) else 0, *capfd.readouterr())

    yield run
    for number, handler in signals.items():
        signal.signal(number, handler)


ENDING = """
import atexit, sys, threading, time
from distir_relax.cli.process_exit import exit_without_teardown

class Last:
    def __del__(self):
        print("torn down")

def late():
    time.sleep(0.1)
    print("thread")

with exit_without_teardown():
    last = Last()
    atexit.register(print, "handler")
    threading.Thread(target=late).start()
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [
        ("pass", 0, ["thread", "handler"]),
        ("sys.exit()", 0, ["thread", "handler"]),
        ("sys.exit(7)", 7, ["thread", "handler"]),
        ("sys.exit('odd')", 1, ["thread", "handler", "torn down"]),
        ("raise ValueError('odd')", 1, ["thread", "handler", "torn down"]),
    ],
)
def test_the_process_ends_without_teardown(tmp_path: Path, end: str, code: int, printed: list[str]) -> None:
    """But after its threads and exit handlers."""
    program = tmp_path / "ending.py"
    program.write_text(ENDING.format(end=end))
    done = python(program, fresh=True)
    assert (done.returncode, done.stdout.split("\n")) == (code, [*printed, ""])
    assert ("odd" in done.stderr) == ("odd" in end)


def fails(message: str, *arguments: object, command: Command = distir) -> str:
    """The command exits with 2 and one message; what it said."""
    done = command(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert message in done.stderr, done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback (most recent call last)" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def check_answer(file: Path) -> None:
    found = np.load(file)
    for name, value in expected_outputs(mlp_bundle([3, 0, 2]), example_input()).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)


def test_run_with_threads(folder: Path) -> None:
    done = distir(
        "run", folder / "m.dist", "-i", folder / "x.npz", "-o", folder / "y.npz", "--report", folder / "r.json",
        "--repeat", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_answer(folder / "y.npz")
    assert "mlp: 3 ranks (threads), torch," in done.stdout
    report = json.loads((folder / "r.json").read_text())
    assert [rank["weight_bytes"] for rank in report["ranks"]] == [132, 0, 88]


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_launch(folder: Path) -> None:
    done = distir("launch", "-n", 3, folder / "m.dist", "-i", folder / "x.npz", "-o", folder / "y.npz")
    assert done.returncode == 0, done.stderr
    check_answer(folder / "y.npz")
    assert "mpirun" in done.stderr.splitlines()[0], "the command is printed"
    assert "-n 3" in done.stderr.splitlines()[0]
    assert "3 ranks (mpi)" in done.stdout


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_launch_passes_the_exit_code_on(folder: Path) -> None:
    write_bundle(mlp_bundle([3, 2], RAISES_ON_1), folder / "bad.dist")
    done = distir("launch", folder / "bad.dist", "-i", folder / "x.npz", "-o", folder / "y.npz", "--trust-code")
    assert done.returncode == 1
    assert "ValueError: a kernel failed" in done.stderr
    assert not (folder / "y.npz").exists()


def test_launch_with_the_wrong_number_of_ranks(folder: Path) -> None:
    fails("expected 3 ranks for the mesh (tp=3), found 2", "launch", "-n", 2, folder / "m.dist")


def test_show(folder: Path) -> None:
    done = distir("show", folder / "m.dist")
    assert (done.returncode, done.stdout) == (0, "%z = all_reduce(%y)\n")
    fails("the bundle holds no sharded.txt", "show", folder / "m.dist", "--stage", "sharded")


def test_show_on_a_terminal_is_coloured_and_says_the_same(folder: Path) -> None:
    program = folder / "terminal.py"
    program.write_text(
        f"import pty, sys\npty.spawn([sys.executable, '-m', 'distir_relax', 'show', {str(folder / 'm.dist')!r}])\n"
    )
    done = start([sys.executable, str(program)], TERM="xterm-256color", NO_COLOR="")
    assert "\x1b[" in done.stdout
    assert re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace("\r", "") == "%z = all_reduce(%y)\n"


def test_errors_of_run(folder: Path) -> None:
    bundle, x, y = folder / "m.dist", folder / "x.npz", folder / "y.npz"
    fails("there is no such bundle", "run", folder / "none.dist")
    fails("input 'x': the input is missing", "run", bundle, "-o", y)
    fails("there is no such input file", "run", bundle, "-i", folder / "none.npz", "-o", y)
    fails("not an .npz file", "run", bundle, "-i", bundle / "manifest.json", "-o", y)
    fails("no such folder to write in", "run", bundle, "-i", x, "-o", folder / "none" / "y.npz")
    np.savez(folder / "wrong.npz", x=np.zeros((6, 4), "float32"))
    fails("expected float32 (4, 6), found float32 (6, 4)", "run", bundle, "-i", folder / "wrong.npz", "-o", y)
    assert not y.exists()
    assert not any(item.name.startswith(".") for item in folder.iterdir()), "temporary files remain"


def test_usage_errors() -> None:
    assert distir("run").returncode == 2
    assert distir("run", "a.dist", "--backend", "jax").returncode == 2
    assert distir("nonsense").returncode == 2
    assert distir("run", "--help").returncode == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("model.py", "expected FILE.py:FUNCTION"),
        ("none.py:build", "none.py: there is no such file"),
        ("model.py:biuld", "the function 'biuld' does not exist\n  hint: the file has: build"),
        ("model.py:number", "the function 'number' is not a function"),
        ("broken.py:build", "broken.py:2: not a Python program"),
        ("raising.py:build", "raising.py:2: raised ZeroDivisionError when it was called: division by zero"),
        ("importing.py:build", "importing.py:1: raised ModuleNotFoundError when it was imported"),
        ("model.py:needs", "the function needs width"),
        ("model.py:text", "expected a Plan, a program, or a tuple (model, example_inputs), found str"),
    ],
)
def test_compile_targets_that_are_none(tmp_path: Path, target: str, message: str, command: Command) -> None:
    (tmp_path / "model.py").write_text(
        "number = 3\ndef build(): ...\ndef needs(width): ...\ndef text():\n    return 'model'\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\ndef build(:\n")
    (tmp_path / "raising.py").write_text("def build():\n    return helper() / 0\ndef helper():\n    return 1\n")
    (tmp_path / "importing.py").write_text("import no_such_module_here\n")
    said = fails(message, "compile", tmp_path / target, "-o", tmp_path / "out.dist", command=command)
    assert "site-packages" not in said
    assert "compile_target.py" not in said, "frames of ours are shown"
    assert not (tmp_path / "out.dist").exists()


MODEL = """
from collections import OrderedDict

import torch


def build(width=7):
    torch.manual_seed(0)
    layers = {"up": torch.nn.Linear(6, width), "relu": torch.nn.ReLU(), "down": torch.nn.Linear(width, 5)}
    return torch.nn.Sequential(OrderedDict(layers)), (torch.zeros(4, 6),)
"""


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    done = distir(
        "compile", tmp_path / "model.py:build", "-o", tmp_path / "m.dist", "--backend", "torch", "--mesh", "3"
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "every rank will compute everything" in line]
    assert line.startswith("warning: nothing is sharded over device_mesh((3,),")
    assert ".py:" not in line


def test_compile_then_run(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    np.savez(tmp_path / "x.npz", **{"input": example_input()})
    bundle = tmp_path / "m.dist"
    done = distir(
        "compile", tmp_path / "model.py:build", "-o", bundle, "--backend", "torch", "--mesh", "3", "--tail", "pad",
        "--shard", "up.weight=S[0]", "--name", "small",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"wrote {bundle} in " in done.stdout
    manifest = read_bundle(bundle).manifest
    assert (manifest.name, manifest.tail, manifest.mesh.shape) == ("small", "pad", (3,))
    assert "S[0" in next(weight for weight in manifest.weights if weight.name == "up.weight").placement
    for stage in ("sharded", "distributed", "ranked"):
        shown = distir("show", bundle, "--stage", stage).stdout
        *origin, made_by = shown.removesuffix(read_bundle(bundle).stage(stage)).splitlines()
        assert origin == ["# model    torch.nn.modules.container.Sequential"]
        assert re.fullmatch(r"# made by  distir-relax \S+, python \S+, numpy \S+, torch \S+", made_by)
    done = distir("run", bundle, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert done.returncode == 0, done.stderr
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    expected = scope["build"]()[0](torch.from_numpy(example_input())).detach().numpy()
    (found,) = np.load(tmp_path / "y.npz").values()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--shard", "weight"), "expected PATTERN=PLACEMENT"),
        (("--ranks", "3"), "has no parameter ranks"),
        (("--mesh", "2y3"), "expected sizes such as 2 or 2x3, found '2y3'"),
        (("--mesh", "2x3", "--axes", "tp"), "expected 2 distinct names, found 'tp'"),
        (("--mesh", "2", "--shard", "up.wait=S[0]"), "matches no"),
        (("--mesh", "2", "--shard", "up.weight=S[7]"), "S[7]"),
    ],
)
def test_compile_options_that_do_not_fit(
    tmp_path: Path, option: tuple[str, ...], message: str, command: Command
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    fails(message, "compile", tmp_path / "model.py:build", "-o", tmp_path / "out.dist", *option, command=command)


def test_doctor() -> None:
    done = distir("doctor")
    assert done.returncode == 0, done.stdout
    lines = {line[5:27].strip(): line[:4].strip() for line in done.stdout.splitlines() if not line.startswith(" ")}
    assert lines["Python"] == "ok"
    assert lines["all-reduce on 2 ranks"] == "ok"
    assert lines["packages"] == "ok"
