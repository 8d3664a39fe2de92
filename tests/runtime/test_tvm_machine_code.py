"""Files with machine code: libraries, and LLVM's text where there is no linker, or no library can be loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from distir_relax.kernels.native.target import host_target
from distir_relax.runtime.backends.tvm import machine_code as module
from distir_relax.runtime.backends.tvm.compile import tvm_target
from distir_relax.runtime.backends.tvm.machine_code import MachineCode, machine_code


@pytest.fixture(scope="module")
def text() -> str:
    """LLVM's text of a function that fills five numbers with 3."""
    import tvm
    from tvm import te

    function = te.create_prim_func([te.compute((5,), lambda i: te.const(3.0, "float32"))])
    filling = tvm.IRModule({"filling": function.with_attr("global_symbol", "filling")})
    compiled = tvm.compile(filling, target=tvm.target.Target(tvm_target(host_target())))
    return str(compiled.mod.inspect_source("ll"))


def result(code: MachineCode) -> list[float]:
    import tvm_ffi

    x = torch.empty(5)
    code.load()["filling"](tvm_ffi.from_dlpack(x))
    return x.tolist()


def test_a_library_computes_what_the_text_does(text: str) -> None:
    code = machine_code(text)
    assert code.suffix == ".so"
    assert result(code) == result(MachineCode(".ll", text.encode())) == [3.0] * 5


@pytest.mark.parametrize("linker", [None, "/bin/false", "/no/such/linker"])
def test_without_a_linker_that_works_it_is_the_text(
    linker: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_linker", lambda: linker)
    assert machine_code(text) == MachineCode(".ll", text.encode())


def test_where_no_library_can_be_loaded_it_is_the_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a file system without executables."""
    monkeypatch.setattr(module, "_linked", lambda compiled: b"no library")
    assert machine_code(text) == MachineCode(".ll", text.encode())


@pytest.mark.parametrize("left", [0, 31, 5000, -1])
def test_a_part_of_a_library_is_not_loaded(left: int, text: str, tmp_path: Path) -> None:
    file = tmp_path / "filling.so"
    code = machine_code(text)
    file.write_bytes(code.content)
    assert MachineCode.read(file) == code
    file.write_bytes(code.content[:left])
    with pytest.raises(ValueError, match="is no library, or a part of one"):
        MachineCode.read(file)


def test_variables_of_a_library_are_its_own(tmp_path: Path) -> None:
    """Whatever a library that is loaded for all others calls its variables."""
    source = """
        @__TVMBackendParallelLaunch = global i64 {value}
        define i64 @own() {{
          %value = load i64, ptr @__TVMBackendParallelLaunch
          ret i64 %value
        }}
    """
    values = []
    for value in (3, 5):
        code = machine_code(source.format(value=value))
        file = tmp_path / f"{value}.so"
        file.write_bytes(code.content)
        values.append(ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL).own())
    assert values == [3, 5]
