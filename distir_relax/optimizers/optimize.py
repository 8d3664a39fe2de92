"""Optimizer pass: turn a program with gradients into a training step, with clipping and in-place updates."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from distir_relax.bundle import OWN_STEP, STEP_COUNT
from distir_relax.errors import DistIRError
from distir_relax.ir import (
    NEXT_ROLE,
    Function,
    Module,
    Op,
    Output,
    TensorType,
    UpdateProgram,
    Value,
    live_ops,
    print_module,
)
from distir_relax.ops import Builder, Trait, cast, lookup
from distir_relax.optimizers.averaging import Averaging, add_averages
from distir_relax.optimizers.clip import clip_gradients, norm_of_gradients
from distir_relax.optimizers.conditional_update import ConditionalUpdate
from distir_relax.optimizers.loss_scale import LOSS_SCALE, LossScale, ScaledStep
from distir_relax.optimizers.optimizer import Numbers, Optimizer, Update, rates_of
from distir_relax.optimizers.order_updates import OpsBetweenUpdates
from distir_relax.support.learning_rate import MOMENTUM, RATE, Schedule, as_schedule, is_of_kind

STEP = STEP_COUNT
"""The state that counts steps, an int64 scalar."""
GRADIENT_NORM = "gradient_norm"
"""The output with the norm of all gradients before clipping, a scalar of float32 or float64."""
GRADIENT = ".grad"
NEW = ".new"
"""Suffixes of the names of outputs: gradients, and next values of weights and state (`Output.role`)."""
CHANGED = ".changed"
"""Suffix of inputs of an update's own program: what the model leaves in the place of a parameter."""


def next_value(name: str, value: Value) -> Output:
    """Return the output with the next value of a weight or a state."""
    return Output(f"{name}{NEW}", value, role=NEXT_ROLE, of=name)


