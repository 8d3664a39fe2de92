"""Kernels for Arm, run by qemu on the memory of this process: ``python -m tests.kernels.emulated``.

It needs ``qemu-aarch64``, of the system's packages, and ziglang. A trial's kernel is compiled to a program that maps
the memory of all tensors where this process has it.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import struct
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from distir_relax.kernels.native import use_openmp
from distir_relax.kernels.native.compiler import zig
from distir_relax.kernels.native.load import Kernel, NativeKernel
from distir_relax.kernels.native.trials import TRIALS


class Emulated(Kernel):
    """A kernel as a program for Arm."""

    def __init__(self, emulator: str, program: Path) -> None:
        super().__init__(None)
        self._command = emulator, str(program)

    def __call__(self, *arguments: int | float) -> None:
        given = [
            struct.pack("=iid", 3, 0, x) if isinstance(x, float) else struct.pack("=iiq", 1, 0, x) for x in arguments
        ]
        regions = {
            (storage.data_ptr(), storage.nbytes())
            for x in gc.get_objects()
            if type(x) is torch.Tensor and (storage := x.untyped_storage()).nbytes()
        }
        with TemporaryDirectory() as folder:
            file = Path(folder) / "memory"
            parts = [struct.pack("=q", len(given)), *given, struct.pack("=q", len(regions))]
            parts += [
                part for at, size in regions for part in (struct.pack("=qq", at, size), ctypes.string_at(at, size))
            ]
            file.write_bytes(b"".join(parts))
            subprocess.run([*self._command, str(file)], check=True, timeout=100)
            content, position = file.read_bytes(), 8 + 16 * len(given) + 8
            for at, size in regions:
                ctypes.memmove(at, content[position + 16 : position + 16 + size], size)
                position += 16 + size


def compiled(kernel: NativeKernel[Any], arguments: tuple[Any, ...], program: Path) -> None:
    """Write the program of a kernel."""
    made_by = zig()
    assert made_by is not None, "pip install ziglang"
    macros = {"SOURCE": f'"{kernel.source}"', "ENTRY": f"__tvm_ffi_{kernel.name}", **kernel.macros(arguments)}
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    options = [
        "-target",
        "aarch64-linux-musl",
        "-std=c++20",
        "-O3",
        "-static",
        "-nostdlib++",
        "-fno-exceptions",
        "-ffp-contract=off",
    ]
    source = Path(__file__).with_name("emulated.cpp")
    subprocess.run([*made_by.command, *options, *defined, str(source), "-o", str(program)], check=True, timeout=100)


def main() -> None:
    """Run all trials that need no other instructions. Raises AssertionError for a kernel with another result."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    assert emulator is not None, "install qemu-user-static"
    for trial in TRIALS:
        for arguments in trial.samples:
            # Torch's threads are not in the emulated process.
            if len(trial.kernel.needs(arguments)) > 1 or trial.kernel is use_openmp:
                continue
            with TemporaryDirectory() as folder:
                program = Path(folder) / "kernel"
                compiled(trial.kernel, arguments, program)
                trial.check(Emulated(emulator, program), arguments)
            print(f"{trial.kernel.name}{arguments}: as torch", flush=True)


if __name__ == "__main__":
    main()
