"""Check that the sharded program computes what the imported model does.

Both are programs of whole tensors; they are compared by numbers (`Numbering`):

- each result of the model has the number that the result of the same name has in the sharded program;
- of a training step, the gradient of each parameter has the number that the chain rule gives it
  (`distir_relax.proof.gradients`), and new values have the numbers that the optimizer's program gives with these
  gradients (`UpdateProgram`); tests compare that program with `torch.optim`;
- of several updates in a step, what the model computes after a loss sees the parameters after the update by it;
- with microbatches, the step for the whole batch is checked like that. The part of each microbatch has the numbers of
  the ops that its index does in the program that `Microbatches` leaves (`MicrobatchProgram`): that is a schedule along
  an axis in time, which `check_schedule` compares with the step.

The check shares no code with the passes before the sharded stage; of the op table it reads gradients, patterns of fused
ops, and how a collective is emulated in time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from distir_relax.errors import VerificationError
from distir_relax.ir import (
    Function,
    HeadPartition,
    MicrobatchProgram,
    Module,
    Op,
    Output,
    PerRank,
    UpdateProgram,
    Value,
    gc_disabled,
    inline,
    parse,
    print_op,
)
from distir_relax.layout import Shard, local_intervals
from distir_relax.ops import Builder, Trait, lookup
from distir_relax.ops.communication.serialized import slices
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.optimizers import CHANGED, GRADIENT, LOSS_SCALE
from distir_relax.proof.gradients import number_gradients
from distir_relax.proof.numbering import Numbering, plain
from distir_relax.proof.schedule import check_schedule

_HINT = "compile the model again: sharded.txt does not compute what model.txt does"


@dataclass(frozen=True, slots=True)
class Unproved:
    """An op of a program whose result is taken on trust, and why."""

    op: Op
    reason: str


def check_model(model: Module, sharded: Module) -> list[Unproved]:
    """Check a sharded program against its model; return the ops that are taken on trust, with reasons.

    Raises `VerificationError` that names the first op which is none of the model's, or of its gradients.
    """
    try:
        with gc_disabled():
            return _compare(model, sharded)
    except _OtherResult as found:
        copies = [record for record in sharded.records if isinstance(record, HeadPartition) and record.copies]
        if not copies or found.op is None:
            raise
        return [Unproved(found.op, f"the heads of {copies[0].value} have copies on other devices")]


def _compare(model: Module, sharded: Module) -> list[Unproved]:
    parts = next((record for record in sharded.records if isinstance(record, MicrobatchProgram)), None)
    updates = [record for record in sharded.records if isinstance(record, UpdateProgram)]
    numbering = Numbering()
    program, imported = inline(sharded).main, inline(model).main
    if len(updates) > 1 and parts is None:
        return _compare_outputs(numbering, program, _of_updates(numbering, imported, program, updates))
    update = parse(updates[0].text).main if updates else None
    if parts is None:
        given = _gradients_given(program)
        results, gradients = _of_model(numbering, imported, program, _gradients_of(update) or given)
        results.update((program.gradients[name].name, gradients[name]) for name in given)
        changed = _changed(numbering, imported, program)
        return _compare_outputs(numbering, program, {**results, **_of_update(numbering, update, gradients, changed)})
    whole, in_time = inline(parse(parts.sharded)), inline(parse(parts.placed))
    check_schedule(whole, in_time)
    step = whole.main
    wrt = _gradients_given(step)
    results, gradients = _of_model(numbering, imported, step, wrt)
    named = {step.gradients[name].name: number for name, number in gradients.items()}
    _compare_outputs(numbering, step, {**results, **named})
    in_parts = _Parts(numbering, step, in_time.main, in_time.meshes[0].size)
    expected = in_parts.outputs()
    gradients = {name: expected.pop(step.gradients[name].name) for name in wrt}
    changed = {name: in_parts.numbers[0][value.name] for name, value in _in_place_of(in_time.main).items()}
    own = replace(step, outputs=tuple(Output(name, value) for name, value in _in_place_of(step).items()))
    _compare_outputs(numbering, own, _changed(numbering, imported, step))
    return _compare_outputs(numbering, program, {**expected, **_of_update(numbering, update, gradients, changed)})


def _of_model(
    numbering: Numbering, model: Function, program: Function, wrt: Sequence[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of the model's results by name, and those of the gradients of the first one by parameter.

    The chain rule follows the ops of `program`, which may be fused, once its result is that of the model; if the model
    computes gradients of its own, which a program without them has, it follows the model's.
    """
    inputs = {item.value.name: item.value for item in program.inputs}
    numbers = numbering.add_all(model.ops, _number_model_inputs(numbering, model, inputs, {}))
    results = {output.name: numbers[output.value.name] for output in model.outputs}
    if not wrt:
        return results, {}
    loss = next(output for output in program.outputs if output.name == model.outputs[0].name)
    _compare_outputs(numbering, replace(program, outputs=(loss,)), {loss.name: results[loss.name]})
    scale = inputs.get(LOSS_SCALE)
    if any(Trait.OWN_GRADIENT in lookup(op.name, op.location).traits for op in model.ops):
        ops, known, of = list(model.ops), numbers, model.outputs[0].value
    else:
        ops, of = _ancestors(program, loss.value.name), loss.value
        known = numbering.add_all(ops, _number_inputs(numbering, program))
    return results, number_gradients(numbering, ops, known, of, wrt, None if scale is None else plain(scale))


