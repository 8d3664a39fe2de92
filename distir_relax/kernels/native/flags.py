"""Numbers in shared memory with which processes wait for each other, which TVM cannot express.

A kernel calls functions that do not exist; in LLVM's text, `with_flags` defines them. What a process has written before
it sets a flag is what others read after they have waited for it.
"""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.definitions import with_definitions
from distir_relax.kernels.native.target import Target

_NUMBER, _SET, _WAIT = "number_at", "set_flag", "wait_for_flag"
_SPINS = 256
"""Times that a process looks at a flag before it lets others run, each time again."""
_PAUSE = "llvm.x86.sse2.pause"
_TEXT = """
define internal i64 @number_at(i64 %address) {
  %place = inttoptr i64 %address to ptr
  %number = load i64, ptr %place, align 8
  ret i64 %number
}
define internal i32 @set_flag(i64 %address, i64 %value) {
  %flag = inttoptr i64 %address to ptr
  store atomic i64 %value, ptr %flag release, align 8
  ret i32 0
}

define internal i32 @wait_for_flag(i64 %address, i64 %value, i64 %function) {
entry:
  %flag = inttoptr i64 %address to ptr
  %let_others_run = inttoptr i64 %function to ptr
  br label %look
look:
  %spins = phi i64 [ 0, %entry ], [ %more, %again ], [ %more, %slow ]
  %found = load atomic i64, ptr %flag acquire, align 8
  %is_set = icmp sge i64 %found, %value
  br i1 %is_set, label %done, label %wait
wait:
  PAUSE
  %more = add i64 %spins, 1
  %is_long = icmp sgt i64 %more, SPINS
  br i1 %is_long, label %slow, label %again
again:
  br label %look
slow:
  %ignored = call i32 %let_others_run()
  br label %look
done:
  ret i32 0
}
"""


def number_at(address: Any) -> Any:
    """Return the call that reads the number at an address: once, where a buffer's element may be read again."""
    from tvm import tirx

    return tirx.call_extern("int64", _NUMBER, address)


def set_flag(address: Any, value: Any) -> Any:
    """Return the call that sets the flag at an address."""
    from tvm import tirx

    return tirx.call_extern("int32", _SET, address, value)


def wait_for_flag(address: Any, value: Any, function: Any) -> Any:
    """Return the call that waits until a flag is at least `value`, and calls the C function at times."""
    from tvm import tirx

    return tirx.call_extern("int32", _WAIT, address, value, function)


def with_flags(text: str, target: Target) -> str:
    """Return LLVM's text of a module for a target with the functions, if it calls them."""
    is_x86 = target.architecture == "x86_64"
    lines = _TEXT.replace("SPINS", str(_SPINS)).replace("PAUSE", f"call void @{_PAUSE}()" if is_x86 else "")
    lines += f"\ndeclare void @{_PAUSE}()\n" if is_x86 else ""
    return with_definitions(text, (_NUMBER, _SET, _WAIT), lines)
