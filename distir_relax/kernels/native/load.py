"""Kernels in C++ that are compiled on this machine, called on torch tensors.

A call takes less than a microsecond, and a kernel does the work of several ops; each op of torch takes three or more.
Small steps, such as one token of one sequence, are bound by that. A kernel takes numbers and the addresses of data.

Each is a file of this folder, compiled by the compiler of the machine (`native.compiler`) for the instructions of its
processor, with the constants that its arguments give it. It is compiled, and first run against torch, in a child
process (`kernels.isolated_calls`): a compiler that fails, or code that crashes, hangs or computes something else, costs
a warning and torch's form. Libraries are kept on disk (`kernels.compiled_files`), and so are the reasons for which
kernels are declined. ``DISTIR_NATIVE=0`` turns native kernels off.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, update_wrapper
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias

from distir_relax.kernels.compiled_files import (
    compiled_folder,
    compiled_key,
    is_usable,
    one_compiles,
    remove_compiled,
    write_compiled,
)
from distir_relax.kernels.isolated_calls import IsolatedCallError, call_isolated
from distir_relax.kernels.native.compiler import INSTALL_HINT, Compiler, host_compiler
from distir_relax.kernels.native.target import Capability, Target, host_target
from distir_relax.kernels.native.threads import use_threads

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")


class Kernel:
    """A `function` that takes numbers and addresses, after some `first` ones, and writes to some of those."""

    __slots__ = ("first", "function")

    def __init__(self, function: Any, *first: Any) -> None:
        self.function, self.first = function, first

    def __call__(self, *arguments: int | float) -> None:
        if observed.by is not None:
            observed.by(self, arguments)
        self.function(*self.first, *arguments)

    def after(self, *first: int | float) -> Kernel:
        """Return the kernel of the arguments after these."""
        return Kernel(self.function, *self.first, *first)


class _Observed(threading.local):
    """`by` takes each call of a kernel in this thread (`kernels.recording`)."""

    by: Callable[[Kernel, Sequence[int | float]], None] | None = None


observed = _Observed()

Pairs: TypeAlias = "Iterator[tuple[torch.Tensor, torch.Tensor]]"
"""Results of a kernel, and the expected ones, in float32 or float64."""

MOST_ELEMENTS = 1 << 17
"""Elements above which torch, which uses several threads, is faster than a native kernel that uses one."""

_LEAST_PARALLEL = 1 << 15
"""Elements from which several threads are faster than one, which need not be started."""
_MOST_SECONDS = 120.0
"""Seconds for the compilation and the trial of a kernel, which take one on a quiet machine."""
_TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}
"""The largest difference, relative to the largest result, or to 1."""
_LIBRARY, _DECLINED = ".so", ".declined"
_NO_COMPILER = f"no-compiler{_DECLINED}"
"""The file that says that a user has been told."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class NativeKernel(Generic[P]):
    """A kernel for some dtypes and sizes, the arguments: they have a short `repr`.

    A call returns the compiled kernel. It is None where native kernels are turned off, where there is no compiler or
    the processor lacks what the kernel needs (`Capability.FMA`, and `needs` of the arguments), and where the kernel was
    declined. Each argument is a constant in its file, in capitals: a number, a truth value, a list of numbers, or a
    name of C++. `constants` are further ones.
    """

    def __init__(
        self, declared: Callable[P, None], needs: Callable[..., Iterable[Capability]], constants: Mapping[str, int]
    ) -> None:
        update_wrapper(self, declared)
        self.declared = declared
        self.name = declared.__name__
        self.trial: Trial | None = None
        """A run of the kernel against torch; `native.trials` has those of all."""
        self.declined: dict[tuple[Any, ...], str] = {}
        """The reasons for which kernels were declined in this process, by their arguments."""
        self._needs = needs
        self._constants = constants
        self._parameters = tuple(inspect.signature(declared).parameters)
        self._load = cache(self._load_locked)

    def __call__(self, *args: P.args, **_: P.kwargs) -> Kernel | None:
        return self._load(args)

    def __reduce__(self) -> Any:
        # The child process finds it by its name.
        return _find, (self.declared.__module__, self.declared.__name__)

    @property
    def source(self) -> Path:
        """The file of the kernel, in the folder of the module that declares it."""
        return Path(self.declared.__code__.co_filename).parent / f"{self.name}.cpp"

    def needs(self, arguments: tuple[Any, ...]) -> tuple[Capability, ...]:
        """Return the instructions that a kernel needs."""
        return (Capability.FMA, *self._needs(*arguments))

    def macros(self, arguments: tuple[Any, ...]) -> dict[str, str]:
        """Return the constants of the file, by name."""
        of_parameters = zip(self._parameters, arguments, strict=True)
        return {name: str(value) for name, value in self._constants.items()} | {
            name.upper(): _in_cpp(value) for name, value in of_parameters
        }

    def compile(self, arguments: tuple[Any, ...], target: Target, compiler: Compiler, library: Path) -> None:
        """Write the library of a kernel for a target. Raises CompilerError."""
        used = target.limited((*self.needs(arguments), Capability.WIDE))
        compiler.compile(self.source, library, self.macros(arguments), used)

    def _load_locked(self, arguments: tuple[Any, ...]) -> Kernel | None:
        with _lock:
            if os.environ.get("DISTIR_NATIVE") == "0":
                return None
            target, compiler = host_target(), host_compiler()
            if reason := target.missing(self.needs(arguments)):
                self.declined[arguments] = reason
                return None
            if compiler is None:
                self.declined[arguments] = f"there is no C++ compiler: {INSTALL_HINT}"
                _warn_once(self.declined[arguments])
                return None
            try:
                with TemporaryDirectory() as temporary:
                    folder = compiled_folder() or Path(temporary)
                    return self._load_from(self._file(arguments, target, folder), arguments, target, compiler)
            except Exception as error:
                # Of the compiler, the child process, or the trial: the caller continues with torch.
                self.declined[arguments] = str(error)
                message = f"the kernel {self.name} is not used, but torch: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=4)
                return None

    def _load_from(self, file: Path, arguments: tuple[Any, ...], target: Target, compiler: Compiler) -> Kernel:
        if found := self._read(file):
            return found
        with one_compiles(file):
            if found := self._read(file):  # another process may have compiled it
                return found
            reason = file.with_suffix(_DECLINED)
            if is_usable(reason):
                raise IsolatedCallError(f"{reason.read_text()} (`distir doctor --measure` tries again)")
            try:
                content = call_isolated(compile_and_try, self, arguments, target, compiler, seconds=_MOST_SECONDS)
            except Exception as error:
                write_compiled(str(error).encode(), reason)
                raise
            write_compiled(content + hashlib.sha256(content).digest(), file.with_suffix(_LIBRARY))
            if found := self._read(file):
                return found
        # The file system may have no executables.
        return loaded_kernel(content, self.name)

    def _file(self, arguments: tuple[Any, ...], target: Target, folder: Path) -> Path:
        """Return where a kernel is kept: by its source, its constants, and the processor."""
        features = sorted(target.limited(Capability).features)
        sources = kernel_sources(str(self.source))
        return folder / f"{self.name}-{compiled_key(sources, repr(arguments), repr(self._constants), features)}"

    def _read(self, file: Path) -> Kernel | None:
        """Return the kernel of a file; None if there is none, or it was damaged: it is written again."""
        file = file.with_suffix(_LIBRARY)
        with suppress(Exception):
            # A part of a library could end the process that loads it.
            if is_usable(file) and (content := file.read_bytes()) and _is_whole(content):
                return _kernel(file, self.name)
        return None


