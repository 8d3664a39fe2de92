"""Files of compiled code: who may have written them, how many stay, and which process compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from distir_relax.kernels import compiled_files
from distir_relax.kernels.compiled_files import (
    compiled_folder,
    compiled_key,
    is_usable,
    one_compiles,
    write_compiled,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = compiled_folder()
    assert found == tmp_path / "distir-relax" / "kernels"
    return found


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_none(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert compiled_folder() is None


def test_a_folder_or_file_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "a"
    write_compiled(b"code", file)
    assert is_usable(file)
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert not is_usable(file)
    assert compiled_folder() is None


def test_files_that_others_can_write_to_and_links_are_not_used(folder: Path) -> None:
    file, link = folder / "a", folder / "b"
    write_compiled(b"code", file)
    link.symlink_to(file)
    assert not is_usable(link)
    file.chmod(0o620)
    assert not is_usable(file)
    assert not is_usable(folder / "c")


def test_the_key_depends_on_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {compiled_key(*parts) for parts in (("ab", "c"), ("a", "bc"), ("ab", "c", 1), ("ab", "c", 2))}
    monkeypatch.setattr(compiled_files, "version", lambda name: "0")
    keys.add(compiled_key("ab", "c"))
    monkeypatch.setattr(compiled_files, "processor_field", lambda name: "another")
    keys.add(compiled_key("ab", "c"))
    assert len(keys) == 6
    assert compiled_key("ab", "c") in keys


def test_the_least_recently_used_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_files, "MOST_BYTES", 250)
    for number, name in enumerate("abc"):
        write_compiled(bytes(100), folder / name)
        # Minutes apart; `c` is the third that is more than 250 bytes.
        os.utime(folder / name, (time.time() - 600 + 60 * number,) * 2)
    assert sorted(file.name for file in folder.iterdir()) == ["b", "c"]
    assert is_usable(folder / "b")
    write_compiled(bytes(100), folder / "d")
    assert sorted(file.name for file in folder.iterdir()) == ["b", "d"]


def test_a_file_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    (folder / "a").mkdir()
    write_compiled(b"code", folder / "a")
    assert [file.name for file in folder.iterdir()] == ["a"]


HOLD = """
import sys
from pathlib import Path
from distir_relax.kernels.compiled_files import one_compiles
with one_compiles(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def another_compiles(file: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def seconds_of_waiting(file: Path, timeout: float) -> float:
    start = time.monotonic()
    with one_compiles(file, timeout):
        return time.monotonic() - start


def test_one_process_compiles_a_file_and_others_wait(folder: Path) -> None:
    with another_compiles(folder / "a") as process:
        assert seconds_of_waiting(folder / "a", 0.3) >= 0.3
        assert seconds_of_waiting(folder / "b", 30) < 10
        # The lock of a process that has ended is free.
        process.kill()
        process.wait()
        assert seconds_of_waiting(folder / "a", 30) < 10


def test_nobody_waits_where_there_are_no_locks(tmp_path: Path) -> None:
    assert seconds_of_waiting(tmp_path / "none" / "a", 30) < 10


def test_without_tvm_there_is_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    with_tvm = compiled_key(1)
    monkeypatch.setattr(compiled_files, "version", missing)
    assert compiled_key(1) not in (with_tvm, compiled_key(2))
