"""Lists of kernel calls that run one after the other, without Python in between.

A call from Python takes a microsecond, and with the tensors around it three or more; one from a list takes a tenth. Its
arguments are prepared once: numbers, and addresses of memory that stays where it is.

A kernel is a function of TVM's interface. The loop over a list calls `TVMFFIFunctionCall`, of its library, for each.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from distir_relax.kernels.native.kernels import run_calls
from distir_relax.kernels.native.load import Kernel

_INTEGER, _FLOAT = 1, 3
"""TVM's numbers of the types of arguments."""


class CallList:
    """Calls of kernels in order. `keep` are objects whose memory they use, which live as long as the list."""

    def __init__(self) -> None:
        self.keep: list[Any] = []
        self._calls: list[tuple[int, int, int]] = []
        self._run: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, kernel: Kernel, *arguments: int | float) -> None:
        """Add the call of a kernel with numbers and addresses."""
        given = [*kernel.first, *arguments]
        memory = ctypes.create_string_buffer(b"".join(map(argument_bytes, given)))
        self.keep += [kernel, memory]
        self._calls.append((kernel.function.__chandle__(), ctypes.addressof(memory), len(given)))
        self._run = None

    def run(self) -> None:
        """Run the calls. Raises `RuntimeError` if a kernel fails."""
        if self._run is None:
            table = ctypes.create_string_buffer(b"".join(struct.pack("=qqii", *call, 0) for call in self._calls))
            status = ctypes.c_int64()
            loop = run_calls()
            assert loop is not None, "the kernels of the list were compiled"
            self.keep += [table, status]
            self._status = status
            self._run = partial(loop, ctypes.addressof(table), len(self._calls), _caller(), ctypes.addressof(status))
        self._run()
        if self._status.value:
            raise RuntimeError("a kernel of a list of calls has failed")


def argument_bytes(value: int | float) -> bytes:
    """Return an argument as kernels take it: its type and its value."""
    if isinstance(value, float):
        return struct.pack("=iid", _FLOAT, 0, value)
    return struct.pack("=iiq", _INTEGER, 0, value)


@cache
def _caller() -> int:
    """Return the address of the function that calls a kernel."""
    import tvm_ffi

    library = ctypes.CDLL(str(Path(tvm_ffi.__file__).parent / "lib" / "libtvm_ffi.so"))
    address = ctypes.cast(library.TVMFFIFunctionCall, ctypes.c_void_p).value
    assert address is not None
    return address
