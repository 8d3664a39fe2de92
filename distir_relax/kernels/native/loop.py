"""A loop over calls of kernels, which TVM cannot express.

A kernel calls a function that does not exist; in LLVM's text, `with_loop` defines it.
"""

from __future__ import annotations

from typing import Any

from distir_relax.kernels.native.definitions import with_definitions

_LOOP = "call_each"
# An argument is its type and its value; a call is a kernel, its arguments, and their number.
_TEXT = """
%call.argument = type { i32, i32, i64 }
%call = type { ptr, ptr, i32, i32 }

define internal i32 @call_each(i64 %list, i64 %count, i64 %function) {
entry:
  %calls = inttoptr i64 %list to ptr
  %run = inttoptr i64 %function to ptr
  %result = alloca %call.argument
  %is_empty = icmp eq i64 %count, 0
  br i1 %is_empty, label %done, label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %continue ]
  %kernel_at = getelementptr %call, ptr %calls, i64 %i, i32 0
  %kernel = load ptr, ptr %kernel_at
  %arguments_at = getelementptr %call, ptr %calls, i64 %i, i32 1
  %arguments = load ptr, ptr %arguments_at
  %number_at = getelementptr %call, ptr %calls, i64 %i, i32 2
  %number = load i32, ptr %number_at
  store %call.argument zeroinitializer, ptr %result
  %status = call i32 %run(ptr %kernel, ptr %arguments, i32 %number, ptr %result)
  %is_well = icmp eq i32 %status, 0
  br i1 %is_well, label %continue, label %failed
continue:
  %next = add i64 %i, 1
  %is_last = icmp eq i64 %next, %count
  br i1 %is_last, label %done, label %loop
failed:
  ret i32 %status
done:
  ret i32 0
}
"""


def call_each(calls: Any, count: Any, function: Any) -> Any:
    """Return the status of so many calls at an address by TVM's function for them, which is 0 if all went well."""
    from tvm import tirx

    return tirx.call_extern("int32", _LOOP, calls, count, function)


def with_loop(text: str) -> str:
    """Return LLVM's text of a module with the loop, if it calls it."""
    return with_definitions(text, (_LOOP,), _TEXT)