@dataclass(frozen=True)
class Trial:
    """A small run of a kernel against torch, which it must pass on a processor before it is used there.

    `samples` are arguments of the kernel.
    """

    kernel: NativeKernel[Any]
    run: Callable[..., Pairs]
    samples: list[tuple[Any, ...]]

    def check(self, compiled: Kernel, arguments: tuple[Any, ...]) -> None:
        """Run the kernel. Raises AssertionError if a result is not torch's."""
        for number, (found, expected) in enumerate(self.run(compiled, *arguments)):
            largest = max(1.0, float(expected.abs().max()))
            error = float((found.double() - expected.double()).abs().max()) / largest
            # A comparison with NaN is false.
            if not error <= _TOLERANCES[str(found.dtype).removeprefix("torch.")]:
                raise AssertionError(f"result {number} differs from torch's by {error:.2g} of the largest")


def native(
    needs: Callable[..., Iterable[Capability]] = lambda *_: (), **constants: int
) -> Callable[[Callable[P, None]], NativeKernel[P]]:
    """Return the decorator of a function that declares the kernel of its name, by its parameters.

    A kernel needs further instructions by its arguments, and has `constants`.
    """
    return lambda declared: NativeKernel(declared, needs, constants)


def compile_and_try(kernel: NativeKernel[Any], arguments: tuple[Any, ...], target: Target, compiler: Compiler) -> bytes:
    """Return a kernel's library, which ran here, with the results of torch.

    Raises CompilerError, and AssertionError if it has other results; the code may end the process.
    """
    import_module("distir_relax.kernels.native.trials")
    with TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        kernel.compile(arguments, target, compiler, library)
        if kernel.trial is not None:
            kernel.trial.check(_kernel(library, kernel.name), arguments)
        return library.read_bytes()


def loaded_kernel(content: bytes, name: str) -> Kernel:
    """Return the kernel of a library. Raises errors of the loader."""
    with TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        library.write_bytes(content)
        return _kernel(library, name)


def _kernel(library: Path, name: str) -> Kernel:
    import tvm_ffi

    module = tvm_ffi.load_module(str(library))
    use_threads(module)
    return Kernel(module[name])


def _is_whole(content: bytes) -> bool:
    return hashlib.sha256(content[:-_CHECKSUM_BYTES]).digest() == content[-_CHECKSUM_BYTES:]


def _find(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _in_cpp(value: Any) -> str:
    """Return a constant of C++."""
    if isinstance(value, tuple):
        return f"{{{', '.join(map(str, value))}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _warn_once(reason: str) -> None:
    """Warn that no kernels are used, the first time on this machine."""
    folder = compiled_folder()
    if folder is None or not is_usable(folder / _NO_COMPILER):
        warnings.warn(f"native kernels are not used, but torch: {reason}", RuntimeWarning, stacklevel=5)
    if folder is not None:
        write_compiled(reason.encode(), folder / _NO_COMPILER)


def forget_declined() -> None:
    """Remove the reasons for which kernels were declined on this machine: they are tried again."""
    remove_compiled(f"*{_DECLINED}")


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


@cache
def kernel_sources(*files: str) -> tuple[bytes, ...]:
    """Return the sources of kernels in `files`, by default of all, and the headers that they share."""
    folder = Path(__file__).parent
    paths = {*map(Path, files or map(str, folder.glob("*.cpp"))), *folder.glob("*.h")}
    return tuple(path.read_bytes() for path in sorted(paths))
