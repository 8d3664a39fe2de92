"""Machine code of kernels in a file: a shared library where the system has a linker, else LLVM's text.

A library loads in a third of a millisecond. LLVM's text becomes machine code in each process that loads it, which takes
30 to 400 ms for a kernel.
"""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distir_relax.kernels.native import use_openmp

_LIBRARY, _TEXT = ".so", ".ll"
SUFFIXES = (_LIBRARY, _TEXT)
"""Of files with machine code; the first is preferred."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class MachineCode:
    """The content of a file with machine code, and its suffix. A library ends with a checksum of itself."""

    suffix: str
    content: bytes

    @classmethod
    def read(cls, file: Path) -> MachineCode:
        """Return the content of a file. Raises OSError without one, and ValueError for a library that was damaged.

        A part of a library could end the process that loads it.
        """
        code = cls(file.suffix, file.read_bytes())
        if code.suffix == _LIBRARY and _checksum(code.content[:-_CHECKSUM_BYTES]) != code.content[-_CHECKSUM_BYTES:]:
            raise ValueError(f"{file} is no library, or a part of one")
        return code

    def load(self, keep: bool = True, folder: Path | None = None) -> Any:
        """Return the module, loaded from a file in a folder, by default that of temporary files: see `load_kernels`."""
        with TemporaryDirectory(dir=folder) as temporary:
            file = Path(temporary) / f"code{self.suffix}"
            file.write_bytes(self.content)
            return load_kernels(file, keep)


def machine_code(text: str, folder: Path | None = None) -> MachineCode:
    """Return the machine code of LLVM's text; it can be loaded from a folder, by default that of temporary files.

    Raises errors of TVM; LLVM may end the process.
    """
    written = MachineCode(_TEXT, text.encode())
    with TemporaryDirectory(dir=folder) as temporary:
        source, compiled = Path(temporary) / f"code{_TEXT}", Path(temporary) / "code.o"
        source.write_bytes(written.content)
        load_library()
        import tvm_ffi

        tvm_ffi.load_module(str(source), keep_module_alive=False).write_to_file(str(compiled), "o")
        if linked := _linked(compiled):
            library = MachineCode(_LIBRARY, linked + _checksum(linked))
            # No library is loaded from a file system without executables.
            with suppress(Exception):
                library.load(keep=False, folder=folder)
                return library
    return written


def _linked(compiled: Path) -> bytes:
    """Return the library of an object file; nothing where there is no linker, or it fails."""
    linker, library = _linker(), compiled.with_suffix(_LIBRARY)
    if linker is None:
        return b""
    # A kernel's variables are its own, whatever other libraries call theirs.
    command = [linker, "-shared", "-Wl,-Bsymbolic", "-o", str(library), str(compiled), "-lm"]
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
        return library.read_bytes()
    return b""


@cache
def _linker() -> str | None:
    """Return the path of the system's compiler, which calls its linker; None if it has none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def load_kernels(file: Path, keep: bool = True) -> Any:
    """Return the module of a file with machine code, with its parallel loops on torch's threads.

    Its machine code stays in memory while something refers to the module, and, if `keep`, as long as the process lives.
    Raises errors of TVM.
    """
    import tvm_ffi

    load_library()
    module = tvm_ffi.load_module(str(file), keep_module_alive=keep)
    if file.suffix == _LIBRARY:
        _use_threads_of_torch(file)
    return module


def _use_threads_of_torch(library: Path) -> None:
    """Set the function that runs the parallel loops of a library that is loaded, if it has any."""
    kernel, loaded = use_openmp(), ctypes.CDLL(str(library))
    with suppress(ValueError):
        variable = ctypes.c_void_p.in_dll(loaded, "__TVMBackendParallelLaunch")
        if kernel is not None:
            kernel(ctypes.addressof(variable))
    _ctypes.dlclose(loaded._handle)


def limit_threads(count: int) -> None:
    """Let TVM have `count` threads on any core, unless a variable has their number. It is called before TVM is used.

    TVM would use half the cores, and bind the threads of all ranks to the same ones.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(count))
    os.environ.setdefault("TVM_BIND_THREADS", "0")


def share_threads() -> None:
    """Let TVM have as many threads as torch."""
    import torch

    limit_threads(torch.get_num_threads())


@cache
def load_library() -> None:
    """Load TVM's library, which has the compiler from LLVM's representation to machine code, without its modules.

    Raises ImportError if TVM is not installed.
    """
    if "tvm" in sys.modules:
        return
    import tvm_ffi  # noqa: F401 - the library needs its

    share_threads()
    spec = find_spec("tvm")
    if spec is None or spec.origin is None:
        raise ImportError("no module named 'tvm'")
    for name in ("libtvm_runtime.so", "libtvm_compiler.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