def _number_model_inputs(
    numbering: Numbering, model: Function, inputs: Mapping[str, Value], new: Mapping[str, int]
) -> dict[str, int]:
    """Return the numbers of a model's inputs, which may have another dtype in the program; `new` has those of some."""
    numbers: dict[str, int] = {}
    for item in model.inputs:
        value, own = item.value, inputs.get(item.value.name, item.value)
        number = new.get(value.name, numbering.input(own))
        is_kept = plain(own).tensor.dtype == value.tensor.dtype
        numbers[value.name] = number if is_kept else numbering.converted(own, value.tensor.dtype, number)
    return numbers


def _of_updates(
    numbering: Numbering, model: Function, program: Function, updates: Sequence[UpdateProgram]
) -> dict[str, int]:
    """Return the numbers of the results of several updates, by name.

    Each op of the model sees the parameters after the updates by all losses before it. What parameters alone are
    computed to is computed again after an update. Gradients are those of each loss by the parameters of its update, for
    which the values that earlier updates have given are constants.
    """
    inputs = {item.value.name: item.value for item in program.inputs}
    losses = {output.name: output.value.name for output in model.outputs}
    found = {output.name: output.value for output in program.outputs}
    alone = {item.value.name for item in model.inputs if item.role == "parameter"}
    numbers = _number_model_inputs(numbering, model, inputs, {})
    expected: dict[str, int] = {}
    of_parameters, left = list[Op](), list(model.ops)
    for record in updates:
        while losses[record.loss] not in numbers:
            op = left.pop(0)
            numbering.add_all([op], numbers)
            if all(value.name in alone for value in op.operands):
                alone.update(value.name for value in op.results)
                of_parameters.append(op)
        expected[record.loss] = numbers[losses[record.loss]]
        loss = next(output for output in program.outputs if output.name == record.loss)
        _compare_outputs(numbering, replace(program, outputs=(loss,)), {record.loss: expected[record.loss]})
        # New parameters have the name of their input in the numbers of the model, and one of their own in the program.
        nexts = {output.name for output in program.next_values.values()}
        given = {found[name].name: number for name, number in expected.items() if name in nexts}
        ops = _ancestors(program, loss.value.name, given=given)
        update = parse(record.text).main
        known = numbering.add_all(ops, {**_number_inputs(numbering, program), **given})
        gradients = number_gradients(numbering, ops, known, loss.value, _gradients_of(update), None)
        expected.update(_of_update(numbering, update, gradients, {}))
        new = {of: expected[o.name] for of, o in program.next_values.items() if of in inputs and o.name in expected}
        numbers.update(_number_model_inputs(numbering, model, inputs, new))
        numbering.add_all(of_parameters, numbers)
    numbering.add_all(left, numbers)
    others = {output.name: numbers[output.value.name] for output in model.outputs if output.name not in expected}
    return {**expected, **others}


def _gradients_of(update: Function | None) -> list[str]:
    """Return the parameters of whose gradients an optimizer's program computes new values."""
    names = () if update is None else [item.value.name for item in update.inputs]
    return [name.removesuffix(GRADIENT) for name in names if name.endswith(GRADIENT)]


def _gradients_given(program: Function) -> list[str]:
    """Return the inputs whose gradients are outputs of a program."""
    inputs = {item.value.name for item in program.inputs}
    return [name for name in program.gradients if name in inputs]


