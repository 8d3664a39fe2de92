"""Records of waiting, in kernels that wait for other ranks: which step of a program waits, and how long.

They are `NUMBERS_OF_WAITS` numbers of 64 bits: the current step, or -1; the last step that has finished; nanoseconds
in waits that have ended; and the begin of the last wait, in seconds and nanoseconds of the system's clock. A kernel
calls functions that do not exist; in LLVM's text, `with_waits` defines them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from distir_relax.kernels.native.definitions import with_definitions

NUMBERS_OF_WAITS = 5
_BEGIN, _END = "begin_wait", "end_wait"
_MONOTONIC = 1
"""Linux's number of the clock that `time.monotonic` reads."""
_TEXT = f"""
define internal i32 @begin_wait(i64 %address, i64 %step, i64 %clock) {{
  %numbers = inttoptr i64 %address to ptr
  %read_clock = inttoptr i64 %clock to ptr
  %since = getelementptr i64, ptr %numbers, i64 3
  %ignored = call i32 %read_clock(i32 {_MONOTONIC}, ptr %since)
  store atomic i64 %step, ptr %numbers release, align 8
  ret i32 0
}}

define internal i32 @end_wait(i64 %address, i64 %step, i64 %clock) {{
  %numbers = inttoptr i64 %address to ptr
  %read_clock = inttoptr i64 %clock to ptr
  %now = alloca [2 x i64]
  %ignored = call i32 %read_clock(i32 {_MONOTONIC}, ptr %now)
  %now_seconds = load i64, ptr %now
  %now_rest_at = getelementptr i64, ptr %now, i64 1
  %now_rest = load i64, ptr %now_rest_at
  %since_at = getelementptr i64, ptr %numbers, i64 3
  %since_seconds = load i64, ptr %since_at
  %since_rest_at = getelementptr i64, ptr %numbers, i64 4
  %since_rest = load i64, ptr %since_rest_at
  %seconds = sub i64 %now_seconds, %since_seconds
  %rest = sub i64 %now_rest, %since_rest
  %whole = mul i64 %seconds, 1000000000
  %time = add i64 %whole, %rest
  %waited_at = getelementptr i64, ptr %numbers, i64 2
  %before = load i64, ptr %waited_at
  %waited = add i64 %before, %time
  store i64 %waited, ptr %waited_at
  %last_at = getelementptr i64, ptr %numbers, i64 1
  store i64 %step, ptr %last_at
  store atomic i64 -1, ptr %numbers release, align 8
  ret i32 0
}}
"""


def begin_wait(address: Any, step: Any, clock: Any) -> Any:
    """Return the call that records at an address that a step begins to wait; `clock` reads the clock."""
    from tvm import tirx

    return tirx.call_extern("int32", _BEGIN, address, step, clock)


def end_wait(address: Any, step: Any, clock: Any) -> Any:
    """Return the call that records that a step's wait has ended."""
    from tvm import tirx

    return tirx.call_extern("int32", _END, address, step, clock)


def with_waits(text: str) -> str:
    """Return LLVM's text of a module with the functions, if it calls them."""
    return with_definitions(text, (_BEGIN, _END), _TEXT)


@cache
def c_function(name: str) -> int:
    """Return the address of a function of the C library, which a kernel calls: `begin_wait` calls ``clock_gettime``."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    assert address is not None
    return address
