"""Kernels that TVM compiles for this processor, called on torch tensors.

A call takes less than a microsecond, and a kernel does the work of several ops; each op of torch takes three or more.
Small steps, such as one token of one sequence, are bound by that.

A kernel takes numbers and the addresses of data. Its first parameter, which the caller leaves out, is a tensor of one
float32: TVM takes from it where a kernel's local memory is.

Compiled kernels are kept on disk (`kernels.compiled_files`). Those found there load without TVM's Python modules, whose
import takes a second. ``DISTIR_NATIVE=0`` turns native kernels off.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias

from distir_relax.kernels.compiled_files import (
    compiled_folder,
    compiled_key,
    is_usable,
    one_compiles,
    write_compiled,
)
from distir_relax.kernels.native.dot import with_dot
from distir_relax.kernels.native.flags import with_flags
from distir_relax.kernels.native.loop import with_loop
from distir_relax.kernels.native.threads import use_launcher, with_launcher
from distir_relax.kernels.native.waits import with_waits

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
Kernel: TypeAlias = "Callable[..., None]"
"""Takes numbers and addresses, and writes its results to some of those."""

MOST_ELEMENTS = 1 << 17
"""Elements above which torch, which uses several threads, is faster than a native kernel that uses one."""

_LEAST_PARALLEL = 1 << 15
"""Elements from which several threads are faster than one, which need not be started."""


def native(write: Callable[P, Any]) -> Callable[P, Kernel | None]:
    """Decorate a function that returns a `PrimFunc` for given sizes and dtypes; it then returns the compiled kernel.

    The result is None where native kernels are turned off, or cannot be compiled. The arguments have a short `repr`.
    """

    @cache
    def locked(*arguments: Any) -> Kernel | None:
        with _lock:
            return _load(write, arguments)

    @wraps(write)
    def load(*args: P.args, **_: P.kwargs) -> Kernel | None:
        return locked(*args)

    return load


def measured_once(name: str, measure: Callable[[], int]) -> int:
    """Return the result of a measurement of these kernels on this processor, now or earlier: it is kept with them.

    So a choice by time, which may change the last bits of results, is the same in every run.
    """
    folder = compiled_folder()
    file = None if folder is None else folder / f"{name}-{compiled_key(kernel_sources())}.txt"
    with suppress(OSError, ValueError):
        if file is not None and is_usable(file):
            return int(file.read_text())
    found = measure()
    if file is not None:
        write_compiled(str(found).encode(), file)
    return found


def threads_for(x: torch.Tensor) -> int:
    """Return the number of threads for a kernel that computes all of `x`: 1 if it is small, or those of torch."""
    if x.numel() < _LEAST_PARALLEL:
        return 1
    import torch

    return torch.get_num_threads()


def is_small(x: torch.Tensor) -> bool:
    """Return whether a native kernel is the fastest for `x`: a small tensor on the processor."""
    return x.is_cpu and 0 < x.numel() <= MOST_ELEMENTS


_lock = threading.Lock()


def _load(write: Callable[..., Any], arguments: tuple[Any, ...]) -> Kernel | None:
    import torch

    if os.environ.get("DISTIR_NATIVE") == "0":
        return None
    name = write.__name__.strip("_")
    try:
        with TemporaryDirectory() as temporary:
            file = _file(write, name, arguments, compiled_folder() or Path(temporary))
            with suppress(Exception):  # no file, or one that was damaged: it is written again
                return partial(_read(file, name), torch.empty(1))
            with one_compiles(file):
                with suppress(Exception):  # another process may have compiled it
                    return partial(_read(file, name), torch.empty(1))
                text = _compile(write, name, arguments)
                for with_functions in (with_launcher, with_dot, with_loop, with_flags, with_waits):
                    text = with_functions(text)
                write_compiled(text.encode(), file)
                return partial(_read(file, name), torch.empty(1))
    except Exception as error:  # of TVM and LLVM: the caller goes on with torch
        warnings.warn(f"the kernel {name} was not compiled, torch is used: {error}", RuntimeWarning, stacklevel=4)
        return None


def _compile(write: Callable[..., Any], name: str, arguments: tuple[Any, ...]) -> str:
    """Return LLVM's text of a kernel."""
    _set_threads()
    import tvm
    from tvm.target import codegen

    target = tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()})
    function = write(*arguments).with_attr("global_symbol", name)
    module = tvm.compile(tvm.IRModule({name: function}), target=target).mod
    text: str = module.inspect_source("ll")
    return text


def _file(write: Callable[..., Any], name: str, arguments: tuple[Any, ...], folder: Path) -> Path:
    """Return where a compiled kernel is kept: by its source, its arguments, TVM's version, and the processor."""
    return folder / f"{name}-{compiled_key(kernel_sources(write.__code__.co_filename), repr(arguments))}.ll"


@cache
def kernel_sources(*files: str) -> tuple[bytes, ...]:
    """Return the sources of kernels in `files`, and those of this package, whose functions kernels share."""
    return tuple(path.read_bytes() for path in sorted({*map(Path, files), *Path(__file__).parent.glob("*.py")}))


def _read(file: Path, name: str) -> Kernel:
    """Return the kernel of a file; any error of TVM if it cannot be used."""
    if not is_usable(file):
        raise FileNotFoundError(file)
    found: Kernel = load_kernels(file)[name]
    return found


def load_kernels(file: Path, keep: bool = True) -> Any:
    """Return the module of LLVM's text of kernels, with their parallel loops on torch's threads.

    Its machine code stays in memory while something refers to the module, and, if `keep`, as long as the process lives.
    """
    import tvm_ffi

    load_library()
    module = tvm_ffi.load_module(str(file), keep_module_alive=keep)
    use_launcher(module)
    return module


def limit_threads(count: int) -> None:
    """Let TVM have so many threads, unless a variable says how many, on any core. It is called before TVM is used.

    TVM would use half the cores, and bind the threads of all ranks to the same ones.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(count))
    os.environ.setdefault("TVM_BIND_THREADS", "0")


def _set_threads() -> None:
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
    import ctypes

    _set_threads()
    spec = find_spec("tvm")
    if spec is None or spec.origin is None:
        raise ImportError("no module named 'tvm'")
    for name in ("libtvm_runtime.so", "libtvm_compiler.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
