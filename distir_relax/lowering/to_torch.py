"""Emission to torch: each rank program becomes a Python module that a person can read, diff and step through."""

from __future__ import annotations

import json
import keyword
import re
from dataclasses import dataclass, field

from distir_relax.ir import Function, Module, Op, Value, print_op
from distir_relax.ops import lookup, tensor_type, torch_expression, torch_in_place

# Values larger than this are let go after their last use; the line is not worth it for smaller ones.
_LARGE = 1 << 20


def to_torch(module: Module, name: str) -> dict[str, str]:
    """For each program of the ranked `module`, the text of a Python module. `name` is the model's, for the docstring.

    The module defines ``main(comm, weights, *inputs) -> tuple``, the outputs in order; ``prepare(weights)``, run once
    when the program is loaded, if something depends on weights alone; and ``STEPS``, what each step number is.
    """
    ranks: dict[str, list[int]] = {}
    for rank, function in enumerate(module.ranks):
        ranks.setdefault(function, []).append(rank)
    return {f.name: _Emission(f, name, ranks[f.name], module).text() for f in module.functions}


@dataclass(slots=True)
class _Emission:
    function: Function
    model: str
    ranks: list[int]
    module: Module
    names: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: {"comm", "weights", "torch", "F", "STEPS", "main", "prepare", "resample"})
    numbers: dict[str, str] = field(default_factory=dict)
    packed: dict[str, str] = field(default_factory=dict)
    """The op's packed weights, by the name of the op's result."""

    def text(self) -> str:
        fixed = self._fixed()
        for item in self.function.inputs:
            if item.role == "input":
                self._name(item.value)
            else:
                self.names[item.value.name] = f"weights[{json.dumps(item.value.name)}]"
        self._choose_packed(fixed)
        prepare = self._prepare(fixed)
        inputs = [self.names[i.value.name] for i in self.function.inputs if i.role == "input"]
        body = self._body(fixed)
        outputs = ", ".join(self.names[o.value.name] for o in self.function.outputs)
        whose = ", ".join(map(str, self.ranks))
        steps = [(op.attrs["step"], print_op(op)) for op in self.function.ops if "step" in op.attrs]
        table = "".join(f"    {step}: {json.dumps(_brief(line))},\n" for step, line in steps)
        return (
            f'"""{self.model}: the program of rank{"s" if len(self.ranks) > 1 else ""} {whose} of '
            f'{len(self.module.ranks)}. Written by distir-relax."""\n\n'
            "import torch\nimport torch.nn.functional as F\n\n"
            + self._imports([prepare, *body])
            + f"STEPS = {{\n{table}}}\n\n\n"
            + prepare
            + f"def main({', '.join(['comm', 'weights', *inputs])}):\n"
            + "".join(f"    {line}\n" for line in body)
            + f"    return ({outputs}{',' if len(self.function.outputs) == 1 else ''})\n"
        )

    def _imports(self, lines: list[str]) -> str:
        """The imports of what the program uses of the runtime."""
        found = ["from distir_relax.runtime import resample\n"] if any("resample." in line for line in lines) else []
        found += ["from distir_relax.runtime.packing import pack_linear\n"] if self.packed else []
        return "".join([*found, "\n"] if found else [])

    def _fixed(self) -> set[str]:
        """The values that depend on weights alone, so that they are computed once."""
        changed = {op.operands[0].name for op in self.function.ops if lookup(op.name).cost.in_place}
        fixed = {i.value.name for i in self.function.inputs if i.role != "input"} - changed
        for op in self.function.ops:
            entry = lookup(op.name, op.location)
            if not entry.on_communicator and all(v.name in fixed for v in op.operands):
                fixed.update(v.name for v in op.results)
        return fixed

    def _prepare(self, fixed: set[str]) -> str:
        """The function `prepare`, or nothing when every weight is used as it is."""
        early = [op for op in self.function.ops if op.results[0].name in fixed and not self._is_number(op)]
        late = [op for op in self.function.ops if op.results[0].name not in fixed]
        self._note_numbers()
        if not early and not self.packed:
            return ""
        used = {o.value.name for o in self.function.outputs}
        for op in late:
            packed = self._packed_operands(op)
            used.update(v.name for i, v in enumerate(op.operands) if i not in packed)
        for op in early:
            for value in op.results:
                self.names[value.name] = f"weights[{json.dumps(value.name)}]"
        lines = [line for op in early for line in self._lines(op)]
        lines += dict.fromkeys(self._pack(op) for op in late if op.results[0].name in self.packed)
        weights = [i.value.name for i in self.function.inputs if i.role != "input"]
        made = [v.name for op in early for v in op.results]
        lines += [f"del {self.names[name]}" for name in (*weights, *made) if name not in used]
        return "def prepare(weights):\n" + "".join(f"    {line}\n" for line in lines) + "    return weights\n\n\n"

    def _body(self, fixed: set[str]) -> list[str]:
        late = [op for op in self.function.ops if op.results[0].name not in fixed]
        last = {v.name: number for number, op in enumerate(late) for v in op.operands}
        kept = {o.value.name for o in self.function.outputs}
        kept |= {i.value.name for i in self.function.inputs if i.role != "input"}
        lines: list[str] = []
        for number, op in enumerate(late):
            lines += self._lines(op)
            gone = [
                v
                for v in dict.fromkeys(op.operands)
                if last[v.name] == number
                and v.name not in fixed
                and v.name not in kept
                and tensor_type(v).bytes > _LARGE
            ]
            if gone:
                lines.append(f"del {', '.join(self.names[v.name] for v in gone)}")
        return lines

    def _lines(self, op: Op) -> list[str]:
        entry = lookup(op.name, op.location)
        literal = entry.numbers if any(v.name not in self.numbers for v in op.operands) else frozenset()
        operands = [
            self.numbers[v.name] if v.name in self.numbers and i in literal else self._use(v)
            for i, v in enumerate(op.operands)
        ]
        form = entry.packed if op.results[0].name in self.packed else None
        if form:
            packed = f"weights[{json.dumps(self.packed[op.results[0].name])}]"
            code = form.apply.format(*operands, packed=packed)
        else:
            code = torch_in_place(op, operands) or torch_expression(op, operands)
        targets = ", ".join(self.names.get(v.name) or self._name(v) for v in op.results)
        place = f"  # {op.location}" if op.location else ""
        return [f"{targets} = {code}{place}"]

    def _choose_packed(self, fixed: set[str]) -> None:
        """Which ops use a packed form of their weights, and its name; see `OpDef.packed`."""
        taken: dict[str, object] = {}
        for op in self.function.ops:
            form = lookup(op.name).packed
            if (
                form is None
                or op.results[0].name in fixed
                or not all(op.operands[i].name in fixed for i in form.weights)
            ):
                continue
            if any(len(tensor_type(op.operands[i]).shape) > 2 for i in form.weights):
                continue
            base = f"{op.operands[form.weights[0]].name}.packed"
            same = (form, tuple(op.operands[i] for i in form.weights), _rows(op))
            name, count = base, 1
            while taken.setdefault(name, same) != same:
                count += 1
                name = f"{base}_{count}"
            self.packed[op.results[0].name] = name

    def _packed_operands(self, op: Op) -> tuple[int, ...]:
        form = lookup(op.name).packed
        return form.weights if form and op.results[0].name in self.packed else ()

    def _pack(self, op: Op) -> str:
        form = lookup(op.name).packed
        assert form is not None
        code = form.prepare.format(*(self.names.get(v.name, "") for v in op.operands), rows=_rows(op))
        return f"weights[{json.dumps(self.packed[op.results[0].name])}] = {code}"

    def _use(self, value: Value) -> str:
        if value.name in self.numbers:
            kind = tensor_type(value)
            return f"torch.tensor({self.numbers[value.name]}, dtype=torch.{kind.dtype})"
        return self.names[value.name]

    def _note_numbers(self) -> None:
        for op in self.function.ops:
            if self._is_number(op):
                number = op.attrs["value"]
                text = f'float("{number}")' if str(number) in ("inf", "-inf", "nan") else repr(number)
                self.numbers[op.results[0].name] = f"({text})" if text.startswith("-") else text

    def _is_number(self, op: Op) -> bool:
        used = {o.value.name for o in self.function.outputs}
        return lookup(op.name).role == "scalar" and op.results[0].name not in used

    def _name(self, value: Value) -> str:
        """A Python identifier for a value, made from its name."""
        base = re.sub(r"\W", "_", value.name)
        if keyword.iskeyword(base) or not base.isidentifier():
            base = f"v_{base}"
        name, count = base, 1
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        self.names[value.name] = name
        return name


def _rows(op: Op) -> int:
    result = tensor_type(op.results[0])
    return result.elements // result.shape[-1] if result.elements else 0


def _brief(line: str) -> str:
    """A step's line without types: ``%y = all_reduce(%h)  # model.py:12``."""
    return re.sub(r"(%[\w.]+): \S+", r"\1", re.sub(r" \{[^}]*\}", "", line))
