"""Check that the sharded program computes what the imported model does.

Both are programs of whole tensors; they are compared by numbers (`Numbering`):

- each result of the model has the number that the result of the same name has in the sharded program;
- of a training step, the gradient of each parameter has the number that the chain rule gives it
  (`distir_relax.proof.gradients`), and new values of a parameter depend on the batch through its own gradient, and
  through numbers that belong to all gradients, such as their norm;
- with microbatches, the step for the whole batch is checked like that. The part of each microbatch has the numbers of
  the ops that its index does in the program that `Microbatches` leaves (`MicrobatchProgram`): that is a schedule along
  an axis in time, which `check_schedule` compares with the step.

The check shares no code with the passes before the sharded stage; of the op table it reads gradients, patterns of fused
ops, and how a collective is emulated in time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.errors import VerificationError
from distir_relax.ir import (
    Function,
    HeadPartition,
    MicrobatchProgram,
    Module,
    Op,
    Output,
    PerRank,
    Value,
    gc_disabled,
    inline,
    parse,
    print_op,
)
from distir_relax.layout import Shard, local_intervals
from distir_relax.ops import Builder, lookup
from distir_relax.ops.communication.serialized import slices
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.optimizers import GRADIENT, LOSS_SCALE, NEW
from distir_relax.proof.gradients import number_gradients
from distir_relax.proof.numbering import Numbering, plain
from distir_relax.proof.schedule import Unproved, check_schedule

_HINT = "compile the model again: sharded.txt does not compute what model.txt does"


def check_model(model: Module, sharded: Module) -> list[Unproved]:
    """Check a sharded program against its model; return the ops that are taken on trust, with reasons.

    Raises `VerificationError` that names the first op which is none of the model's, or of its gradients.
    """
    with gc_disabled():
        return _check(model, sharded)


def _check(model: Module, sharded: Module) -> list[Unproved]:
    try:
        return _compare(model, sharded)
    except _OtherResult as found:
        copies = [record for record in sharded.records if isinstance(record, HeadPartition) and record.copies]
        if not copies or found.op is None:
            raise
        return [Unproved(found.op, f"the heads of {copies[0].value} have copies on other devices")]


def _compare(model: Module, sharded: Module) -> list[Unproved]:
    parts = next((record for record in sharded.records if isinstance(record, MicrobatchProgram)), None)
    numbering = Numbering()
    program = inline(sharded).main
    if parts is None:
        numbers = _number_inputs(numbering, program)
        gradients = _Step(numbering, inline(model).main, program, numbers, trained(program)).check()
        _check_updates(program, numbers, gradients)
        return []
    whole, in_time = inline(parse(parts.sharded)), inline(parse(parts.placed))
    trusted = check_schedule(whole, in_time)
    step = whole.main
    wrt = [o.name.removesuffix(GRADIENT) for o in step.outputs if o.name.endswith(GRADIENT)]
    of_step = _Step(numbering, inline(model).main, step, _number_inputs(numbering, step), wrt)
    gradients = of_step.check()
    for output in step.outputs:
        if (name := output.name.removesuffix(GRADIENT)) in wrt and of_step.numbers[output.value.name] != gradients[
            name
        ]:
            raise of_step.error(output)
    of_parts = _Parts(numbering, step, in_time.main, in_time.meshes[0].size)
    expected = of_parts.outputs()
    numbers = numbering.add_all(program.ops, _number_inputs(numbering, program))
    names = {output.name: numbers[output.value.name] for output in program.outputs}
    for name, number in expected.items():
        if name in names and names[name] != number:
            raise VerificationError(f"the microbatches do not give the output {name!r}", f"output {name!r}", _HINT)
    of_gradients = {name: expected[f"{name}{GRADIENT}"] for name in wrt}
    _check_updates(program, numbers, of_gradients)
    return trusted


def trained(program: Function) -> list[str]:
    """Return the parameters of floating dtypes that a program has new values of, but for those assigned to itself."""
    producers = {value.name: op for op in program.ops for value in op.results}
    new = set()
    for output in program.outputs:
        name = output.name.removesuffix(NEW)
        if output.name.endswith(NEW) and {v.name for v in producers[output.value.name].operands} != {name}:
            new.add(name)
    inputs = (item.value for item in program.inputs if item.role == "parameter" and item.value.name in new)
    return [value.name for value in inputs if "float" in plain(value).tensor.dtype]


def _number_inputs(numbering: Numbering, program: Function) -> dict[str, int]:
    return {item.value.name: numbering.input(item.value) for item in program.inputs}


@dataclass(slots=True)
class _Step:
    """A model, and a program that computes its results, and gradients with respect to `wrt`."""

    numbering: Numbering
    model: Function
    program: Function
    numbers: dict[str, int]
    """The numbers of the program's values."""
    wrt: Sequence[str]
    known: set[int] = field(default_factory=set)
    """The numbers that the model, and its gradients, have."""

    def check(self) -> dict[str, int]:
        """Check the results; return the numbers of gradients by parameter."""
        inputs = {item.value.name: item.value for item in self.program.inputs}
        numbers: dict[str, int] = {}
        for item in self.model.inputs:
            value, own = item.value, inputs.get(item.value.name)
            is_kept = own is None or plain(own).tensor.dtype == value.tensor.dtype
            numbers[value.name] = (
                self.numbering.input(value)
                if is_kept or own is None
                else self.numbering.converted(own, value.tensor.dtype)
            )
        self.numbering.add_all(self.model.ops, numbers)
        outputs = {output.name: output for output in self.program.outputs}
        common = [(o, outputs[o.name]) for o in self.model.outputs if o.name in outputs]
        forward = ancestors(self.program, [output.value.name for _, output in common])
        self.known = set(range(self.numbering.expressions.count))
        self.numbering.add_all(forward, self.numbers)
        for expected, output in common:
            if numbers[expected.value.name] != self.numbers[output.value.name]:
                raise self.error(output)
        gradients: dict[str, int] = {}
        if self.wrt:
            loss = outputs[self.model.outputs[0].name].value
            scale = inputs.get(LOSS_SCALE)
            of_loss = ancestors(self.program, [loss.name])
            gradients = number_gradients(
                self.numbering, of_loss, self.numbers, plain(loss), self.wrt, None if scale is None else plain(scale)
            )
        self.known = set(range(self.numbering.expressions.count))
        self.numbering.add_all(self.program.ops, self.numbers)
        return gradients

    def error(self, output: Output) -> VerificationError:
        """Return the error of an output with another number than the model's; it names the first op to blame."""
        return _error(self.program, self.numbers, self.known, output)


