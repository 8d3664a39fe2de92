"""Compilation of a rank's program for TVM's virtual machine, from the text of the ranked stage.

What depends on weights alone is left to torch, which packs them too (`executable.Hoist`). TVM fuses and compiles what
every call runs, in a child process (`kernels.isolated_calls`), with kernels of ours in place of some ops. Compiled
programs are kept on disk (`kernels.compiled_files`).
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from distir_relax.errors import ParseError, RunError, UnsupportedOpError
from distir_relax.kernels.compiled_files import (
    compiled_folder,
    compiled_key,
    is_usable,
    one_compiles,
    write_compiled,
)
from distir_relax.kernels.isolated_calls import call_isolated
from distir_relax.kernels.native.load import kernel_sources
from distir_relax.kernels.native.target import Target, host_target
from distir_relax.runtime.backends.tvm import kernels
from distir_relax.runtime.backends.tvm.compiled_program import Compiled
from distir_relax.runtime.backends.tvm.legalizations import legalizations
from distir_relax.runtime.backends.tvm.machine_code import MachineCode, machine_code
from distir_relax.runtime.backends.tvm.nonfinite import nan_legalizations, order_by_torch
from distir_relax.runtime.backends.tvm.own_kernels import relax_function, with_own_kernels
from distir_relax.runtime.backends.tvm.vector_functions import exp


@dataclass(frozen=True)
class ProgramText:
    """The program `entry` of a `text` of the ranked stage. With `fast_math`, NaN need not be preserved."""

    text: str
    entry: str
    fast_math: bool = False


def compile_program(program: ProgramText, threads: int = 1) -> Compiled:
    """Compile a program.

    Ranks of one process that run the same program share the result, and processes of this user its file on disk.
    The text is verified. Raises ParseError for one that is no program, UnsupportedOpError for an op that Relax lacks,
    RunError when TVM cannot compile it here, and IsolatedCallError if its compiler does not end, or ends its process.
    """
    key = (program, threads)
    with _lock:
        compiled = _compiled.get(key)
        if compiled is None:
            compiled = _compiled[key] = _load_or_compile(*key)
        return compiled


_lock = threading.Lock()
_compiled: weakref.WeakValueDictionary[tuple[ProgramText, int], Compiled] = weakref.WeakValueDictionary()
"""Programs that some rank of this process still references."""


def _load_or_compile(program: ProgramText, threads: int) -> Compiled:
    folder = compiled_folder()
    if folder is None:
        return _compile_apart(program, threads)
    sources = kernel_sources(*map(str, _sources()))
    file = folder / f"program-{compiled_key(sources, program, threads)}.bin"
    found = _read_file(file)
    if found is None:
        with one_compiles(file):
            found = _read_file(file)  # another process may have compiled it
            if found is None:
                found = _compile_apart(program, threads)
                write_compiled(found.to_bytes(), file)
    return found


def _sources() -> Iterator[Path]:
    """Iterate over the files of the code that decides what a text is compiled to."""
    package = Path(__file__).parents[3]
    yield from Path(__file__).parent.glob("*.py")
    yield from (package / "lowering" / "emit").glob("*.py")
    yield from (package / "lowering" / "executable").glob("*.py")
    yield from (package / "ops").rglob("*.py")


def _read_file(file: Path) -> Compiled | None:
    """Return the program of a file; None if there is none, or it was damaged."""
    with suppress(OSError, ValueError):
        return Compiled.from_bytes(file.read_bytes()) if is_usable(file) else None
    return None


_MOST_SECONDS = 1200.0
"""Seconds for the compilation of a program; the largest in use take minutes."""


def _compile_apart(program: ProgramText, threads: int) -> Compiled:
    """Compile a program in a child process, which also makes the machine code, and runs code for this target once."""
    try:
        return Compiled.from_bytes(call_isolated(_compiled_bytes, program, threads, seconds=_MOST_SECONDS))
    except (ParseError, UnsupportedOpError):
        # Ops that a user's script has defined exist in this process alone.
        return _compile(program, threads)


def _compiled_bytes(program: ProgramText, threads: int) -> bytes:
    compiled = _compile(program, threads)
    _try_target()
    return compiled.to_bytes()


@cache
def _try_target() -> None:
    """Run machine code for the host's target, which ends the process if the processor cannot run it."""
    import tvm
    from tvm import te

    x = te.placeholder((64,), "float32")
    function = te.create_prim_func([x, te.compute((64,), lambda i: exp(x(i)))]).with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": function})
    code = machine_code(
        tvm.compile(module, target=tvm.target.Target(tvm_target(host_target()))).mod.inspect_source("ll")
    )
    ones, result = (tvm.runtime.tensor(np.full(64, value, "float32")) for value in (1.0, 0.0))
    code.load()["main"](ones, result)
    np.testing.assert_allclose(result.numpy(), np.e, rtol=1e-6)


