"""Kernels that TVM compiles for this processor, called on torch tensors.

A call takes less than a microsecond, and a kernel does the work of several ops; each op of torch takes three or more.
Small steps, such as one token of one sequence, are bound by that.

A kernel takes numbers and the addresses of data. Its first parameter, which the caller leaves out, is a tensor of one
float32: TVM takes from it where a kernel's local memory is.

Kernels are compiled, and first run against torch, in a child process (`kernels.isolated_calls`): a compiler that
aborts, or code that crashes, hangs or computes something else, costs a warning and torch's form. Compiled kernels are
kept on disk (`kernels.compiled_files`), and so are the reasons for which others are declined. Those found there load
without TVM's Python modules, whose import takes a second. ``DISTIR_NATIVE=0`` turns native kernels off.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from distir_relax.kernels.native.dot import with_dot
from distir_relax.kernels.native.flags import with_flags
from distir_relax.kernels.native.loop import with_loop
from distir_relax.kernels.native.machine_code import SUFFIXES, MachineCode, load_kernels, machine_code, share_threads
from distir_relax.kernels.native.target import Capability, Target, host_target
from distir_relax.kernels.native.threads import with_launcher
from distir_relax.kernels.native.waits import with_waits

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")


class Kernel:
    """A `function` of TVM's that takes numbers and addresses, after some `first` ones, and writes to some of those."""

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
_DECLINED = ".declined"
_NO_NEEDS: Callable[..., tuple[Capability, ...]] = lambda *_: ()  # noqa: E731 - a default that has a type


class NativeKernel(Generic[P]):
    """A kernel for given sizes and dtypes, the arguments: they have a short `repr`.

    A call returns the compiled kernel. It is None where native kernels are turned off, where the processor lacks what
    the kernel needs (`Capability.FMA`, and `needs` of the arguments), and where the kernel was declined.
    """

    def __init__(self, write: Callable[P, Any], needs: Callable[..., Iterable[Capability]]) -> None:
        update_wrapper(self, write)
        self.write = write
        self.name = write.__name__.strip("_")
        self.trial: Trial | None = None
        """A run of the kernel against torch; `native.trials` has those of all."""
        self.declined: dict[tuple[Any, ...], str] = {}
        """The reasons for which kernels were declined in this process, by their arguments."""
        self._needs = needs
        self._load = cache(self._load_locked)

    def __call__(self, *args: P.args, **_: P.kwargs) -> Kernel | None:
        return self._load(args)

    def __reduce__(self) -> Any:
        # The child process finds it by its name.
        return _find, (self.write.__module__, self.write.__name__)

    def needs(self, arguments: tuple[Any, ...]) -> tuple[Capability, ...]:
        """Return the instructions that a kernel needs."""
        return (Capability.FMA, *self._needs(*arguments))

    def compile(self, arguments: tuple[Any, ...], target: Target) -> str:
        """Return LLVM's text of a kernel for a target. Raises errors of TVM; LLVM may end the process."""
        share_threads()
        import tvm

        function = self.write(*arguments).with_attr("global_symbol", self.name)  # type: ignore[call-arg]
        module = tvm.compile(tvm.IRModule({self.name: function}), target=tvm.target.Target(target.to_tvm())).mod
        text: str = with_flags(module.inspect_source("ll"), target)
        for with_functions in (with_launcher, with_dot, with_loop, with_waits):
            text = with_functions(text)
        return text

    def _load_locked(self, arguments: tuple[Any, ...]) -> Kernel | None:
        with _lock:
            if os.environ.get("DISTIR_NATIVE") == "0":
                return None
            target = host_target()
            if missing := target.missing(self.needs(arguments)):
                self.declined[arguments] = missing
                return None
            try:
                with TemporaryDirectory() as temporary:
                    folder = compiled_folder() or Path(temporary)
                    return self._load_from(self._file(arguments, target, folder), arguments, target)
            except Exception as error:  # of TVM and LLVM: the caller goes on with torch
                self.declined[arguments] = str(error)
                message = f"the kernel {self.name} is not used, but torch: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=4)
                return None

    def _load_from(self, file: Path, arguments: tuple[Any, ...], target: Target) -> Kernel:
        if found := self._read(file):
            return found
        with one_compiles(file):
            if found := self._read(file):  # another process may have compiled it
                return found
            reason = file.with_suffix(_DECLINED)
            if is_usable(reason):
                raise IsolatedCallError(f"{reason.read_text()} (`distir doctor --measure` tries again)")
            try:
                code = call_isolated(compile_and_try, self, arguments, target, file.parent, seconds=_MOST_SECONDS)
            except (IsolatedCallError, AssertionError) as error:
                write_compiled(str(error).encode(), reason)
                raise
            write_compiled(code.content, file.with_suffix(code.suffix))
            return self._read(file) or loaded_kernel(code, self.name, file.parent)

    def _file(self, arguments: tuple[Any, ...], target: Target, folder: Path) -> Path:
        """Return where a compiled kernel is kept: by its source, its arguments, TVM's version, and the processor."""
        key = compiled_key(kernel_sources(self.write.__code__.co_filename), repr(arguments), target.to_tvm())
        return folder / f"{self.name}-{key}"

    def _read(self, file: Path) -> Kernel | None:
        """Return the kernel of a file; None if there is none, or it was damaged: it is written again."""
        for suffix in SUFFIXES:
            written = file.with_suffix(suffix)
            with suppress(Exception):
                if is_usable(written):
                    MachineCode.read(written)
                    return _kernel(load_kernels(written), self.name)
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


def native(write: Callable[P, Any]) -> NativeKernel[P]:
    """Decorate a function that returns a `PrimFunc` for given sizes and dtypes."""
    return NativeKernel(write, _NO_NEEDS)


def native_needing(needs: Callable[..., Iterable[Capability]]) -> Callable[[Callable[P, Any]], NativeKernel[P]]:
    """Return the decorator `native` for kernels that need instructions, by their arguments."""
    return lambda write: NativeKernel(write, needs)


def compile_and_try(
    kernel: NativeKernel[Any], arguments: tuple[Any, ...], target: Target, folder: Path | None = None
) -> MachineCode:
    """Return a kernel's machine code, to be loaded from a folder, which ran here, with the results of torch.

    Raises AssertionError if it has others, and errors of TVM; LLVM or the machine code may end the process.
    """
    code = machine_code(kernel.compile(arguments, target), folder)
    compiled = loaded_kernel(code, kernel.name, folder)
    if kernel.trial is not None:
        kernel.trial.check(compiled, arguments)
    return code


def loaded_kernel(code: MachineCode, name: str, folder: Path | None = None) -> Kernel:
    """Return the kernel of machine code. Raises errors of TVM."""
    return _kernel(code.load(folder=folder), name)


def _kernel(module: Any, name: str) -> Kernel:
    import torch

    return Kernel(module[name], torch.empty(1, dtype=torch.float32))


def _find(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


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
    """Return the sources of kernels in `files`, and those of this package, whose functions kernels share."""
    return tuple(path.read_bytes() for path in sorted({*map(Path, files), *Path(__file__).parent.glob("*.py")}))
