"""Many mutated bundles, loaded under an audit hook: ``python -m tests.fuzz_bundles COUNT [SEED [KIND…]]``.

A bundle that fails is printed with its seed: the same seed makes the same bundle again. Exits 1 then.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

import torch

import distir_relax
from distir_relax.bundle import Bundle, read_bundle
from distir_relax.errors import DistIRError
from distir_relax.ir import parse, parse_records
from distir_relax.proof import check_projection
from distir_relax.runtime.requests.sequence_program import load_sequence_programs
from distir_relax.runtime.session import Session
from distir_relax.runtime.verification import read_stage
from distir_relax.text import Tokenizer
from tests.bundle_kinds import KINDS, Files, files_of
from tests.bundle_mutations import ROOT, Entries, mutated_bundle, outside, write
from tests.generated_code import problem_of
from tests.readers import SMALL

MOST_SECONDS = 10.0
MOST_MEMORY = 48 << 20
"""Bytes by which the process may grow, besides twice the size of the files."""
MOST_TRACED = 24 << 20
"""Bytes of Python objects that loading may hold at once, besides twice the size of the files."""
_PACKAGE = os.path.dirname(distir_relax.__file__)
_GENERATORS = (os.path.join(_PACKAGE, "runtime", "backends", "torch.py"),)
_SIZES = os.path.join(_PACKAGE, "layout", "symbolic_size.py")
_KERNELS = os.path.join(_PACKAGE, "kernels", "")
_FORBIDDEN = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.startfile", "pty.", "socket.",
    "ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function", "ctypes.cdata", "ctypes.string_at", "pickle.find_class",
    "marshal.", "urllib.", "http.", "ftplib.", "smtplib.", "shutil.", "tempfile.", "os.remove", "os.rename", "os.mkdir",
    "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.putenv", "os.unsetenv", "os.kill",
    "os.chdir", "sys.addaudithook", "sys.setprofile", "sys.settrace", "code.__new__", "function.__new__", "import",
    "mmap.__new__", "webbrowser.", "sqlite3.", "gc.", "builtins.input", "builtins.breakpoint", "signal.",
)  # fmt: skip


class Audit:
    """What the process does while a bundle is loaded: it may open the bundle's files and compile generated modules.

    Python cannot remove the hook: one is added, and it is inert outside of `watching`.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._outside: frozenset[str] = frozenset()
        self.problems: list[str] = []
        self.sources: dict[str, str] = {}
        """The generated modules that were compiled, by the name of their file."""
        self._is_on = False
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def watching(self, folder: Path, named: Collection[str]) -> Iterator[None]:
        """Record the events of the block; files of `folder` may be read, and those `named` outside."""
        self._folder = os.path.join(os.path.realpath(folder), "")
        self._outside = frozenset(named)
        self.problems, self.sources = [], {}
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "open":
            self._open(*arguments)
        elif event == "compile":
            self._compile(*arguments)
        elif event == "exec":
            self._exec(arguments[0])
        elif event.startswith("ctypes.cdata") and sys._getframe(1).f_code.co_filename.startswith(_KERNELS):
            pass  # a view of memory that torch has packed
        elif event.startswith(_FORBIDDEN):
            self._refuse(f"{event} {arguments!r:.200}")

    def _open(self, path: Any, mode: Any, flags: int) -> None:
        if isinstance(path, int):
            return
        file = os.path.realpath(os.fsdecode(path))
        is_written = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if is_written or not (file.startswith(self._folder) or file in self._outside or file == "/proc/cpuinfo"):
            self._refuse(f"open {file} {mode} {flags:o}")

    def _compile(self, source: Any, file: Any) -> None:
        frame = sys._getframe(2)
        if frame.f_code.co_filename == ast.__file__ and frame.f_back.f_code.co_filename == _SIZES:
            return  # a syntax tree: its execution would be an event of its own
        if source is None or frame.f_code.co_filename not in _GENERATORS:
            self._refuse(f"compile of {source!r:.100} by {frame.f_code.co_filename}")
            return
        self.sources[os.fsdecode(file)] = source if isinstance(source, str) else bytes(source).decode()

    def _exec(self, code: CodeType) -> None:
        if code.co_filename not in self.sources or sys._getframe(2).f_code.co_filename not in _GENERATORS:
            self._refuse(f"exec of {code}")

    def _refuse(self, text: str) -> None:
        lines, frame = [text], sys._getframe(2)
        while frame is not None and len(lines) < 8:  # without the lines' text, which would open files
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        self.problems.append("\n".join(lines))


def load(path: Path) -> tuple[Bundle, Session]:
    """What `distir run`, `generate`, `serve`, `check` and `explain` do with a bundle before it runs."""
    bundle = read_bundle(path)
    # Requests run programs of another form, if the bundle can have them.
    session = Session(bundle, "torch", load_sequences=load_sequence_programs if bundle.manifest.states else None)
    return bundle, session


def read_texts(bundle: Bundle) -> None:
    """Read the texts of other commands: the schedule, the records, the tokenizer."""
    for part in (bundle, bundle.encoder, bundle.evaluation):
        if part is None:
            continue
        errors = []
        for read in (
            lambda part=part: check_projection(read_stage(part, "distributed"), read_stage(part, "ranked", True)),
            lambda part=part: parse(part.stage("sharded")),
            lambda part=part: parse_records(part.records, symbols={s.name: s for s in part.manifest.symbols}),
            lambda part=part: Tokenizer.of(part.texts, part.path),
        ):
            try:
                read()
            except DistIRError as error:
                errors.append(error)


