"""Bisection of a plan: the first value that is wrong, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from distir_relax.bisection.diagnose import Diagnosis, diagnose
from distir_relax.bisection.ranking import rank_errors
from distir_relax.bisection.reference import Reference, ReferenceValue
from distir_relax.bisection.result import Bisection, WrongValue
from distir_relax.bisection.rounding import DEFAULT_TOLERANCE
from distir_relax.bisection.search import DEFAULT_MEMORY, Expect, Findings, Search, layouts_of
from distir_relax.bisection.subject import Subject
from distir_relax.bundle import Bundle, BundleFile, ReadOptions, read_bundle
from distir_relax.errors import DistIRError
from distir_relax.ir import print_op
from distir_relax.layout import assuming
from distir_relax.runtime.backends import Load
from distir_relax.runtime.launched import RankOptions, ending_launch, open_session
from distir_relax.runtime.npz import read_npz
from distir_relax.runtime.sequence_calls import PreparedCall, SequenceCalls
from distir_relax.runtime.session import Session
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import ALONE, World

if TYPE_CHECKING:
    import numpy as np
    import torch

    from distir_relax.runtime.arrays import Array


@dataclass(frozen=True)
class BisectOptions:
    """Options of a bisection, see `bisect`."""

    against: Bundle | None = None
    against_backend: str | None = None
    tolerance: float = DEFAULT_TOLERANCE
    exact: bool = False
    top: int = 10
    memory: int = DEFAULT_MEMORY
    timeout: float = DEFAULT_TIMEOUT


def bisect(
    bundle: Bundle | str | Path,
    inputs: Mapping[str, Array] | str | Path,
    backend: str = "torch",
    device: str = "cpu",
    *,
    against: Bundle | str | Path | None = None,
    against_backend: str | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    exact: bool = False,
    top: int = 10,
    memory: int = DEFAULT_MEMORY,
    timeout: float = DEFAULT_TIMEOUT,
    **reading: Unpack[ReadOptions],
) -> Bisection:
    """Run a plan and its model side by side, and find the first value of the plan that differs beyond rounding.

    `bundle` is a path or a bundle (``plan.bundle()``), `inputs` are global arrays by name, or an ``.npz`` file of them.
    The ranks are threads of this process and run on `backend` and `device`. The model is the bundle's program on whole
    tensors, run op by op (`reference`), in float64 if `exact`. A value may have `tolerance` times the rounding error of
    the model.

    With `against_backend` the values of another backend are expected instead, with `against` those of another bundle.
    If that has weights of other dtypes, no value is wrong; the result has the `top` ops by the error that they add.

    Recorded values take up to `memory` bytes at once; more are recorded in several runs. `timeout` and `reading`
    (`ReadOptions`) are as for `load` and its result; the bundle to compare with must be signed, too.

    Raises a `DistIRError`: for a bundle or inputs that cannot be read or do not fit, for a bundle without a sharded
    stage, for an encoder-decoder, and for errors of the run.
    """
    subject_bundle = _read(bundle, reading)
    arrays = read_npz(inputs) if isinstance(inputs, (str, Path)) else inputs
    key = reading.get("require_signature")
    other = None if against is None else _read(against, {"require_signature": key})
    options = BisectOptions(other, against_backend, tolerance, exact, top, memory, timeout)
    check_options(subject_bundle, options)
    return run_bisection(_on_threads(subject_bundle, backend, device, arrays, timeout), arrays, options)


def check_options(bundle: Bundle, options: BisectOptions) -> None:
    """Raise `DistIRError` for options that exclude each other, and for a bundle that cannot be bisected."""
    if options.against is not None and options.against_backend is not None:
        raise DistIRError("expected another bundle or another backend to compare with, found both")
    for part in (bundle, options.against):
        if part is not None and part.encoder is not None:
            raise DistIRError(
                "an encoder-decoder cannot be bisected: its decoder continues what the encoder computed",
                str(part.path or part.manifest.name),
                "bisect a bundle of distir compile without --generate",
            )
    if options.tolerance <= 0 or options.memory <= 0:
        raise DistIRError("expected a tolerance and a memory above 0")


def bisect_file(
    file: BundleFile, inputs: Path, options: BisectOptions, ranks: RankOptions, world: World = ALONE
) -> Bisection | None:
    """Bisect a bundle as one rank of a launch, or alone; return the result on rank 0, None elsewhere.

    Rank 0 collects the recorded values and computes the model. A `DistIRError` that all ranks have is raised; that of
    one rank is printed and ends the launch.
    """

    def read(bundle: Bundle) -> dict[str, np.ndarray[Any, Any]]:
        if not world.is_alone and (options.against is not None or options.against_backend is not None):
            raise DistIRError(
                "ranks of a launch are compared with the model, found --against",
                hint="leave out mpirun: the ranks are threads then",
            )
        check_options(bundle, options)
        arrays = read_npz(inputs)
        prepare(bundle, arrays)
        return arrays

    with ending_launch(world):
        # Alone, each run has the memory for its weights alone.
        session, arrays = open_session(world, file, ranks, read, loads=not world.is_alone)

        def open_with(load: Load | None) -> Session:
            if load is None and not world.is_alone:
                return session
            where = (ranks.backend, ranks.device, ranks.timeout)
            return Session(session.bundle, *where, load=load, world=world, verified=load is not None)

        subject = Subject(session.bundle, ranks.backend, open_with, arrays, world)
        if world.rank != 0:
            subject.serve()
            return None
        result = run_bisection(subject, arrays, options)
        subject.close()
        return result


def prepare(bundle: Bundle, inputs: Mapping[str, Array]) -> PreparedCall:
    """Return the call of a bundle with these inputs. Raises RunError for inputs that do not fit."""
    return SequenceCalls(bundle).of(inputs)[1]


def run_bisection(subject: Subject, inputs: Mapping[str, Array], options: BisectOptions) -> Bisection:
    """Bisect a subject; see `bisect`."""
    start = time.perf_counter()
    bundle = subject.bundle
    prepared = prepare(bundle, inputs)
    with assuming(bundle.manifest.guards):
        reference = Reference(bundle, prepared)
        search = Search(
            subject, reference, layouts_of(bundle, prepared), prepared, options.tolerance, options.exact, options.memory
        )
        result = Bisection(str(bundle.path or bundle.manifest.name), bundle.manifest.mesh.size, subject.backend)
        result = replace(result, ops=len(reference.module.main.ops), against=_against(options))
        if options.against is not None and _dtypes(options.against) != _dtypes(bundle):
            result = _rank(search, options, inputs, result)
        else:
            _check_products(reference)
            result = _search(search, options, inputs, result)
    return replace(result, runs=search.runs, seconds=time.perf_counter() - start)


def _check_products(reference: Reference) -> None:
    """Raise `DistIRError` for a program whose products round their inputs to 8 bits.

    Inputs that differ by one bit may be rounded to different numbers, so that no bound tells faults from rounding.
    """
    for op in reference.module.main.ops:
        dtypes = [value.dtensor.dtype for value in op.operands]
        if len(dtypes) > 1 and "float" in dtypes[0] and not {"int8", "uint8"}.isdisjoint(dtypes[1:]):
            raise DistIRError(
                "products with quantized weights round their inputs to 8 bits: they are no exact form of the model",
                op.location,
                "--against a bundle in float32 ranks the ops by the error that they add",
            )


def _rank(search: Search, options: BisectOptions, inputs: Mapping[str, Array], result: Bisection) -> Bisection:
    assert options.against is not None
    errors = rank_errors(search, Reference(options.against, prepare(options.against, inputs)))
    return replace(result, values=len(errors), errors=tuple(errors[: options.top]), is_ranking=True)


def _search(search: Search, options: BisectOptions, inputs: Mapping[str, Array], result: Bisection) -> Bisection:
    search.runs += 1
    outputs = search.subject.run().outputs
    findings = search.compare(_other(search, options, inputs))
    if result.against and not findings.names:
        raise DistIRError(
            "the two bundles have no value in common",
            _against(options),
            "compare bundles of one model, with the same number of microbatches",
        )
    differences = search.check_outputs(outputs, findings)
    wrong_outputs = tuple(n for n, d in differences.items() if d.error > search.output_bound(n, findings))
    is_hidden = False
    if not findings.wrong and wrong_outputs:
        recorded = search.check_outputs(search.outputs, findings)
        is_hidden = all(d.error <= search.output_bound(n, findings) for n, d in recorded.items())
        findings = search.probe(findings) if is_hidden else findings
    return replace(
        result,
        values=len(findings.names),
        wrong=_first(search, findings),
        wrong_values=len({wrong.name for wrong in findings.wrong}),
        outputs={name: d.error for name, d in differences.items()},
        wrong_outputs=wrong_outputs,
        headroom=findings.headroom,
        is_hidden=is_hidden,
    )


def _first(search: Search, findings: Findings) -> WrongValue | None:
    first = findings.first()
    if not first:
        return None
    worst = first[0]
    last = search.layouts.op_of(worst.values[0])
    ranks = {value.rank for wrong in first for value in wrong.values}
    other = Diagnosis(last, worst.values[0].rank, "other")
    diagnosis = diagnose(search, findings, worst) if worst.disagrees else other
    return WrongValue(
        worst.name,
        print_op(diagnosis.op),
        diagnosis.op.location,
        tuple(sorted(ranks if diagnosis.op is last else {diagnosis.rank})),
        worst.difference.error,
        worst.bound,
        worst.index,
        worst.difference.found,
        worst.difference.expected,
        diagnosis.cause,
    )


def _other(
    search: Search, options: BisectOptions, inputs: Mapping[str, Array]
) -> Callable[[Sequence[str]], Expect] | None:  # fmt: skip
    """Return what a chunk of values expects of another run; None for the reference."""
    if options.against is None and options.against_backend is None:
        return None
    bundle = options.against or search.subject.bundle
    backend = options.against_backend or search.subject.backend
    subject = _on_threads(bundle, backend, "cpu", inputs, options.timeout)
    prepared = prepare(bundle, inputs)
    other = replace(search, subject=subject, layouts=layouts_of(bundle, prepared), prepared=prepared, runs=0)

    def expected_of(chunk: Sequence[str]) -> Expect:
        taps = other.record([name for name in chunk if name in other.layouts.layouts])
        search.runs += 1

        def expect(value: ReferenceValue) -> torch.Tensor | None:
            if value.name not in other.layouts.layouts:
                return None
            whole = other.layouts.assemble(value.name, taps)
            return whole if whole is None or whole.shape == value.tensor.shape else None

        return expect

    return expected_of


def _on_threads(bundle: Bundle, backend: str, device: str, inputs: Mapping[str, Array], timeout: float) -> Subject:
    return Subject(bundle, backend, lambda load: Session(bundle, backend, device, timeout, load=load), inputs)


def _against(options: BisectOptions) -> str:
    if options.against is not None:
        return str(options.against.path or options.against.manifest.name)
    return options.against_backend or ""


def _dtypes(bundle: Bundle) -> list[str]:
    return sorted(tensor.dtype for tensor in bundle.manifest.weights)


def _read(bundle: Bundle | str | Path, reading: ReadOptions) -> Bundle:
    if not isinstance(bundle, Bundle):
        return read_bundle(bundle, **reading)
    if reading.get("require_signature") is not None:
        raise DistIRError("expected the path of a signed bundle, found a bundle in memory", "require_signature")
    return bundle
