"""The README's code is run, and what it prints is what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
_BLOCK = re.compile(
    r"(?:<!-- output: (?P<label>[^\n]+?) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


def blocks(kind: str) -> list[tuple[str, str]]:
    """The blocks of a kind as (label, text)."""
    return [(m["label"] or "", m["text"]) for m in _BLOCK.finditer(README) if m["kind"] == kind]


def programs() -> dict[str, tuple[str, str]]:
    """Each Python block by the file name in its first line: its text, and the output shown after it."""
    found: dict[str, tuple[str, str]] = {}
    for match in _BLOCK.finditer(README):
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


def shell_lines() -> list[str]:
    """The `distir`, `mpirun` and `torchrun` commands shown, without their remarks."""
    lines = [line.split("  #")[0].strip() for _, text in blocks("sh") for line in text.splitlines()]
    return [line for line in lines if line.split()[0] in ("distir", "mpirun", "torchrun")]


def call(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.parametrize("name", programs())
def test_a_program_prints_what_is_shown(name: str, tmp_path: Path) -> None:
    text, shown = programs()[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = call([sys.executable, name], tmp_path)
    assert done.returncode == 0, done.stderr
    assert shown, f"the README shows no output of {name}"
    assert done.stdout == shown


@pytest.mark.mpirun
def test_the_commands_of_the_shell(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(programs()["model.py"][0], encoding="utf-8")
    for folder in ("benchmarks", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    assert call([sys.executable, "model.py"], tmp_path).returncode == 0
    lines = shell_lines()
    assert {line.split()[1] for line in lines if line.startswith("distir")} == {
        "compile", "show", "run", "launch", "explain", "diff", "rules", "doctor", "simulate",
    }  # fmt: skip
    for line in lines:
        (tmp_path / "y.npz").unlink(missing_ok=True)
        done = call(line.split(), tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert (tmp_path / "y.npz").exists() == ("--output" in line), line
    for written in ("report.json", "trace.json", "report.html"):
        assert (tmp_path / written).exists()
    commands = [(label, text) for label, text in blocks("text") if label.startswith("distir ")]
    assert len(commands) == 2
    for command, shown in commands:
        done = call(command.split(), tmp_path)
        assert (done.returncode, done.stderr if shown.startswith("error") else done.stdout) == (
            2 if shown.startswith("error") else 0, shown,
        )  # fmt: skip


def test_a_model_sharded_from_the_shell(tmp_path: Path) -> None:
    match = re.search(r"`(distir compile model\.py:parts [^`]*)`", README)
    assert match
    text = programs()["outside.py"][0].split("mesh =")[0]
    (tmp_path / "model.py").write_text(
        text + "def parts():\n    return model, (torch.randn(4, 8),)\n", encoding="utf-8"
    )
    done = call([word.strip("'") for word in match[1].split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "S[0: 4|3|3]" in (tmp_path / "model.dist" / "sharded.txt").read_text(encoding="utf-8")
