"""Environment checks of `distir doctor`, with suggested fixes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from distir_relax.errors import DistIRError, RunError
from distir_relax.kernels.measured import forget_choices, kept_choices
from distir_relax.kernels.native import host_target
from distir_relax.kernels.native.compiler import INSTALL_HINT, host_compiler
from distir_relax.kernels.native.load import forget_declined
from distir_relax.runtime.launch import find_mpirun, launch_environment, mpirun_command
from distir_relax.runtime.launcher_detection import check_connected, detect

FFI_PIN = "0.1.14.post1"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `essential` ones must be ok for models to be compiled and run at all."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    essential: bool = True


def examine() -> Iterator[Finding]:
    """Run all checks, yielding each finding as it is made."""
    for check in _CHECKS:
        yield check()


def two_ranks() -> None:
    """Run a real all-reduce as one of the two ranks that the MPI check starts. Exits with an error on a wrong sum."""
    import torch

    from distir_relax.layout import DeviceMesh
    from distir_relax.runtime.join import connect

    comm = connect(DeviceMesh((2,), ("pair",)))
    if comm is None:
        raise SystemExit("started without an MPI launcher")
    total = comm.all_reduce(torch.arange(4.0) * (comm.rank + 1), "pair", "sum")
    if total.tolist() != [0.0, 3.0, 6.0, 9.0]:
        raise SystemExit(f"the all-reduce gave {total.tolist()}")


def _python() -> Finding:
    installed = platform.python_version()
    return Finding("Python", sys.version_info >= (3, 11), installed, "install Python 3.11 or newer")


def _packages() -> Finding:
    names = ("torch", "numpy", "safetensors")
    missing = [name for name in names if _version(name) is None]
    detail = ", ".join(f"{name} {_version(name) or 'missing'}" for name in names)
    return Finding("packages", not missing, detail, f"pip install {' '.join(missing)}")


def _launcher() -> Finding:
    try:
        check_connected()
    except RunError as wrong:
        return Finding("launcher", False, f"{wrong.message} ({wrong.where})", wrong.hint)
    kinds = {"mpi": "an MPI launcher", "torch": "torchrun", None: "none: distir run has ranks as threads"}
    return Finding("launcher", True, kinds[detect()])


def _threads() -> Finding:
    try:
        import torch
    except ImportError as wrong:
        return Finding("torch threads", False, str(wrong), "pip install torch")
    cores = len(os.sched_getaffinity(0))
    detail = f"{torch.get_num_threads()} threads on {cores} cores; ranks of a launch share the cores"
    return Finding("torch threads", True, detail)


def _mpi4py() -> Finding:
    installed = _version("mpi4py")
    return Finding("mpi4py", installed is not None, installed or "missing", "pip install mpi4py", essential=False)


def _mpirun() -> Finding:
    try:
        launcher = find_mpirun()
    except RunError as wrong:
        return Finding("mpirun", False, wrong.message, wrong.hint, essential=False)
    return Finding("mpirun", True, f"{launcher.version} at {launcher.path}", essential=False)


def _all_reduce() -> Finding:
    name = "all-reduce on 2 ranks"
    fix = "mpi4py and mpirun must be of the same MPI: pip install 'distir-relax[mpi]'"
    try:
        program = [sys.executable, "-P", "-c", "from distir_relax.runtime.doctor import two_ranks; two_ranks()"]
        command = mpirun_command(find_mpirun(), 2, program, "1")
        with tempfile.TemporaryDirectory() as folder:
            environment = launch_environment("1", folder)
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    except DistIRError as wrong:
        return Finding(name, False, wrong.message, wrong.hint, essential=False)
    except subprocess.TimeoutExpired:
        return Finding(name, False, "no answer within 60 s", fix, essential=False)
    detail = "right" if done.returncode == 0 else _last_line(done.stderr, done.returncode)
    return Finding(name, done.returncode == 0, detail, fix, essential=False)


def _tvm() -> Finding:
    fix = f"pip install apache-tvm 'apache-tvm-ffi=={FFI_PIN}'"
    installed = _version("apache-tvm")
    if installed is None:
        return Finding("TVM", False, "missing: only the torch backend works", fix, essential=False)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", "import tvm"], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("TVM", False, "cannot be imported within 120 s", fix, essential=False)
    detail = installed if done.returncode == 0 else _last_line(done.stderr, done.returncode)
    return Finding("TVM", done.returncode == 0, detail, fix, essential=False)


def _tvm_ffi() -> Finding:
    installed = _version("apache-tvm-ffi")
    fix = f"pip install 'apache-tvm-ffi=={FFI_PIN}': newer ones crash when a module is saved"
    return Finding("TVM's ffi", installed == FFI_PIN, installed or "missing", fix, essential=False)


def _kernels() -> Finding:
    """Which code computes products, and small ops."""
    try:
        import torch
    except ImportError as wrong:
        return Finding("kernels", False, str(wrong), "pip install torch", essential=False)

    from distir_relax.kernels.native import MOST_ELEMENTS, moving_square
    from distir_relax.kernels.packing import pack_linear

    kinds = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = pack_linear(torch.ones(128, 64, dtype=dtype), rows=16)
        by = "native kernels and oneDNN" if layer.by_panels else "oneDNN" if layer.packed else "torch"
        kinds.append(f"{str(dtype).removeprefix('torch.')} products by {by}")
    works = moving_square() is not None
    small = f"ops of up to {MOST_ELEMENTS:,} elements by {'native kernels' if works else 'torch'}"
    fix = "DISTIR_NATIVE=0 is set, or there is no compiler, or it fails here: see the next lines"
    return Finding("kernels", works, "; ".join([*kinds, small]), fix, essential=False)


def _compiler() -> Finding:
    """What compiles kernels."""
    compiler = host_compiler()
    detail = "none: torch's ops are used instead" if compiler is None else " ".join(compiler.command)
    return Finding("C++ compiler", compiler is not None, detail, INSTALL_HINT, essential=False)


def _declined_kernels() -> Finding:
    """Which native kernels this machine declines, and why: one of each kind is compiled, and run against torch."""
    try:
        from distir_relax.kernels.native.trials import TRIALS
    except ImportError as wrong:
        return Finding("declined kernels", False, str(wrong), "pip install torch", essential=False)
    if os.environ.get("DISTIR_NATIVE") == "0":
        return Finding("declined kernels", False, "all: DISTIR_NATIVE=0 is set", "unset it", essential=False)
    by_reason: dict[str, list[str]] = {}
    failed = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for trial in TRIALS:
            plain = trial.kernel.needs(trial.samples[0])
            for arguments in trial.samples[:1] + [one for one in trial.samples if trial.kernel.needs(one) != plain]:
                if trial.kernel(*arguments) is not None:
                    continue
                shown = f"{trial.kernel.name}({', '.join(map(str, arguments))})"
                by_reason.setdefault(trial.kernel.declined[arguments], []).append(shown)
                # That the processor lacks an instruction is no fault of the machine.
                failed |= not host_target().missing(trial.kernel.needs(arguments))
    detail = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()) or "none"
    fix = "torch is used instead; `distir doctor --measure` tries again, please report what it says"
    return Finding("declined kernels", not failed, detail, fix, essential=False)


def _choices() -> Finding:
    """Choices between kernels that were measured on this machine."""
    texts, busy = list[str](), False
    for choice in kept_choices():
        times = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in choice.seconds.items())
        texts.append(f"{choice.name}: {choice.chosen} ({times})")
        busy |= choice.is_beside_other_work
    fix = "other processes ran during a measurement: `distir doctor --measure` on a quiet machine"
    return Finding("measured choices", not busy, "; ".join(texts) or "none yet", fix, essential=False)


def measure_again() -> None:
    """Forget the measured choices and the declined kernels of this machine, and measure again."""
    from distir_relax.kernels import packing, products

    forget_choices()
    forget_declined()
    packing.measure_choices()
    products.measure_choices()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _last_line(text: str, code: int) -> str:
    lines = [line for line in text.splitlines() if line.strip(" -")]
    return lines[-1] if lines else f"exit code {code}"


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python, _packages, _launcher, _threads, _mpi4py, _mpirun, _all_reduce, _tvm, _tvm_ffi, _compiler, _kernels,
    _declined_kernels, _choices,
)  # fmt: skip
