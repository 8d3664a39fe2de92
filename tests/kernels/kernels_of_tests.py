"""Kernels that do not compile, in a module that a child process finds."""

from __future__ import annotations

import os
import time
from typing import Any

from distir_relax.kernels.native.load import native
from distir_relax.kernels.native.script import at_address, kernel


@native
def unused(width: int) -> None:
    raise AssertionError(width)


@native
def wrong(width: int) -> None:
    raise ValueError(f"no {width}")


@native
def aborting(width: int) -> None:
    os.write(2, b"LLVM ERROR: Do not know how to split this operator's operand!\n")
    os.abort()


@native
def hanging(width: int) -> None:
    time.sleep(600)


@native
def filling(value: int) -> Any:
    lines = [*at_address("x", "x_", "n", "float32"), "for i in range(n):", f"    x[i] = T.float32({value})"]
    return kernel(["x_: T.int64", "n: T.int64"], lines, {})