def machine(threads: int) -> tuple[Any, kernels.Machine]:
    """Return the target for this host's CPU, and the machine parameters of the kernels."""
    import tvm

    host = host_target()
    is_wide = "avx512f" in host.features
    return tvm.target.Target(tvm_target(host)), kernels.Machine(64 if is_wide else 32, 12 if is_wide else 6, threads)


def tvm_target(target: Target) -> dict[str, Any]:
    """Return the description of TVM's target."""
    attributes = [f"+{feature}" for feature in sorted(target.features)]
    described = {"kind": "llvm", "mtriple": f"{target.architecture}-unknown-linux-gnu", "mattr": attributes}
    if target.architecture == "x86_64":
        described["mcpu"] = "x86-64-v3" if target.features >= _LEVEL else "x86-64"
    return described


_LEVEL = {"sse4.2", "popcnt", "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
"""The features of the third level of x86-64, from which LLVM takes how long instructions take."""


def _compile(program: ProgramText, threads: int) -> Compiled:
    import tvm
    from tvm import relax

    module, preparation, arguments, packed = _emit(program)
    target, host = machine(threads)
    try:
        module = relax.transform.EliminateCommonSubexpr()(module)
        function = relax_function(module)
        module = with_own_kernels(module, host)
        with target, tvm.transform.PassContext(opt_level=3):
            lowered = tvm.ir.transform.Sequential(_passes(["main"], program.fast_math))(module)
        executable = relax.build(lowered, target, relax_pipeline=None)
        schedule = [str(call) for call in function.attrs["distir.schedule"]]
        check_schedule(executable, schedule)
    except (tvm.error.InternalError, ValueError, TypeError, RuntimeError) as wrong:
        last = str(wrong).strip().splitlines()[-1]
        raise RunError(f"TVM cannot compile the program: {last}", hint="--backend torch runs it without TVM") from wrong
    return Compiled(
        bytecode=_bytecode(executable),
        kernels=_kernels(executable),
        preparation=preparation,
        arguments=arguments,
        packed=packed,
        outputs=int(function.attrs["distir.outputs"]),
        steps={
            int(step): str(what) if isinstance(what, str) else [str(text) for text in what]
            for step, what in function.attrs["distir.steps"].items()
        },
        calls=frozenset(call.partition(" ")[0] for call in schedule),
        sizes=tuple(map(str, function.attrs.get("distir.sizes", ()))),
    )


def _kernels(executable: Any) -> MachineCode | None:
    """Return the kernels of an executable, if it has any: their parallel loops may use torch's threads."""
    text = next((m.inspect_source("ll") for m in executable.mod.imports if m.kind == "llvm"), None)
    return None if text is None else machine_code(text)


def _bytecode(executable: Any) -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "bytecode"
        executable.mod.write_to_file(str(file), "relax.VMExecutable")
        return file.read_bytes()


def check_schedule(executable: Any, expected: Sequence[str]) -> None:
    """Compare the communicator's calls in the function `main` of an executable with the schedule, call by call.

    Ranks that do not call the same collectives in the same order deadlock or exchange wrong data. Raises RunError where
    the executable has another call than the schedule (``all_reduce 3``, the op and its step).
    """
    actual = calls_of(executable.as_text(), "main")
    for place, (call, other) in enumerate(zip_longest(expected, actual, fillvalue="none"), 1):
        if call != other:
            raise RunError(
                f"TVM has changed the order of communication: as call {place} expected {call}, found {other}",
                hint="--backend torch runs the program without TVM; please report this with the bundle",
            )


def calls_of(text: str, function: str) -> list[str]:
    """Return the communicator's calls in a function of an executable, given as text, in order: ``all_reduce 3``."""
    body = text.partition(f"@{function}:\n")[2].partition("\n\n")[0]
    return [f"{name} {step}" for name, step in _CALL.findall(body)]


_CALL = re.compile(r"^ *call +distir\.(\w+) +in:.*?\bi(\d+),", re.MULTILINE)
"""A call of the communicator in an executable's text: its step is the only number among the arguments."""


def _reshapes_as_views(module: Any) -> Any:
    """Replace kernels that only reshape by views; copies remain if TVM's analysis fails, on some symbolic sizes."""
    import tvm

    try:
        return tvm.relax.transform.RewriteDataflowReshape()(module)
    except tvm.error.InternalError:
        return module


def _without_dead_tuples(module: Any) -> Any:
    """Remove dead tuples, which would keep their tensors alive until the program ends."""
    from tvm import relax

    for var, function in module.functions.items():
        if not isinstance(function, relax.Function):
            continue
        used = set(relax.analysis.all_vars(function.body.body))
        blocks = []
        for block in reversed(function.body.blocks):
            live = []
            for binding in reversed(block.bindings):
                if binding.var in used or not isinstance(binding.value, relax.Tuple):
                    used.update(relax.analysis.all_vars(binding.value))
                    live.append(binding)
            blocks.append(relax.BindingBlock(live[::-1]))
        body = relax.SeqExpr(blocks[::-1], function.body.body)
        module[var] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    return module


def _emit(program: ProgramText) -> tuple[Any, str, tuple[str, ...], tuple[str, ...]]:
    """Return the Relax module of what every call runs, and as in `Compiled`: preparation, arguments, packed weights."""
    from distir_relax.executable.hoist import Hoist
    from distir_relax.executable.plan_memory import PlanMemory
    from distir_relax.executable.select_kernels import SelectKernels
    from distir_relax.ir import PACKED, gc_disabled, inline, parse, program_of
    from distir_relax.layout import assuming
    from distir_relax.lowering.emit.relax import packed_weights, to_relax_executable
    from distir_relax.lowering.emit.torch import print_preparation

    with gc_disabled():
        module = parse(program.text)
    with assuming(module.guards):
        hoisted = Hoist(sizes=False).run(inline(program_of(module, program.entry)))
        executable = PlanMemory(of_weights=True).run(hoisted)
        preparation = print_preparation(SelectKernels().run(executable), program.entry)
        relax = to_relax_executable(executable, program.fast_math)
    arguments = (i.value for i in executable.main.inputs if i.value.tensor.form != PACKED)
    return relax, preparation, tuple(v.name for v in arguments), tuple(packed_weights(executable.main))


def _module_pass(run: Callable[[Any], Any]) -> Any:
    import tvm

    return tvm.transform.module_pass(lambda module, _: run(module), opt_level=0)


def _passes(functions: list[str], fast_math: bool) -> list[Any]:
    from tvm.relax import backend
    from tvm.relax import transform as relax

    return [
        relax.DeadCodeElimination(functions),
        *([] if fast_math else [_module_pass(order_by_torch)]),
        backend.DispatchSortScan(),
        relax.LegalizeOps({**legalizations(), **({} if fast_math else nan_legalizations())}),
        # Reshapes become views before fusion, so that they do not complicate the loops of other ops.
        _module_pass(_reshapes_as_views),
        relax.AnnotateTIROpPattern(),
        relax.FuseOps(2),
        relax.FuseTIR(),
        relax.DeadCodeElimination(functions),
        relax.ToNonDataflow(),
        relax.RemovePurityChecking(),
        relax.CallTIRRewrite(),
        relax.CanonicalizeBindings(),
        _module_pass(_without_dead_tuples),
        relax.StaticPlanBlockMemory(),
        relax.LowerAllocTensor(),
        relax.KillAfterLastUse(),
        relax.LowerRuntimeBuiltin(),
        relax.ComputePrimValue(),
        relax.VMShapeLower(),
        relax.AttachGlobalSymbol(),
    ]
