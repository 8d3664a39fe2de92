"""Run the programs and commands of the README and of the pages that show some; their outputs are those shown."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.processes import command, interpreter

ROOT = Path(__file__).parent.parent
INSTALLED = Path(sys.executable).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
STARTED = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
TRANSFORMERS = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
_BLOCK = re.compile(
    r"(?:<!-- output: (?P<label>[^\n]+?) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


def blocks(kind: str, page: str = README) -> list[tuple[str, str]]:
    """The blocks of a kind as (label, text)."""
    return [(m["label"] or "", m["text"]) for m in _BLOCK.finditer(page) if m["kind"] == kind]


def programs(page: str = README) -> dict[str, tuple[str, str]]:
    """Each Python block by the file name in its first line: its text, and the output shown after it."""
    found: dict[str, tuple[str, str]] = {}
    for match in _BLOCK.finditer(page):
        if match["kind"] == "python":
            name = match["text"].splitlines()[0].removeprefix("# ")
            assert re.fullmatch(r"\w+\.py", name), (
                f"a Python block of the README begins with '# file.py', found {name!r}"
            )
            found[name] = (match["text"], "")
        elif match["label"] and not match["label"].startswith("distir "):
            assert not found[name][1], f"two outputs for {name}"
            found[name] = (found[name][0], match["text"])
    return found


def shell_lines(page: str = README) -> list[str]:
    """The `distir`, `mpirun` and `torchrun` commands shown, without their remarks."""
    lines = [line.split("  #")[0].strip() for _, text in blocks("sh", page) for line in text.splitlines()]
    return [line for line in lines if line.split()[0] in ("distir", "mpirun", "torchrun")]


def call(arguments: list[str], folder: Path, *commands: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`; those in the folders `commands` come before the installed ones."""
    path = os.pathsep.join(map(str, [*commands, INSTALLED, os.environ["PATH"]]))
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    # A reader's shell says nothing to mpirun.
    environment = {key: value for key, value in environment.items() if not key.startswith(("OMPI_", "PRTE_"))}
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False
    )


PROGRAMS = programs() | programs(STARTED)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_is_shown(name: str, tmp_path: Path) -> None:
    text, shown = PROGRAMS[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = call([*interpreter(fresh=name == "model.py"), name], tmp_path)
    assert done.returncode == 0, done.stderr
    assert shown, f"the README shows no output of {name}"
    assert done.stdout == shown


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_the_commands_of_the_shell(tmp_path: Path) -> None:
    for name in ("model.py", "outside.py", "train.py"):
        (tmp_path / name).write_text(PROGRAMS[name][0], encoding="utf-8")
    for folder in ("benchmarks", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    assert call([*interpreter(), "model.py"], tmp_path).returncode == 0
    quick = command(tmp_path / "quick" / "distir", "-m", "distir_relax").parent
    lines = list(dict.fromkeys(shell_lines() + shell_lines(STARTED)))
    # Of the compiler's commands and of the runtime's, one as it is installed.
    installed = {"compile", "run"}
    assert {line.split()[1] for line in lines if line.startswith("distir")} == {
        "compile", "show", "check", "verify", "run", "launch", "explain", "diff", "rules", "doctor", "simulate",
        "search", "train",
    }  # fmt: skip
    for line in lines:
        (tmp_path / "y.npz").unlink(missing_ok=True)
        words = shlex.split(line)
        is_quick = words[0] != "distir" or words[1] not in installed
        done = call(words, tmp_path, *([quick] if is_quick else []))
        installed -= set() if is_quick else {words[1]}
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert (tmp_path / "y.npz").exists() == ("--output" in line), line
    assert "S[0: 4|3|3]" in (tmp_path / "outside.dist" / "sharded.txt").read_text(encoding="utf-8")
    for written in ("report.json", "trace.json", "report.html"):
        assert (tmp_path / written).exists()
    commands = [
        (label, text) for label, text in blocks("text") + blocks("text", STARTED) if label.startswith("distir ")
    ]
    assert len(commands) == 2
    for text, shown in commands:
        done = call(text.split(), tmp_path, quick)
        assert (done.returncode, done.stderr if shown.startswith("error") else done.stdout) == (
            2 if shown.startswith("error") else 0, shown,
        )  # fmt: skip


def test_a_model_that_writes_and_counts(tmp_path: Path) -> None:
    text, shown = programs(MODELS)["counting.py"]
    (tmp_path / "counting.py").write_text(text, encoding="utf-8")
    done = call([*interpreter(), "counting.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_a_transformers_model(tmp_path: Path) -> None:
    text, shown = programs(TRANSFORMERS)["llama.py"]
    (tmp_path / "llama.py").write_text(text, encoding="utf-8")
    done = call([*interpreter(), "llama.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
    np.savez(tmp_path / "ids.npz", input_ids=np.arange(22).reshape(2, 11))
    quick = command(tmp_path / "quick" / "distir", "-m", "distir_relax").parent
    for line in shell_lines(TRANSFORMERS):
        done = call(shlex.split(line), tmp_path, quick)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert np.load(tmp_path / "logits.npz")["logits"].shape == (2, 11, 97)
