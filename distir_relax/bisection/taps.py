"""Programs of ranks that give inner values besides their outputs, by the code that any run executes.

The torch backend's module, generated or edited, gets a line after each assignment, which copies the value: the ops, the
memory that they reuse, and the calls are as before. For other backends the values become outputs of the ranked program,
from which they generate their code: a value that is one is not fused away, and its memory is not reused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from distir_relax.bisection import recorder
from distir_relax.bundle import STAGE_FILES, Bundle
from distir_relax.ir import Function, Instance, Module, Output, inline, inline_calls, print_module
from distir_relax.layout import assuming
from distir_relax.lowering.emit.torch import torch_variables
from distir_relax.ops import lookup
from distir_relax.runtime.backends import Load, RankProgram, find_backend
from distir_relax.runtime.backends.torch import load_module
from distir_relax.runtime.program_text import torch_text
from distir_relax.runtime.verification import read_stage

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.communicator import Communicator

Recorded = dict[int, dict[str, "torch.Tensor"]]
"""Recorded tensors by rank, and by the name of the value in the rank's inlined program."""

_NO_SIZES: Mapping[str, int] = MappingProxyType({})


def tapped(backend: str, wanted: Mapping[int, Collection[str]], recorded: Recorded) -> Load:
    """Return a loader of programs that record the `wanted` values of their rank, in each call, into `recorded`."""

    def load(bundle: Bundle, rank: int, comm: Communicator, device: str) -> RankProgram:
        names = wanted.get(rank, ())
        if backend == "torch":
            return _Recorded(*_load_torch(bundle, rank, comm, device, names), rank, recorded)
        with_outputs, added = _with_outputs(bundle, rank, names)
        return _WithOutputs(find_backend(backend)(with_outputs, rank, comm, device), added, rank, recorded)

    return load


class _Tapped:
    """A rank's program as another one, whose steps, state and memory it has."""

    def __init__(self, program: RankProgram, rank: int, recorded: Recorded) -> None:
        self._program, self._rank, self._recorded = program, rank, recorded
        self.steps, self.state = program.steps, program.state

    @property
    def held(self) -> Collection[int]:
        """See `RankProgram`."""
        return self._program.held


class _Recorded(_Tapped):
    """A program whose text records values (`recorder`), by the key of each."""

    def __init__(self, program: RankProgram, keys: Mapping[str, str], rank: int, recorded: Recorded) -> None:
        super().__init__(program, rank, recorded)
        self._keys = keys

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int] = _NO_SIZES) -> list[torch.Tensor]:
        recorder.start(self._keys)
        try:
            return self._program(*inputs, sizes=sizes)
        finally:
            self._recorded[self._rank] = recorder.finish()


class _WithOutputs(_Tapped):
    """A program whose last outputs are recorded values, called `names`."""

    def __init__(self, program: RankProgram, names: list[str], rank: int, recorded: Recorded) -> None:
        super().__init__(program, rank, recorded)
        self._names = names

    def __call__(self, *inputs: torch.Tensor, sizes: Mapping[str, int] = _NO_SIZES) -> list[torch.Tensor]:
        results = self._program(*inputs, sizes=sizes)
        first = len(results) - len(self._names)
        added = zip(self._names, results[first:], strict=True)
        self._recorded[self._rank] = {name: tensor.clone().cpu() for name, tensor in added}
        return results[:first]


def _with_outputs(bundle: Bundle, rank: int, names: Collection[str]) -> tuple[Bundle, list[str]]:
    """Return a bundle in which the program of a rank has more outputs, and their names, in order."""
    ranked: Module = inline(read_stage(bundle, "ranked", verified=True))
    entry = bundle.manifest.program_of(rank).name
    function = ranked.function(entry)
    overwritten = _overwritten(function)
    results = [v for op in function.ops for v in op.results if v.name in names and v.name not in overwritten]
    outputs = (*function.outputs, *(Output(f"bisect.{v.name}", v) for v in results))
    functions = tuple(replace(f, outputs=outputs) if f is function else f for f in ranked.functions)
    text = print_module(replace(ranked, functions=functions))
    return bundle.with_texts({STAGE_FILES["ranked"]: text}), [v.name for v in results]


def _overwritten(function: Function) -> set[str]:
    """Return the values in memory that an op updates in place."""
    storage = {item.value.name: item.value.name for item in function.inputs}
    updated = set()
    for op in function.ops:
        entry = lookup(op.name, op.location)
        if entry.updates:
            updated.add(storage[op.operands[0].name])
        for value in op.results:
            storage[value.name] = storage[op.operands[0].name] if entry.shares_storage and op.operands else value.name
    return {name for name, root in storage.items() if root in updated}


def _load_torch(
    bundle: Bundle, rank: int, comm: Communicator, device: str, names: Collection[str]
) -> tuple[RankProgram, dict[str, str]]:
    """Load the torch module of a rank with recording, and the names of the wanted values by key.

    A key is the variable of a value, after those of the first results of the calls that it is in.
    """
    program = bundle.manifest.program_of(rank)
    text = recording_text(torch_text(bundle, program))
    ranked = read_stage(bundle, "ranked", verified=True)
    with assuming(ranked.guards):
        variables = torch_variables(ranked, program.name)
    keys = _keys(inline_calls(ranked, ranked.function(program.name)).instance, variables, "")
    wanted = {key: name for key, name in keys if name in names}
    return load_module(bundle, rank, comm, device, f"{program.name}.recorded", text), wanted


def _keys(
    instance: Instance, variables: Mapping[str, Mapping[str, str]], prefix: str
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Iterate over the keys of the values of a call, and their names in the inlined program."""
    own = variables[instance.function.name]
    for op, place in zip(instance.function.ops, instance.ops, strict=True):
        if isinstance(place, Instance):
            inner = f"{prefix}{own[op.results[0].name]}." if op.results else prefix
            yield from _keys(place, variables, inner)
            continue
        for value in op.results:
            if value.name in own:
                yield prefix + own[value.name], instance.names[value.name]


def recording_text(text: str) -> str:
    """Return the text of a torch module with a call of `recorder.record` after each assignment of its functions.

    Functions that prepare weights or sizes stay as they are.
    """
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    called = {f.name for f in functions} - {"main"}
    for function in functions:
        if not re.match(r"prepare(_|$)", function.name):
            _Recording(called).visit(function)
    place = 1 if ast.get_docstring(tree) is not None else 0
    tree.body.insert(place, ast.parse("from distir_relax.bisection import recorder as _recorder").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


class _Recording(ast.NodeTransformer):
    """Adds the recording to a function; `called` are the functions of its module."""

    def __init__(self, called: Collection[str]) -> None:
        self._called = called

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        """Record the variables that a statement assigns, and what a function of the module assigns during it."""
        names = list(_assigned(node.targets))
        if not names:
            return [node]
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self._called:
            # The results are values of the function.
            return [_statement(f"_recorder.enter({names[0]!r})"), node, _statement("_recorder.leave()")]
        arguments = ", ".join(f"{name}={name}" for name in dict.fromkeys(names))
        return [node, _statement(f"_recorder.record({arguments})")]


def _assigned(targets: list[ast.expr]) -> Iterator[str]:
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, (ast.Tuple, ast.List)):
            yield from _assigned(target.elts)


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]
