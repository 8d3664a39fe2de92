"""`scripts/browser.sh`, on machines made of a few stand-ins for commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def machine(folder: Path, user: int, commands: dict[str, str]) -> dict[str, str]:
    """An environment whose commands are a shell, an `id` that gives `user`, and scripts of these texts."""
    shell = shutil.which("sh")
    assert shell
    (folder / "sh").symlink_to(shell)
    for name, text in {"id": f"echo {user}", **commands}.items():
        (folder / name).write_text(f"#!{shell}\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "browser.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)


def test_a_browser_that_is_there_is_left_alone(tmp_path: Path) -> None:
    done = run(machine(tmp_path, 0, {"chromium": "", "chromedriver": "", "apt-get": "echo no; exit 1"}))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_root_installs_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = run(machine(tmp_path, 0, {"apt-get": f'echo "$@" >> {log}'}))
    assert done.returncode == 0, done.stderr
    updated, installed = log.read_text(encoding="utf-8").splitlines()
    assert updated.split()[0] == "update"
    assert installed.split()[0] == "install"
    assert installed.split()[-2:] == ["chromium", "chromium-driver"]


@pytest.mark.parametrize("user", [0, 1000])
def test_others_are_told_in_one_line(tmp_path: Path, user: int) -> None:
    """A user who may not install, and root on a machine where apt fails."""
    done = run(machine(tmp_path, user, {"apt-get": "exit 100"}))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "apt-get install chromium chromium-driver" in line


def test_it_comes_before_the_tests() -> None:
    # Not as a part of the make that may run the tests.
    plain = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "-n", "test"]
    shown = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=20, check=True)
    lines = shown.stdout.splitlines()
    assert lines[0] == "scripts/browser.sh"
    assert any("pytest" in line for line in lines[1:])