def ancestors(program: Function, names: Iterable[str]) -> list[Op]:
    """Return the ops that values depend on, in order."""
    needed = set(names)
    found = []
    for op in reversed(program.ops):
        if any(value.name in needed for value in op.results):
            needed.update(value.name for value in op.operands)
            found.append(op)
    return found[::-1]


class _OtherResult(VerificationError):
    """A result of the model is another one in the program, for the first time by `op`."""

    op: Op | None = None


def _error(program: Function, numbers: Mapping[str, int], known: Collection[int], output: Output) -> VerificationError:
    ops = ancestors(program, [output.value.name])
    first = next((op for op in ops if any(numbers.get(value.name) not in known for value in op.results)), None)
    if first is None:
        return _OtherResult(f"the output {output.name!r} is another value of the model", "", _HINT)
    error = _OtherResult(
        f"the output {output.name!r} is not the model's: the model does not do {print_op(first)}", first.location, _HINT
    )
    error.op = first
    return error


class _Parts:
    """The numbers of each microbatch's values, in a program along an axis in time."""

    def __init__(self, numbering: Numbering, step: Function, in_time: Function, count: int) -> None:
        self.numbering = numbering
        self.step = step
        self.program = in_time
        self.count = count
        self.numbers: list[dict[str, int]] = [{} for _ in range(count)]
        for item, whole in zip(in_time.inputs, step.inputs, strict=True):
            self._input(item.value, whole.value, item.role)
        for op in in_time.ops:
            self._add(op)

    def _input(self, value: Value, whole: Value, role: str) -> None:
        (placement,) = whole.dtensor.placements
        given = Value(value.name, whole.dtensor.tensor)
        for index, numbers in enumerate(self.numbers):
            if not isinstance(placement, Shard):
                numbers[value.name] = self.numbering.input(given)
            elif role == "input":
                local = Value(f"{value.name}.{index}", value.placed.local(index))
                numbers[value.name] = self.numbering.input(local)
            else:
                parts = local_intervals([placement], placement.dim, whole.dtensor.shape[placement.dim], [index])
                rows = [{"dim": placement.dim, "intervals": tuple(parts) or ((0, 0),)}]
                g = Builder()
                (result,) = slices(g, [given], rows)
                known = self.numbering.add_all(g.ops, {given.name: self.numbering.input(given)})
                numbers[value.name] = known[result.name]

    def _add(self, op: Op) -> None:
        rows = [local_attrs(op.attrs, index) for index in range(self.count)]
        serialized = lookup(op.name, op.location).semantics.serialized
        if serialized is None:
            differ = any(row != rows[0] for row in rows) or any(
                isinstance(size, PerRank) for value in (*op.operands, *op.results) for size in value.placed.shape
            )
            local = op
            for index, numbers in enumerate(self.numbers):
                if differ or index == 0:
                    operands, results = ([_local(value, index) for value in side] for side in (op.operands, op.results))
                    local = Op(op.name, tuple(operands), tuple(results), rows[index], op.location)
                found = self.numbering.add(local, tuple(numbers[value.name] for value in operands), local.attrs)
                numbers.update((value.name, number) for value, number in zip(results, found, strict=True))
            return
        g = Builder()
        g.location = op.location
        known: dict[str, int] = {}
        inputs = []
        for index in range(self.count) if op.operands else ():
            part = _local(op.operands[0], index)
            # Terms that are the same on all indices are one value, as they are in the program.
            inputs.append(Value(f"{part.name} {index}", part.tensor))
            known[inputs[-1].name] = self.numbers[index][part.name]
        results = serialized(g, inputs, rows)
        self.numbering.add_all(g.ops, known)
        for numbers, result in zip(self.numbers, results, strict=True):
            numbers[op.results[0].name] = known[result.name]

    def outputs(self) -> dict[str, int]:
        """Return the numbers of the outputs by name; those with samples have a name for each part."""
        found = {}
        for output, whole in zip(self.program.outputs, self.step.outputs, strict=True):
            (placement,) = whole.value.dtensor.placements
            if isinstance(placement, Shard):
                for index, numbers in enumerate(self.numbers):
                    found[f"{output.name}.{index}"] = numbers[output.value.name]
            else:
                found[output.name] = self.numbers[0][output.value.name]
        return found