@dataclass(frozen=True, slots=True)
class Optimize:
    """Pass within the global stage: outputs ``NAME.grad`` of parameters become updates of the parameters.

    The result has an input for each learning rate (`rates_of`), the state of the `optimizer` (``NAME.exp_avg``),
    initially zero (`with_state`), and for each tensor that it updates an output ``NAME.new``, the result of an in-place
    op; new values from other ops are written back by ``assign``. `trained` are the parameters to update, by default all
    that have a gradient. With `clip_norm` gradients are scaled down to that global norm if theirs is larger. With it,
    and with `gradient_norm`, the norm of the gradients before is the output ``gradient_norm``. Raises
    `DistIRError` for a parameter without a gradient, or of no floating dtype, if there is none to train, for a group
    without parameters, and for an optimizer whose `update` omits a new value, returns one of another type, or reads an
    old value after overwriting it. With `averaging` the state ``NAME.averaged`` is an average of each parameter. With
    `loss_scale` gradients are those of the loss times the state ``loss_scale``, and updates depend on them all being
    finite (`LossScale`). Several updates (`Updates`) are made in order, each before the ops that use its new values.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    optimizer: Optimizer
    trained: tuple[str, ...] | None = None
    clip_norm: float | None = None
    averaging: Averaging | None = None
    gradient_norm: bool = False
    loss_scale: LossScale | None = None

    def run(self, module: Module) -> Module:
        """Return the module with a step of the optimizer after its gradients."""
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise DistIRError(f"expected a norm above 0 to clip gradients to, found {self.clip_norm}")
        main = module.main
        parameters = {i.value.name: i.value for i in main.inputs if i.role == "parameter"}
        given = {name: output for name, output in main.gradients.items() if name in parameters}
        grads = {name: o.value for name, o in given.items() if self.trained is None or name in self.trained}
        self._check(parameters, grads)
        g = Builder.of(main)
        g.location, g.ops = "", []
        outputs = [o for o in main.outputs if o not in given.values()]
        ops, records = OpsBetweenUpdates(g, main.ops), list[UpdateProgram]()
        begun = _Begun(in_place_of=_in_place_of(module, parameters, len(self.optimizer.updates) > 1))
        for number, update in enumerate(self.optimizer.updates):
            ops.emit_before(number)
            mine = {name: value for name, value in grads.items() if update.of(name)}
            of = {name: parameters[name] for name in mine}
            _check_groups(update.optimizer, list(of))
            new = self._step(g, update, of, mine, begun)
            values = {output.of: output.value for output in new}
            ops.updated(number, update, {name: values[name] for name in mine})
            outputs += new
            program = self._program(update, of, mine, begun.in_place_of, is_first=not number)
            records.append(UpdateProgram(print_module(program), update.loss))
        ops.emit_before(None)
        updated = Function(main.name, tuple(g.inputs), tuple(g.ops), tuple(outputs))
        functions = (replace(updated, ops=live_ops(updated)), *module.functions[1:])
        return replace(module, functions=functions, records=(*module.records, *records))

    def _program(
        self, update: Update, parameters: Mapping[str, Value], grads: Mapping[str, Value],
        in_place_of: Collection[str], is_first: bool,
    ) -> Module:  # fmt: skip
        """Return the program of an update alone, whose inputs are the gradients, too, and what the model changes."""
        g = Builder()
        taken = {name: g.input(name, value.tensor, "parameter") for name, value in parameters.items()}
        if self.loss_scale is not None:
            g.input(LOSS_SCALE, TensorType((), "float32"), "state")
        gradients = {name: g.input(f"{name}{GRADIENT}", value.tensor) for name, value in grads.items()}
        changed = {n: g.input(f"{n}{CHANGED}", v.tensor) for n, v in parameters.items() if n in in_place_of}
        outputs = self._step(g, update, taken, gradients, _Begun(in_place_of=changed))
        # The first update counts the step.
        outputs = [output for output in outputs if is_first or output.of != STEP]
        program = Function("main", tuple(g.inputs), tuple(g.ops), tuple(outputs))
        return Module("global", (replace(program, ops=live_ops(program)),))

    def _check(self, parameters: Mapping[str, Value], grads: Mapping[str, Value]) -> None:
        trained = parameters if self.trained is None else self.trained
        if unknown := [name for name in trained if name not in parameters]:
            raise DistIRError(
                f"the program has no parameter {unknown[0]!r} to train",
                hint=f"its parameters are {', '.join(list(parameters)[:6])}",
            )
        for part in self.optimizer.parts:
            for pattern in part.no_decay_patterns:
                if not any(fnmatchcase(name, pattern) for name in parameters):
                    near = difflib.get_close_matches(pattern, parameters, 1) or list(parameters)[:6]
                    raise DistIRError(
                        f"no parameter matches {pattern!r} of `no_decay`", type(part).__name__,
                        f"parameters have names such as {', '.join(near)}",
                    )  # fmt: skip
        if not grads or (self.trained is not None and len(grads) < len(set(self.trained))):
            missing = ", ".join([name for name in trained if name not in grads][:4]) or "any parameter"
            raise DistIRError(
                f"the program gives no gradient of {missing}",
                hint="the loss does not depend on it, or Differentiate has not run",
            )

    def _step(
        self, g: Builder, update: Update, parameters: Mapping[str, Value], grads: Mapping[str, Value], begun: _Begun
    ) -> list[Output]:
        """Emit an update; return the outputs with new values."""
        if not begun.rates:
            inputs = rates_of(self.optimizer).items()
            begun.rates = [(name, schedule, g.input(name, TensorType((), "float64"))) for name, schedule in inputs]
        outputs: list[Output] = []
        scaled = None if self.loss_scale is None else ScaledStep(g, grads, self.loss_scale)
        writing = None if scaled is None else scaled.writing
        if scaled is not None:
            grads = scaled.unscaled
            outputs += [next_value(name, value) for name, value in scaled.next_scale()]
        if begun.step is None and self._counts:
            before = g.input(STEP, TensorType((), "int64"), "state")
            following = g.emit("add", before, g.constant(1, "int64"))
            begun.step = (_write_back(g, before, following, writing), following)
            outputs.append(next_value(STEP, begun.step[0]))
        count: Value | None = None if begun.step is None else cast(g, begun.step[1], "float64")
        number = count
        if update.every > 1 and begun.step is not None:
            writing, number = _when_due(g, begun.step[1], update.every)
        if self.clip_norm is not None or self.gradient_norm:
            norm = norm_of_gradients(g, grads)
            if len(self.optimizer.updates) == 1:
                outputs.append(Output(GRADIENT_NORM, norm))
            if self.clip_norm is not None:
                grads = clip_gradients(g, grads, self.clip_norm, norm)
        numbers: dict[tuple[int, str, str], Numbers] = {}
        weights: dict[str, Value] = {}
        for name, parameter in parameters.items():
            optimizer, dtype = update.optimizer.of(name), parameter.tensor.dtype
            kinds = optimizer.states(parameter.tensor)
            state = {label: g.input(f"{name}.{label}", kind, "state") for label, kind in kinds.items()}
            key = id(optimizer), dtype, name if optimizer.own_steps else ""
            counted: dict[str, Value] = {}
            if key not in numbers:
                numbers[key], counted = _numbers(g, optimizer, number, state, dtype, begun)
            g.hint = f"{name}{NEW}"
            gradient = g.emit("negative", grads[name]) if optimizer.maximize else grads[name]
            start = len(g.ops)
            present = begun.in_place_of.get(name, parameter)
            new = _for(optimizer, parameter, present).update(g, present, gradient, state, numbers[key]) | counted
            old = {**state, "": parameter}
            self._check_new(name, old, new)
            if writing is not None:
                writing.keep(start, old.values())
            # Compute all new values before the first is written back: they may depend on old ones.
            kept = {label: _write_back(g, old[label], value, writing) for label, value in new.items()}
            outputs += [next_value(f"{name}.{label}" if label else name, value) for label, value in kept.items()]
            weights[name] = kept[""]
            self._check_order(name, g.ops[start:])
        if self.averaging is not None and count is not None:
            averages = add_averages(g, weights, self.averaging, count)
            skipped = None if scaled is None else writing
            outputs += [next_value(name, _write_back(g, *pair, skipped)) for name, pair in averages.items()]
        return outputs

    @property
    def _counts(self) -> bool:
        """Whether the step needs its number."""
        needs = self.averaging is not None or any(part.counts and not part.own_steps for part in self.optimizer.parts)
        return needs or any(update.every > 1 for update in self.optimizer.updates)

    def _where(self, name: str) -> str:
        return f"{type(self.optimizer.of(name)).__name__}.update, for the parameter {name!r}"

    def _check_order(self, name: str, ops: Sequence[Op]) -> None:
        """Raise `DistIRError` if an old value is read after it was overwritten."""
        updated: dict[Value, str] = {}
        for op in ops:
            for value in op.operands:
                if value in updated:
                    raise DistIRError(
                        f"{op.name} reads the old value {value.name!r} after {updated[value]} has overwritten it",
                        self._where(name),
                        "compute a copy of the old value before the op that updates it",
                    )
            if lookup(op.name).updates:
                updated[op.operands[0]] = op.name

    def _check_new(self, name: str, old: Mapping[str, Value], new: Mapping[str, Value]) -> None:
        where = self._where(name)
        label = {key: f"the state {key!r}" if key else 'the parameter (under "")' for key in {**old, **new}}
        for key in old:
            if key not in new:
                raise DistIRError(f"expected a new value of {label[key]}, found none", where)
        for key, value in new.items():
            if key not in old:
                raise DistIRError(f"gives a new value of {label[key]}, which `states` does not name", where)
            if value.tensor != old[key].tensor:
                raise DistIRError(
                    f"expected a new value of {label[key]} of type {old[key].tensor}, found {value.tensor}", where
                )


@dataclass
class _Begun:
    """What the updates of a step share: the inputs for `rates`, and the number of the `step` as state and as value."""

    rates: list[tuple[str, Schedule, Value]] = field(default_factory=list)
    step: tuple[Value, Value] | None = None
    in_place_of: dict[str, Value] = field(default_factory=dict)
    """What the model leaves in the place of each parameter."""

    def of(self, optimizer: Optimizer) -> dict[str, Value]:
        """Return the rate of an optimizer, and the momentum if it has a schedule."""
        found = {"rate": self._input(RATE, as_schedule(optimizer.lr))}
        if optimizer.momentum_schedule is not None:
            found["momentum"] = self._input(MOMENTUM, optimizer.momentum_schedule)
        return found

    def _input(self, kind: str, schedule: Schedule) -> Value:
        return next(value for name, known, value in self.rates if known == schedule and is_of_kind(name, kind))


def _in_place_of(module: Module, parameters: Mapping[str, Value], several: bool) -> dict[str, Value]:
    """Return what the model leaves in the place of parameters that it changes (`Trait.REPLACES`)."""
    names, found = {value: name for name, value in parameters.items()}, dict[str, Value]()
    hint = "with one update, data and tensor parallelism, outline=False, and precision='bf16' it is trained"
    for function in module.functions:
        for op in function.ops:
            traits = frozenset() if op.callee else lookup(op.name, op.location).traits
            name = names.get(op.operands[0]) if op.operands and function is module.main else None
            if Trait.REPLACES in traits and name is None:
                raise DistIRError(
                    f"{op.name} changes a parameter in a repeated block, a stage of a pipeline, or another dtype than "
                    "the parameter's", op.location, hint,
                )  # fmt: skip
            if Trait.REPLACES in traits and several:
                raise DistIRError(f"{op.name} changes a parameter of a step of several updates", op.location, hint)
            if name is not None and not traits.isdisjoint({Trait.REPLACES, Trait.ANNOTATION}):
                names[op.results[0]] = name
                found |= {name: op.results[0]} if Trait.REPLACES in traits else {}
    return found


def _numbers(
    g: Builder, optimizer: Optimizer, number: Value | None, state: Mapping[str, Value], dtype: str, begun: _Begun
) -> tuple[Numbers, dict[str, Value]]:
    """Emit the scalars of an update, and new values of the state: the number of the parameter's own updates."""
    g.hint = ""
    counted = {OWN_STEP: g.emit("add", state[OWN_STEP], g.constant(1, "int64"))} if optimizer.own_steps else {}
    own = cast(g, counted[OWN_STEP], "float64") if counted else number
    step = own if optimizer.counts else None
    return optimizer.numbers(g, step=step, dtype=dtype, **begun.of(optimizer)), counted


