"""The C++ compiler for kernels: that of the system, or the one in the package `ziglang`.

The system's is ``$CXX``, ``c++``, ``g++`` or ``clang++``, whichever is found first.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from distir_relax.kernels.native.target import Target, host_target

INSTALL_HINT = "install a C++ compiler, or: pip install 'distir-relax[native]'"
_OPTIONS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    # Products and sums are rounded as written, and vectors may be computed without regard to flags of errors.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_SECONDS = 100


class CompilerError(RuntimeError):
    """The compiler has failed; the message is its first error."""


@dataclass(frozen=True)
class Compiler:
    """A compiler by its command. One that is `for_any` architecture compiles for others than this machine's."""

    command: tuple[str, ...]
    for_any: bool = False

    def compile(self, source: Path, library: Path, macros: Mapping[str, str], target: Target) -> None:
        """Write the shared library of a file for a target. Raises CompilerError."""
        options = [f"-m{feature}" for feature in sorted(target.features)] if target.architecture == "x86_64" else []
        if self.for_any:
            # Kernels need nothing of C++'s library.
            options += ["-target", f"{target.architecture}-linux-gnu", "-nostdlib++"]
        elif target.architecture != host_target().architecture:
            raise CompilerError(
                f"{self.command[0]} compiles for {host_target().architecture}, not {target.architecture}"
            )
        defined = [f"-D{name}={value}" for name, value in macros.items()]
        command = [*self.command, *_OPTIONS, *options, *defined, "-o", str(library), str(source)]
        # The compiler looks for its parts in the path. Zig's own cache goes with the library's folder.
        environment = {"PATH": os.defpath, **os.environ, "ZIG_LOCAL_CACHE_DIR": str(library.parent)}
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
                check=False, env=environment,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerError(f"{self.command[0]}: {error}") from None
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            first = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
            raise CompilerError(f"{self.command[0]} failed: {first}")


@cache
def host_compiler() -> Compiler | None:
    """Return the compiler for this machine; None if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]):
        return Compiler(tuple(named))
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return Compiler((found,)) if found else zig()


@cache
def zig() -> Compiler | None:
    """Return the compiler in the package `ziglang`, which compiles for any architecture; None without it."""
    if find_spec("ziglang") is None:
        return None
    return Compiler((sys.executable, "-P", "-m", "ziglang", "c++"), for_any=True)
