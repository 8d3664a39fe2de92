"""Torch code generation: each rank program becomes a Python module that can be read, diffed and debugged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distir_relax.executable.batch_requests import CALLED, BatchRequests
from distir_relax.executable.check_memory import check_memory
from distir_relax.executable.hoist import PREPARE, SIZES, Hoist
from distir_relax.executable.plan_memory import PlanMemory
from distir_relax.executable.select_kernels import SelectKernels, check_kernels
from distir_relax.ir import (
    Function,
    Module,
    Op,
    absolute_location,
    callees_first,
    fresh_name,
    print_op_names,
    program_of,
    verifies_by_default,
)
from distir_relax.ir.symbols import module_symbols
from distir_relax.lowering.emit.torch_function import (
    Callee,
    ClockedOp,
    TorchFunction,
    identifier,
)
from distir_relax.lowering.emit.torch_requests import RequestsFunction
from distir_relax.lowering.ranked.attend_states import AttendStates
from distir_relax.lowering.ranked.bound_attention import BoundAttention
from distir_relax.lowering.ranked.index_positions import IndexPositions
from distir_relax.lowering.ranked.skip_repeats import SkipRepeats
from distir_relax.ops import Trait, lookup


class RequestsCode(NamedTuple):
    """The text of a module that runs steps of several requests, and whether all of its ops run once for all of them."""

    text: str
    runs_once: bool


def to_torch_requests(
    module: Module, entry: str, name: str, states: Mapping[str, str], growing: Mapping[str, int],
    clocked: list[ClockedOp] | None = None,
) -> RequestsCode:  # fmt: skip
    """Return the module that runs a step of several requests with the program `entry`.

    `module` is a ranked program of one sequence (`OneSequence`), and `states` maps its inputs that are states to
    the outputs with their next values; `growing` are the dims along which states grow. The text defines
    ``main(comm, weights, requests, *inputs)``, of inputs and outputs with the rows of all requests; ``prepare_sizes``,
    for the values of a request that depend on its sizes alone, ``SIZED``, the kinds of their dims, and ``MASKS``, which
    of them may be None if all true; ``load_kernels()``, if there are any; and ``prepare`` and ``STEPS``, as `to_torch`.
    With `clocked`, to which its ops are appended, it records when they end (`kernels.clock`).

    Raises `UnsupportedOpError` for outputs that are not by position.
    """
    single = AttendStates(states).run(_rewritten(program_of(module, entry)))
    hoisted = BatchRequests(states).run(Hoist().run(single))
    executable = _with_kernels(PlanMemory(requests=True, states=states, growing=growing).run(hoisted))
    program = _Program(executable, name, _ranks_of(module, entry), states, growing, clocked)
    return RequestsCode(program.text(), program.runs_once)


def to_torch_clocked(module: Module, entry: str, name: str) -> tuple[str, list[ClockedOp]]:
    """Return the text of the program `entry` as `to_torch`, and the ops whose ends it records (`kernels.clock`)."""
    clocked: list[ClockedOp] = []
    return _program(module, entry, name, clocked=clocked).text(), clocked


def to_torch_checked(module: Module, entry: str, name: str) -> str:
    """Return the text of the program `entry` as `to_torch`, with a check after each op (`kernels.finite`)."""
    return _program(module, entry, name, checked=True).text()


def to_torch(module: Module, name: str) -> dict[str, str]:
    """Return the text of a Python module for each program of the ranked `module`; the docstring has the model's `name`.

    The module defines ``main(comm, weights, *sizes, *inputs) -> tuple``, the outputs in order; ``SIZES``, the names of
    the sizes, if it takes any; ``prepare_sizes(comm, weights, *sizes)``, run once for each choice of sizes, if some
    values depend only on them: ``main`` takes its result after the sizes, with None for masks that are all true;
    ``prepare(comm, weights)``, run once when the program is loaded, if some values depend only on weights;
    ``STEPS``, the op of each step number; and ``CALLS``, the locations in the model of each function's calls, in order,
    if there are functions.
    """
    module = _rewritten(module)
    entries = dict.fromkeys(module.ranks)
    return {entry: print_torch(_executable(program_of(module, entry)), name) for entry in entries}


def to_torch_program(module: Module, entry: str, name: str) -> str:
    """Return the text of the program `entry` alone, as `to_torch`."""
    return print_torch(_executable(_rewritten(program_of(module, entry))), name)


def to_executable(module: Module) -> Module:
    """Return the ranked `module` at the executable stage, of which `to_torch` prints the programs."""
    return _executable(_rewritten(module))


def print_torch(module: Module, name: str) -> str:
    """Return the text of a Python module that runs the first function of `module`, at the executable stage."""
    return _Program(module, name, _ranks_of(module, module.main.name)).text()


def print_preparation(module: Module, name: str) -> str:
    """Return the text of a Python module with ``prepare`` alone (`to_torch`); empty if nothing is prepared.

    It is that of the first function of `module`, at the executable stage, which calls no others.
    """
    return _Program(module, name, _ranks_of(module, module.main.name)).preparation()


def torch_variables(module: Module, entry: str) -> dict[str, Mapping[str, str]]:
    """Return, by name of each function of the program `entry`, the expressions of its values in `to_torch_program`.

    They are variables, except of values that come with the weights. Numbers have none.
    """
    return {emitted.function.name: emitted.scope.names for emitted in _program(module, entry, "")._functions()}


def _program(module: Module, entry: str, name: str, **options: Any) -> _Program:
    """Return the code of the program `entry`, with options of `_Program`."""
    executable = _executable(_rewritten(program_of(module, entry)))
    return _Program(executable, name, _ranks_of(module, entry), **options)


def _rewritten(module: Module) -> Module:
    return BoundAttention().run(IndexPositions().run(SkipRepeats().run(module)))


def _executable(module: Module) -> Module:
    return _with_kernels(PlanMemory().run(Hoist().run(module)))


def _with_kernels(executable: Module) -> Module:
    """Return a program whose memory is planned, with the kernels of its ops."""
    executable = SelectKernels().run(executable)
    # Types are those of the ranked stage, which was verified.
    if verifies_by_default():
        check_memory(executable)
        check_kernels(executable)
    return executable


def _ranks_of(module: Module, entry: str) -> list[int]:
    return [rank for rank, function in enumerate(module.ranks) if function == entry]


_KERNELS = "distir_relax.kernels"
_MODULES = (
    "attention", "attention_gradients", "attention_parts", "convolutions", "elementwise", "finite", "indices", "norms",
    "positions", "products", "quantized", "random", "recurrent", "resample", "routing", "scans", "sequence", "sums",
    "tvm_extern", "updates",
)  # fmt: skip
_PROVIDED = {
    **dict.fromkeys(_MODULES, _KERNELS),
    "clock": f"{_KERNELS}.clock",
    **dict.fromkeys(("emptied", "moved"), f"{_KERNELS}.ownership"),
    **dict.fromkeys(("pack_joined", "pack_linear"), f"{_KERNELS}.packing"),
    "pack_joined_quantized": f"{_KERNELS}.quantized.joined",
    "pack_quantized": f"{_KERNELS}.quantized.linear",
    "pack_quantized_experts": f"{_KERNELS}.quantized.experts",
    **dict.fromkeys(("join", "rows"), f"{_KERNELS}.requests"),
}
"""The modules of names that code may use."""
_RESERVED = {
    *_PROVIDED, "comm", "weights", "torch", "F", "SIZES", "STEPS", "CALLS", "main", "prepare", "prepare_sizes",
    "of_sizes", "request", "requests", "attending", "step", "load_kernels", "sizes", "each", "given",
}  # fmt: skip


@dataclass(slots=True)
class _Program:
    """The module of the `ranks` that run the first function of `module`, at the executable stage."""

    module: Module
    model: str
    ranks: list[int]
    states: Mapping[str, str] | None = None
    """For a step of several requests, the outputs with the next values of its states."""
    growing: Mapping[str, int] = field(default_factory=dict)
    """The dims along which states grow."""
    clocked: list[ClockedOp] | None = None
    checked: bool = False
    runs_once: bool = False
    """Whether all ops of the step that `text` has written run once for all requests."""
    names: dict[str, str] = field(default_factory=dict)
    """The Python name of each function."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """The locations in the model of each function's calls, in order."""

    @property
    def main(self) -> Function:
        """The entry function."""
        return self.module.main

    def text(self) -> str:
        """Return the text of the module."""
        functions = self._functions()
        texts = [f.text() if self.states is None else self._of_requests(f) for f in functions]
        symbols = functions[-1].symbols
        body = "\n\n".join(texts)
        return (
            self._head()
            + _imports(body)
            + (f"SIZES = {_tuple(symbols)}\n\n" if symbols else "")
            + self._steps([self.main, *(self._each.values() or (f.function for f in functions[:-1]))])
            + body
        )

    def preparation(self) -> str:
        """Return the text of the module with the entry function's `prepare` alone; empty if it has none."""
        text = self._functions()[-1].prepare()
        return self._head() + _imports(text) + text if text else ""

    def _head(self) -> str:
        # The name is a bundle's: as data it cannot end the docstring.
        name = json.dumps(self.model)[1:-1]
        return (
            f'"""{name}: the program of rank{"s" if len(self.ranks) > 1 else ""} '
            f'{", ".join(map(str, self.ranks))} of {len(self.module.ranks)}. Written by distir-relax."""\n\n'
            "import torch\nimport torch.nn.functional as F\n\n"
        )

    def _functions(self) -> list[TorchFunction]:
        """Return the code of all functions, callees first."""
        self.names[self.main.name] = "main"
        if self.states is None:
            self._visit(self.main, "")
        inner = [f for f in callees_first(self.module) if f.name in self.names and f is not self.main]
        used_names = set(_RESERVED)
        for function in inner:
            # A rank has one variant of each function, so the number of the variant is redundant.
            name = identifier(re.sub(r"_\d+$", "", function.name), "f")
            self.names[function.name] = fresh_name(name, used_names)
        parts = {f.name: f for f in self.module.functions}
        callees: dict[str, Callee] = {}
        symbols = set(module_symbols(self.module))
        functions = []
        for function in (*inner, self.main):
            emitted = TorchFunction(
                function,
                self.names[function.name],
                (parts.get(function.name + PREPARE), parts.get(function.name + SIZES)),
                callees,
                set(used_names) | symbols,
                self.clocked,
                self.checked,
                by_call=self.states is None,
            )
            callees[function.name] = callees[function.name + PREPARE] = emitted.callee()
            functions.append(emitted)
        return functions

    @property
    def _each(self) -> dict[str, Function]:
        """The functions that are called for each request."""
        return {f.name: f for f in self.module.functions if f.name.startswith(f"{self.main.name}{CALLED}")}

    def _of_requests(self, emitted: TorchFunction) -> str:
        """Generate a step of several requests."""
        assert self.states is not None
        function = RequestsFunction(emitted, self._each, self.states, self.growing)
        self.runs_once = function.runs_once
        return function.text()

    def _visit(self, function: Function, location: str) -> None:
        for op in function.ops:
            if op.callee:
                call_location = absolute_location(location, op.location)
                self.names.setdefault(op.callee, op.callee)
                self.places.setdefault(op.callee, []).append(call_location)
                self._visit(self.module.function(op.callee), location if op.task else call_location)

    def _steps(self, functions: Sequence[Function]) -> str:
        """Generate the text of each step; for a step in a function also the function, and its call locations."""
        rows = []
        for function in functions:
            for op in function.ops:
                if "step" in op.attrs:
                    line = json.dumps(print_op_names(op) + _task_comment(op))
                    # What is called for each request is a part of the entry function.
                    name = self.names.get(function.name, "main")
                    entry = line if name == "main" else f"({json.dumps(name)}, {line})"
                    rows.append(f"    {op.attrs['step']!r}: {entry},\n")
        steps = f"STEPS = {{\n{''.join(rows)}}}\n"
        if not self.places:
            return f"{steps}\n\n"
        calls = []
        for name, places in self.places.items():
            lines = "".join(f"        {json.dumps(place)},\n" for place in places)
            calls.append(f"    {json.dumps(self.names[name])}: (\n{lines}    ),\n")
        return f"{steps}\nCALLS = {{\n{''.join(calls)}}}\n\n\n"


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(map(json.dumps, names))}{',' * (len(names) == 1)})"


def _imports(text: str) -> str:
    """Generate the imports of what a program's text uses."""
    names = sorted(_names_in(text) & _PROVIDED.keys())
    modules = sorted({_PROVIDED[name] for name in names})
    lines = [f"from {m} import {', '.join(n for n in names if _PROVIDED[n] == m)}\n" for m in modules]
    return "".join([*lines, "\n"] if lines else [])


def _names_in(text: str) -> set[str]:
    """Return the names in Python code, but for those of attributes and keywords. Texts and comments have none."""
    return set(_NAME.findall(_TEXT.sub("", text)))


_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|#[^\n]*')
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!=[^=])")


def _task_comment(op: Op) -> str:
    """Return a comment with the task that computes the value sent, and the distance to the rank that it is awaited of.

    See `distir_relax.runtime.backends.torch`, which names the rank.
    """
    if "task" not in op.attrs:
        return ""
    is_awaited = Trait.FINISHES in lookup(op.name, op.location).traits
    return f", of task {op.attrs['task']}" + (f" of rank @{op.attrs['distance']}" if is_awaited else "")
