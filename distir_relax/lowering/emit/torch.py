"""Emission to torch: each rank program becomes a Python module that a person can read, diff and step through."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.ir import Function, Module, Op, called_first, fresh_name, print_op, within
from distir_relax.lowering.emit.torch_function import Callee, TorchFunction, fixed_values
from distir_relax.ops import Trait, lookup


def to_torch(module: Module, name: str) -> dict[str, str]:
    """For each program of the ranked `module`, the text of a Python module. `name` is the model's, for the docstring.

    The module defines ``main(comm, weights, *inputs) -> tuple``, the outputs in order; ``prepare(weights)``, run once
    when the program is loaded, if something depends on weights alone; ``STEPS``, what each step number is; and
    ``CALLS``, where in the model each function is called, in order, if there are functions.
    """
    ranks: dict[str, list[int]] = {}
    for rank, function in enumerate(module.ranks):
        ranks.setdefault(function, []).append(rank)
    return {entry: _Program(module, module.function(entry), name, whose).text() for entry, whose in ranks.items()}


_RESERVED = {"comm", "weights", "torch", "F", "STEPS", "CALLS", "main", "prepare"}
_RESERVED |= {
    "tvm_extern",
    "indices",
    "random",
    "recurrent",
    "resample",
    "routing",
    "updates",
    "pack_linear",
    "moved",
    "emptied",
    "given",
}


@dataclass(slots=True)
class _Program:
    """The module of the ranks `whose`, which run `main` of `module`."""

    module: Module
    main: Function
    model: str
    whose: list[int]
    names: dict[str, str] = field(default_factory=dict)
    """The Python name of each function."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """Where in the model each function is called, in order."""
    changed: dict[str, set[str]] = field(default_factory=dict)
    """The values of each function that it, or a function that it calls, updates in place, and what they are made of."""

    def text(self) -> str:
        self.names[self.main.name] = "main"
        self._visit(self.main, "")
        for function in called_first(self.module):
            self.changed[function.name] = self._changed(function)
        inner = [f for f in called_first(self.module) if f.name in self.names and f is not self.main]
        taken = set(_RESERVED)
        for function in inner:
            # A rank has one version of each function: the number that tells versions apart is not needed.
            self.names[function.name] = fresh_name(re.sub(r"_\d+$", "", function.name), taken)
        stored = self._stored(inner)
        callees: dict[str, Callee] = {}
        texts = []
        for function in (*inner, self.main):
            fixed = stored[function.name] - self.changed[function.name]
            emitted = TorchFunction(
                function, self.names[function.name], stored[function.name], fixed, callees, set(taken)
            )
            callees[function.name] = emitted.callee()
            texts.append(emitted.text())
        whose = ", ".join(map(str, self.whose))
        return (
            f'"""{self.model}: the program of rank{"s" if len(self.whose) > 1 else ""} {whose} of '
            f'{len(self.module.ranks)}. Written by distir-relax."""\n\n'
            "import torch\nimport torch.nn.functional as F\n\n"
            + _imports(texts)
            + self._steps([self.main, *inner])
            + "\n\n".join(texts)
        )

    def _visit(self, function: Function, place: str) -> None:
        for op in function.ops:
            if op.callee:
                where = within(place, op.location)
                self.names.setdefault(op.callee, op.callee)
                self.places.setdefault(op.callee, []).append(where)
                self._visit(self.module.function(op.callee), where)

    def _stored(self, inner: Sequence[Function]) -> dict[str, set[str]]:
        """The inputs of each function that lie in its weights: what no call makes anew."""
        stored = {f.name: {i.value.name for i in f.inputs} for f in inner}
        stored[self.main.name] = {i.value.name for i in self.main.inputs if i.role != "input"}
        for function in (self.main, *reversed(inner)):
            fixed = fixed_values(function, stored[function.name] - self.changed[function.name])
            for op in function.ops:
                if op.callee:
                    inputs = (i.value.name for i in self.module.function(op.callee).inputs)
                    pairs = zip(inputs, op.operands, strict=True)
                    stored[op.callee] -= {name for name, operand in pairs if operand.name not in fixed}
        return stored

    def _changed(self, function: Function) -> set[str]:
        found: set[str] = set()
        for op in function.ops:
            if op.callee:
                inputs = (i.value.name for i in self.module.function(op.callee).inputs)
                pairs = zip(inputs, op.operands, strict=True)
                found.update(operand.name for name, operand in pairs if name in self.changed[op.callee])
            elif lookup(op.name).code.in_place:
                found.add(op.operands[0].name)
        # What is updated may be the weight filled up: then the weight gets its new value too.
        for op in reversed(function.ops):
            if any(v.name in found for v in op.results):
                found.update(v.name for v in op.operands)
        return found

    def _steps(self, functions: Sequence[Function]) -> str:
        """What each step is; of one in a function, with the function, and where that is called."""
        rows = []
        for function in functions:
            for op in function.ops:
                if "step" in op.attrs:
                    line = json.dumps(_brief(print_op(op)) + _of_task(op))
                    whole = line if function is self.main else f"({json.dumps(self.names[function.name])}, {line})"
                    rows.append(f"    {op.attrs['step']}: {whole},\n")
        steps = f"STEPS = {{\n{''.join(rows)}}}\n"
        if not self.places:
            return f"{steps}\n\n"
        calls = []
        for name, places in self.places.items():
            listed = "".join(f"        {json.dumps(place)},\n" for place in places)
            calls.append(f"    {json.dumps(self.names[name])}: (\n{listed}    ),\n")
        return f"{steps}\nCALLS = {{\n{''.join(calls)}}}\n\n\n"


def _imports(texts: Sequence[str]) -> str:
    """The imports of what a program uses of the runtime."""
    imports = {
        "tvm_extern.": "from distir_relax.kernels import tvm_extern\n",
        "indices.": "from distir_relax.kernels import indices\n",
        "random.": "from distir_relax.kernels import random\n",
        "recurrent.": "from distir_relax.kernels import recurrent\n",
        "resample.": "from distir_relax.kernels import resample\n",
        "routing.": "from distir_relax.kernels import routing\n",
        "updates.": "from distir_relax.kernels import updates\n",
        "pack_linear(": "from distir_relax.kernels.packing import pack_linear\n",
    }
    found = [line for use, line in imports.items() if any(use in text for text in texts)]
    moving = ", ".join(name for name in ("emptied", "moved") if any(f"{name}(" in text for text in texts))
    found += [f"from distir_relax.kernels.ownership import {moving}\n"] * bool(moving)
    return "".join([*found, "\n"] if found else [])


def _of_task(op: Op) -> str:
    """Of which task what is sent is: whom a rank waits for in a pipeline."""
    if "task" not in op.attrs:
        return ""
    is_awaited = Trait.FINISHES in lookup(op.name, op.location).traits
    return f", of task {op.attrs['task']}" + (f" of rank {op.attrs['peer']}" if is_awaited else "")


def _brief(line: str) -> str:
    """A step's line without types: ``%y = all_reduce(%h)  # model.py:12``."""
    return re.sub(r"(%[\w.]+): \S+", r"\1", re.sub(r" \{[^}]*\}", "", line))
