"""Compiled programs of the tvm backend on disk."""

from __future__ import annotations

import ast
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_tvm_backend import tvm_bundle

from distir_relax.bundle import write_bundle
from distir_relax.errors import ParseError
from distir_relax.kernels.isolated_calls import IsolatedCallError
from distir_relax.runtime.execute import run_bundle
from tests.runtime.processes import start

pytest.importorskip("tvm")
from distir_relax.runtime.backends.tvm import compile
from distir_relax.runtime.backends.tvm.compile import ProgramText
from distir_relax.runtime.backends.tvm.compiled_program import Compiled

pytestmark = pytest.mark.timeout(120)
TEXT, OTHER_TEXT = (ProgramText(tvm_bundle([2, 3]).texts["ranked.txt"], f"main_{rank}") for rank in range(2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distir-relax" / "kernels"


@pytest.fixture
def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The programs that are compiled: of this test, whatever another has left in memory."""
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(compile, "_compiled", weakref.WeakValueDictionary())
    original: Callable[..., Compiled] = compile._compile_apart

    def count(*key: object) -> Compiled:
        found.append(key)
        return original(*key)

    monkeypatch.setattr(compile, "_compile_apart", count)
    return found


def test_a_second_load_compiles_nothing(compiled: list[object], folder: Path) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    first, second = (run_bundle(tvm_bundle([2, 3]), {"x": x}, backend="tvm") for _ in range(2))
    assert len(compiled) == len(list(folder.glob("program-*.bin"))) == 2  # those of both ranks
    for name, value in first.items():
        assert torch.equal(second[name], value)


def test_text_and_threads_make_another_program(compiled: list[object]) -> None:
    for _ in range(2):
        compile.compile_program(TEXT)
        compile.compile_program(OTHER_TEXT)
        compile.compile_program(TEXT, threads=2)
        compile.compile_program(replace(TEXT, fast_math=True))
    assert len(compiled) == 4


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:300] + b"x" + b[301:], lambda b: b""])
def test_a_damaged_file_is_written_again(
    compiled: list[object], folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    compile.compile_program(TEXT)
    (file,) = folder.glob("program-*.bin")
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert file.read_bytes() != content
    compile.compile_program(TEXT)
    assert len(compiled) == 2
    assert compile.compile_program(TEXT) == Compiled.from_bytes(file.read_bytes())
    assert len(compiled) == 2


def test_a_file_or_folder_that_others_can_write_to_is_not_used(compiled: list[object], folder: Path) -> None:
    compile.compile_program(TEXT)
    (file,) = folder.glob("program-*.bin")
    file.chmod(0o666)
    compile.compile_program(TEXT)
    assert len(compiled) == 2
    assert file.stat().st_mode & 0o777 == 0o600
    folder.chmod(0o777)
    file.write_bytes(b"from somebody else")
    compile.compile_program(TEXT)
    assert len(compiled) == 3
    assert file.read_bytes() == b"from somebody else"


CHECK = """
import sys
import torch
from distir_relax.bundle import read_bundle
from distir_relax.runtime.execute import run_bundle
found = run_bundle(read_bundle(sys.argv[1]), {"x": torch.arange(24.0).view(4, 6) - 12}, backend="tvm")
print("tvm" in sys.modules, {name: value.tolist() for name, value in found.items()})
"""


def test_another_process_loads_it_without_the_modules_of_tvm(folder: Path, tmp_path: Path) -> None:
    bundle = tvm_bundle([2, 3])
    path = write_bundle(bundle, tmp_path / "m.dist")
    expected = run_bundle(bundle, {"x": torch.arange(24.0).view(4, 6) - 12}, backend="tvm")
    # Native kernels, which this process may have from another folder, are left out: they would be compiled.
    variables = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"], "DISTIR_NATIVE": "0"}
    done = start([sys.executable, "-c", CHECK, str(path)], **variables)
    assert done.returncode == 0, done.stderr
    imports, _, found = done.stdout.partition(" ")
    assert imports == "False"
    for name, value in ast.literal_eval(found).items():
        torch.testing.assert_close(torch.tensor(value), expected[name], rtol=1e-6, atol=1e-5)


def test_a_compiler_that_crashes_is_a_warning_and_the_torch_backend(
    compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def crash(*_: object, seconds: float) -> object:
        raise IsolatedCallError("its process was ended by SIGABRT")

    monkeypatch.setattr(compile, "call_isolated", crash)
    with pytest.warns(RuntimeWarning, match=r"rank 0 runs by torch: TVM's compiler failed, its process was .* SIGABRT"):
        found = run_bundle(tvm_bundle([2, 3]), {"x": x}, backend="tvm")
    for name, value in run_bundle(tvm_bundle([2, 3]), {"x": x}, backend="torch").items():
        assert torch.equal(found[name], value)


def test_ops_that_another_process_lacks_are_compiled_in_this_one(
    compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(*_: object, seconds: float) -> object:
        raise ParseError("m.py:1: unknown op 'outer'")

    monkeypatch.setattr(compile, "call_isolated", lack)
    monkeypatch.setattr(compile, "_compiled_bytes", lambda *_: pytest.fail("it runs in the child"))
    assert compile.compile_program(TEXT).outputs == 5