def _local(value: Value, index: int) -> Value:
    return Value(value.name, value.placed.local(index))


def _check_updates(program: Function, numbers: Mapping[str, int], gradients: Mapping[str, int]) -> None:
    """Check that new values of each parameter depend on the batch through its gradient alone, numbers excepted."""
    if not gradients:
        return
    producers = {value.name: op for op in program.ops for value in op.results}
    batch = {item.value.name for item in program.inputs if item.role == "input" and plain(item.value).tensor.shape}
    shared = set(gradients.values())
    checked: dict[str, frozenset[int]] = {}

    def leaves(start: Value, through_numbers: bool) -> Iterator[Value]:
        """Iterate over the inputs and gradients that a value depends on; numbers before it are leaves, if wanted."""
        worklist, seen = [start], {start.name}
        while worklist:
            value = worklist.pop()
            op = producers.get(value.name)
            is_number = not through_numbers and value is not start and not plain(value).tensor.shape
            if op is None or numbers[value.name] in shared or is_number:
                yield value
                continue
            for operand in op.operands:
                if operand.name not in seen:
                    seen.add(operand.name)
                    worklist.append(operand)

    def of_number(value: Value) -> frozenset[int]:
        """Return the gradients that a number depends on."""
        if value.name not in checked:
            found = list(leaves(value, True))
            _refuse_batch(found, batch, value.name)
            checked[value.name] = frozenset(numbers[leaf.name] for leaf in found) & shared
        return checked[value.name]

    outputs = {output.name: output.value for output in program.outputs}
    for name, gradient in gradients.items():
        new = outputs[f"{name}{NEW}"]
        found = list(leaves(new, not plain(new).tensor.shape))
        _refuse_batch(found, batch, name)
        of_others = {numbers[leaf.name] for leaf in found if numbers[leaf.name] in shared}
        if gradient not in of_others or (plain(new).tensor.shape and len(of_others) > 1):
            raise VerificationError(
                f"the new value of the parameter {name!r} does not depend on its own gradient alone", "", _HINT
            )
        for leaf in found:
            if (
                leaf.name in producers
                and numbers[leaf.name] not in shared
                and of_number(leaf) not in (frozenset(), shared)
            ):
                raise VerificationError(
                    f"the new value of the parameter {name!r} depends on some gradients of others", "", _HINT
                )


def _refuse_batch(leaves: Iterable[Value], batch: Collection[str], name: str) -> None:
    for leaf in leaves:
        if leaf.name in batch:
            raise VerificationError(
                f"the new value of the parameter {name!r} depends on the input {leaf.name!r}, not only by its gradient",
                "",
                _HINT,
            )