class Fuzz:
    """Loading of mutated bundles, with counts of what became of them."""

    def __init__(self, kinds: Collection[str], run_share: float = 0.1) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        self.valid: dict[str, Files] = {kind: files_of(kind) for kind in kinds}
        self.run_share = run_share
        self.counts: Counter[str] = Counter()
        self.audit = Audit()
        with tempfile.TemporaryDirectory() as name:
            # Imports and compilation on first use are no bundle's doing.
            for number, (kind, files) in enumerate(self.valid.items()):
                for _ in range(2):
                    folder = Path(name) / f"{kind}{number}"
                    problem = self.try_bundle({**files}, folder, Random(0), runs=True)
                    shutil.rmtree(folder, ignore_errors=True)
                assert not problem, f"the valid bundle {kind}: {problem}"
        self.counts.clear()

    def try_seed(self, seed: int, folder: Path) -> str:
        """Return the fault in loading the mutated bundle of this seed; an empty text without one."""
        random = Random(seed)
        kind = random.choice(list(self.valid))
        entries = mutated_bundle(self.valid[kind], seed)
        place = folder / "case"
        problem = self.try_bundle(entries, place, random, random.random() < self.run_share)
        shutil.rmtree(place, ignore_errors=True)
        return f"{kind} {seed}: {problem}" if problem else ""

    def try_bundle(self, entries: Entries, folder: Path, random: Random, runs: bool) -> str:
        """Write a bundle, load it and, if it `runs`, run it; return the fault."""
        size = write({**outside(), **entries}, folder)
        named = {str(file.resolve()) for file in folder.glob("*.safetensors") if file.is_file()}
        traced = random.random() < 0.02
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        start = time.perf_counter()
        if traced:
            tracemalloc.start()
        problem, session = "", None
        with self.audit.watching(folder / ROOT, named):
            try:
                bundle, session = load(folder / ROOT)
                if runs:
                    read_texts(bundle)
                self.counts["loaded"] += 1
            except DistIRError as error:
                self.counts["refused"] += 1
                problem = _unprintable(error)
            except Exception:
                problem = traceback.format_exc(limit=-8)
        seconds = time.perf_counter() - start
        if traced:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > MOST_TRACED + 2 * size:
                problem = problem or f"{peak:,} bytes were held for {size:,} bytes of files"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        if grown > MOST_MEMORY + 2 * size:
            problem = problem or f"{grown:,} bytes were taken for {size:,} bytes of files"
        if not traced and seconds > MOST_SECONDS:
            problem = problem or f"it took {seconds:.1f} s"
        problem = problem or "\n".join(self.audit.problems)
        for file, source in self.audit.sources.items():
            try:
                wrong = problem_of(source)
            except SyntaxError:
                continue  # refused, and not executed
            problem = problem or (f"{file}: {wrong}" if wrong else "")
        if not problem and runs and session is not None:
            problem = self._run(session)
        return problem

    def _run(self, session: Session) -> str:
        """Run a loaded bundle, unless it is large. It may fail, but not hang or end the process."""
        manifest = session.bundle.manifest
        tensors = (*manifest.inputs, *manifest.outputs, *manifest.weights)
        if manifest.states or manifest.symbols or manifest.mesh.size > 8:
            return ""
        if sum(_bytes(t.shape) for t in tensors) > SMALL or not _is_small(session.bundle):
            return ""
        start = time.perf_counter()
        try:
            inputs = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest.inputs}
            session(inputs, timeout=5.0)
            self.counts["run"] += 1
        except Exception as error:
            self.counts[f"run: {type(error).__name__}"] += 1
        seconds = time.perf_counter() - start
        return f"running took {seconds:.1f} s" if seconds > MOST_SECONDS else ""


def _bytes(shape: Collection[int]) -> int:
    total = 8
    for n in shape:
        total *= n
    return total


def _is_small(bundle: Bundle) -> bool:
    ranked = read_stage(bundle, "ranked", verified=True)
    return all(_bytes(v.tensor.shape) <= SMALL for f in ranked.functions for op in f.ops for v in op.results)


def _unprintable(error: DistIRError) -> str:
    try:
        str(error).encode()
    except UnicodeEncodeError:
        return f"an error that cannot be printed: {error!a}"
    return ""


def main(count: int, first: int = 1, only: tuple[str, ...] = ()) -> int:
    """Load `count` mutated bundles, from seed `first` on, of all kinds or those called `only`."""
    fuzz = Fuzz(only or tuple(KINDS))
    # The address space that is left: an allocation of what a file merely names fails.
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))
    start, failed = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            faulthandler.dump_traceback_later(120, exit=True)
            if problem := fuzz.try_seed(seed, Path(folder)):
                failed += 1
                print(problem, flush=True)
            if (seed - first) % 5000 == 4999:
                print(f"{seed - first + 1:,} bundles, {time.perf_counter() - start:.0f} s, {failed} failed", flush=True)
    faulthandler.cancel_dump_traceback_later()
    counts = ", ".join(f"{what} {number:,}" for what, number in fuzz.counts.most_common())
    print(f"{count:,} bundles, {time.perf_counter() - start:.0f} s, {failed} failed ({counts})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    count, first = (*sys.argv[1:3], "1")[:2]
    raise SystemExit(main(int(count), int(first), tuple(sys.argv[3:])))