def _changed(numbering: Numbering, model: Function, program: Function) -> dict[str, int]:
    """Return the numbers of what the model leaves in the place of parameters that it changes, by name."""
    last = _in_place_of(model)
    inputs = {item.value.name: item.value for item in program.inputs}
    ops = _ancestors(model, *(value.name for value in last.values()))
    numbers = numbering.add_all(ops, _number_model_inputs(numbering, model, inputs, {})) if last else {}
    return {name: numbers[value.name] for name, value in last.items()}


def _in_place_of(function: Function) -> dict[str, Value]:
    """Return the values that are in the place of parameters at the end (`Trait.REPLACES`), by name."""
    names = {item.value.name: item.value.name for item in function.inputs if item.role == "parameter"}
    last: dict[str, Value] = {}
    for op in function.ops:
        traits = lookup(op.name, op.location).traits
        name = names.get(op.operands[0].name) if op.operands else None
        if name is not None and not traits.isdisjoint({Trait.REPLACES, Trait.ANNOTATION, Trait.REDISTRIBUTION}):
            names[op.results[0].name] = name
            last |= {name: op.results[0]} if Trait.REPLACES in traits else {}
    return last


def _of_update(
    numbering: Numbering, update: Function | None, gradients: Mapping[str, int], changed: Mapping[str, int]
) -> dict[str, int]:
    """Return the numbers of what an optimizer's program gives with these gradients, by name.

    Those `changed` are updated instead of the parameters of these names.
    """
    if update is None:
        return {}
    given = {f"{name}{GRADIENT}": number for name, number in gradients.items()}
    given |= {f"{name}{CHANGED}": number for name, number in changed.items()}
    inputs = [item.value for item in update.inputs]
    for name in changed:
        if all(value.name != f"{name}{CHANGED}" for value in inputs):
            raise _OtherResult(
                f"the new value of {name!r} is not computed from what the model leaves in its place", "", _HINT
            )
    numbers = {v.name: given[v.name] if v.name in given else numbering.input(v) for v in inputs}
    numbering.add_all(update.ops, numbers)
    return {output.name: numbers[output.value.name] for output in update.outputs}


def _number_inputs(numbering: Numbering, program: Function) -> dict[str, int]:
    return {item.value.name: numbering.input(item.value) for item in program.inputs}


def _compare_outputs(numbering: Numbering, program: Function, expected: Mapping[str, int]) -> list[Unproved]:
    """Compare the outputs of a program; return the ops whose results are outputs that are not expected.

    A weight that is assigned to itself is none of them. Raises `_OtherResult` for an output that is missing, or has
    another number than the expected one.
    """
    known = range(numbering.expressions.count)
    needed = _ancestors(program, *(output.value.name for output in program.outputs))
    numbers = numbering.add_all(needed, _number_inputs(numbering, program))
    found = {output.name: output.value.name for output in program.outputs}
    of = {output.name: output.of for output in program.outputs}
    for name, number in expected.items():
        if name not in found:
            raise _OtherResult(f"the output {name!r} is missing", "", _HINT)
        if numbers[found[name]] == number:
            continue
        first = next((op for op in _ancestors(program, found[name]) if numbers[op.results[0].name] not in known), None)
        if first is None:
            raise _OtherResult(f"the output {name!r} is another value of the model", "", _HINT)
        error = _OtherResult(
            f"the output {name!r} is not the model's: the model does not do {print_op(first)}", first.location, _HINT
        )
        error.op = first
        raise error
    producers = {value.name: op for op in needed for value in op.results}
    others = {name: producers[value] for name, value in found.items() if name not in expected and value in producers}
    return [
        Unproved(op, f"the model has no output {name!r}")
        for name, op in others.items()
        if any(value.name != of[name] for value in op.operands)
    ]


def _ancestors(program: Function, *names: str, given: Collection[str] = ()) -> list[Op]:
    """Return the ops that values depend on, in order, but for those of values that are `given`."""
    needed = set(names)
    found = []
    for op in reversed(program.ops):
        if any(value.name in needed and value.name not in given for value in op.results):
            needed.update(value.name for value in op.operands)
            found.append(op)
    return found[::-1]


class _OtherResult(VerificationError):
    """A result of the model is another one in the program, for the first time by `op`."""

    op: Op | None = None


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
