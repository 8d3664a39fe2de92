"""The torch backend: a rank's program is a Python module that can be opened and debugged by name."""

from __future__ import annotations

import linecache
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle
from distir_relax.errors import BundleError
from distir_relax.runtime.backends.recorded_calls import RecordedCalls
from distir_relax.runtime.backends.weights import RankWeights, memory, read_all
from distir_relax.runtime.program_text import torch_text
from distir_relax.runtime.watchdog import Steps

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator


_MAX_SIZES = 8
"""Maximum number of choices of sizes whose prepared values are kept."""
_NO_SIZES: Mapping[str, int] = types.MappingProxyType({})


def load(bundle: Bundle, rank: int, comm: Communicator, device: str = "cpu") -> TorchProgram:
    """See `Backend.load`."""
    program = load_module(bundle, rank, comm, device)
    # A recorded step would leave out additions of users to a module, such as a `print`.
    if device == "cpu" and not bundle.manifest.updates and not bundle.trusted:
        program.record()
    return program


def load_module(
    bundle: Bundle, rank: int, comm: Communicator, device: str, name: str = "", text: str = ""
) -> TorchProgram:
    """Load a rank's program with its weights: that of the bundle, or another `text` of a module called `name`.

    Raises BundleError for a bundle without program text, and for a text that is no program.
    """
    module = load_text(text, name, f"<{bundle.manifest.name}/{name}.py>") if text else _load_module(bundle, rank)
    shards = RankWeights(bundle, rank, device)
    state = {name: shards[name] for name in bundle.manifest.updates if name in shards}
    weights = prepare_weights(module, comm, shards)
    prepare_sizes = getattr(module, "prepare_sizes", None)
    steps, sizes = _steps(module, comm.rank), getattr(module, "SIZES", ())
    return TorchProgram(module.main, comm, weights, steps, state, sizes, prepare_sizes)


def prepare_weights(
    module: types.ModuleType, comm: Communicator, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights as a program's module takes them: the result of its `prepare`, if it has one.

    Raises BundleError if torch rejects an op of it.
    """
    prepare: Callable[..., dict[str, torch.Tensor]] | None = getattr(module, "prepare", None)
    if prepare is None:
        return read_all(weights)
    import torch

    try:
        with torch.inference_mode():
            return read_all(prepare(comm, weights))
    except (RuntimeError, ValueError, TypeError, NameError, IndexError, ArithmeticError) as error:
        # Attributes in a file may be of a kind that torch does not take.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BundleError(f"the program cannot prepare its weights: {reason}", str(module.__file__)) from error


def _steps(module: types.ModuleType, rank: int) -> Steps:
    """Return the description of each step on a rank; for a step in a function, one per call."""
    steps, calls = getattr(module, "STEPS", ()), getattr(module, "CALLS", {})
    if not isinstance(steps, dict):
        return steps

    def at_rank(text: str) -> str:
        return re.sub(r"of rank @(-?\d+)$", lambda distance: f"of rank {rank + int(distance[1])}", text)

    return {
        step: at_rank(what) if isinstance(what, str) else [f"{at_rank(what[1])} in {place}" for place in calls[what[0]]]
        for step, what in steps.items()
    }


class TorchProgram:
    """A `RankProgram` that calls the module's `main(comm, weights, *sizes, *inputs)`, with the sizes called `sizes`.

    `main` takes the result of `prepare_sizes`, if there is one, after the sizes; that of the last sizes is kept. It has
    None for masks that are all true.
    """

    def __init__(
        self, main: Callable[..., Any], comm: Communicator, weights: dict[str, torch.Tensor], steps: Steps,
        state: Mapping[str, torch.Tensor], sizes: Sequence[str] = (),
        prepare_sizes: Callable[..., list[torch.Tensor | None]] | None = None,
    ) -> None:  # fmt: skip
        self._main = main
        self._comm = comm
        self.weights = weights
        self._held = memory(weights.values())
        self.steps = steps
        self.state = state
        self._sizes = sizes
        self._prepare_sizes = prepare_sizes
        self._of_sizes: OrderedDict[tuple[int, ...], list[torch.Tensor | None]] = OrderedDict()
        self._recorded: RecordedCalls | None = None

    def record(self) -> None:
        """Let calls that are like earlier ones run as recorded steps."""
        self._recorded = RecordedCalls(self._main, self._comm)

    @property
    def held(self) -> frozenset[int]:
        """See `RankProgram`."""
        return self._held.union(*map(memory, self._of_sizes.values()))

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int] = _NO_SIZES) -> list[torch.Tensor]:
        """See `RankProgram`."""
        import torch

        values = tuple(sizes[name] for name in self._sizes)
        with torch.inference_mode():
            arguments = self.weights, *values, *self._prepared_sizes(values)
            if self._recorded is not None:
                return self._recorded.run(sizes, arguments, inputs)
            return list(self._main(self._comm, *arguments, *inputs))

    def _prepared_sizes(self, values: tuple[int, ...]) -> list[list[torch.Tensor | None]]:
        """Return what `main` takes after the sizes: the result of `prepare_sizes`, if there is one."""
        if self._prepare_sizes is None:
            return []
        if values not in self._of_sizes:
            self._of_sizes[values] = self._prepare_sizes(self._comm, self.weights, *values)
            if len(self._of_sizes) > _MAX_SIZES:
                self._of_sizes.popitem(last=False)
        self._of_sizes.move_to_end(values)
        return [self._of_sizes[values]]


def _load_module(bundle: Bundle, rank: int) -> types.ModuleType:
    program = bundle.manifest.program_of(rank)
    text = torch_text(bundle, program)
    # Debuggers stop in the bundle's file if it is the same.
    if bundle.path is not None and program.torch is not None and bundle.programs[program.torch] == text:
        return load_text(text, program.name, str((bundle.path / program.torch).resolve()), is_file=True)
    return load_text(text, program.name, f"<{bundle.manifest.name}/{program.name}.py>")


def load_text(text: str, name: str, file: str, is_file: bool = False, defines: str = "main") -> types.ModuleType:
    """Return the module of a program's text. Raises BundleError if it is none, or lacks the function that it `defines`.

    Debuggers and tracebacks show the source by the name of its `file`, even if there is none.
    """
    module = _load_text(text, name, file, is_file)
    if not callable(getattr(module, defines, None)):
        raise BundleError(f"the program defines no {defines}(comm, weights, ...)", file)
    return module


def _load_text(text: str, name: str, file: str, is_file: bool = False) -> types.ModuleType:
    if not is_file:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    module.__file__ = file
    try:
        exec(compile(text, file, "exec"), module.__dict__)
    except SyntaxError as wrong:
        raise BundleError(f"not a Python program: {wrong.msg}", f"{file}:{wrong.lineno}") from None
    return module
