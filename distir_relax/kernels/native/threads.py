"""Parallel loops of TVM on the threads of torch.

TVM has threads of its own for parallel loops. Threads of both wait for their next work for a while, and take the cores
from each other: a product with TVM's threads made torch's next parallel op wait for 5 ms.

A compiled module has a variable with the address of the function that runs its parallel loops, which TVM sets when it
loads the module. `with_launcher` adds a function that runs them as parallel regions of OpenMP, and `use_launcher` sets
the variable to it.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_VARIABLE = "__TVMBackendParallelLaunch"
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""Functions of OpenMP's library, GCC's or one that is compatible."""

# A loop's body gets the number of its thread, how many there are, and its data; it returns 0 if all went well.
_LAUNCHER = """
@run_parallel = internal global ptr null
@thread_number = internal global ptr null
@thread_count = internal global ptr null

%group = type { ptr, i32 }
%argument = type { i32, i32, ptr }
%loop = type { ptr, ptr, i32 }

define internal void @run_body(ptr %loop) {
  %body = load ptr, ptr %loop
  %data_at = getelementptr %loop, ptr %loop, i64 0, i32 1
  %data = load ptr, ptr %data_at
  %ask_number = load ptr, ptr @thread_number
  %number = call i32 %ask_number()
  %ask_count = load ptr, ptr @thread_count
  %count = call i32 %ask_count()
  %group = alloca %group
  store ptr null, ptr %group
  %count_at = getelementptr %group, ptr %group, i64 0, i32 1
  store i32 %count, ptr %count_at
  %status = call i32 %body(i32 %number, ptr %group, ptr %data)
  %is_well = icmp eq i32 %status, 0
  br i1 %is_well, label %done, label %failed
failed:
  %status_at = getelementptr %loop, ptr %loop, i64 0, i32 2
  store i32 %status, ptr %status_at
  br label %done
done:
  ret void
}

define internal i32 @launch(ptr %body, ptr %data, i32 %threads) {
  %loop = alloca %loop
  store ptr %body, ptr %loop
  %data_at = getelementptr %loop, ptr %loop, i64 0, i32 1
  store ptr %data, ptr %data_at
  %status_at = getelementptr %loop, ptr %loop, i64 0, i32 2
  store i32 0, ptr %status_at
  %run = load ptr, ptr @run_parallel
  call void %run(ptr @run_body, ptr %loop, i32 %threads, i32 0)
  %status = load i32, ptr %status_at
  ret i32 %status
}

define i32 @__tvm_ffi_use_launcher(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  %run_at = getelementptr %argument, ptr %arguments, i64 0, i32 2
  %run = load ptr, ptr %run_at
  store ptr %run, ptr @run_parallel
  %number_at = getelementptr %argument, ptr %arguments, i64 1, i32 2
  %number = load ptr, ptr %number_at
  store ptr %number, ptr @thread_number
  %count_at = getelementptr %argument, ptr %arguments, i64 2, i32 2
  %threads = load ptr, ptr %count_at
  store ptr %threads, ptr @thread_count
  store ptr @launch, ptr @__TVMBackendParallelLaunch
  ret i32 0
}
"""


def with_launcher(text: str) -> str:
    """Return LLVM's text of a module with the function that runs its parallel loops, if it has any."""
    return text + _LAUNCHER if has_launcher(text) else text


def has_launcher(text: str) -> bool:
    """Return whether a module, in LLVM's text, has parallel loops, which a launcher runs."""
    return f"@{_VARIABLE} =" in text


def use_launcher(module: Any) -> None:
    """Let a module that was loaded from such a text use torch's threads, if those are OpenMP's."""
    addresses = _openmp()
    with suppress(AttributeError):  # a module without parallel loops has no launcher
        if addresses:
            module["use_launcher"](*addresses)


@cache
def _openmp() -> tuple[int, ...]:
    """Return the addresses of `_OPENMP` in the library that torch uses, none if it uses another kind of threads."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _OPENMP]
    except (OSError, AttributeError):
        return ()
    return tuple(address for address in found if address)