def _for(optimizer: Optimizer, parameter: Value, present: Value) -> Optimizer:
    """Return the optimizer of a parameter for the value in its place: weight decay goes by the parameter's name."""
    if present is parameter or not is_dataclass(optimizer) or not optimizer.no_decay_patterns:
        return optimizer
    return replace(optimizer, no_decay=(), weight_decay=optimizer.decay_of(parameter))


def _check_groups(optimizer: Optimizer, names: Sequence[str]) -> None:
    for pattern in optimizer.unused(names):
        shown = ", ".join(names[:6])
        raise DistIRError(f"no trained parameter matches {pattern!r}", type(optimizer).__name__, f"there are {shown}")


def _when_due(g: Builder, step: Value, every: int) -> tuple[ConditionalUpdate, Value]:
    """Emit whether an update is made in a step, and its number as float64; both count from 1."""
    place, interval = g.emit("subtract", step, g.constant(1, "int64")), g.constant(every, "int64")
    is_due = g.emit("equal", g.emit("mod", place, interval), g.constant(0, "int64"))
    number = g.emit("add", g.emit("floor_divide", place, interval), g.constant(1, "int64"))
    return ConditionalUpdate(g, is_due), cast(g, number, "float64")


def _write_back(g: Builder, old: Value, new: Value, writing: ConditionalUpdate | None = None) -> Value:
    """Return the result of an op that writes `new` into the memory of `old`, if `writing` allows."""
    if writing is not None:
        return writing.assign(old, new)
    producer = next((op for op in reversed(g.ops) if new in op.results), None)
    if producer is not None and lookup(producer.name).updates and producer.operands[0] == old:
        return new
    result: Value = g.emit("assign", old, new)
    return result
