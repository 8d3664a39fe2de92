"""Totals over the batches of an evaluation, from which the loss and the metrics are computed as of one batch.

A scalar such as a mean over labels is a function of sums over samples, ``divide(sum(losses), sum(labels))``. The
evaluation keeps these sums as state, adds those of each batch, and applies the function to the totals: batches count by
their labels, as they do within a batch in training. That is done for scalars whose value does not depend on the unit of
the sums, f(2 s) = f(s), and for sums themselves, f(s) = s; the function is tried on numbers. Others, such as means over
all elements, whose number the program does not add up, are means over batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distir_relax.analysis.global_executor import interpret
from distir_relax.errors import DistIRError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch.loss_module import TOTALS
from distir_relax.ir import Function, Input, Op, Output, TensorType, Value, dependents, live_ops, producers
from distir_relax.layout import is_symbolic
from distir_relax.ops import Builder, cast, lookup
from distir_relax.optimizers import NEW

if TYPE_CHECKING:
    import torch

SUM, COUNT = "sum", "count"
"""Suffixes of the outputs of a metric that returns a pair, after a dot."""


def keep_totals(imported: Imported, names: Collection[str], rows: int) -> Imported:
    """Return an evaluation whose scalar outputs `names` are of all batches since its state was zero, where they can be.

    The example has `rows` samples. The names of states begin with `TOTALS`.
    """
    import torch

    main = imported.module.main
    g, analysis = Builder.of(main), _Batches(main, rows)
    g.location = ""
    outputs, updates = list[Output](), list[Output]()
    zeros: dict[str, torch.Tensor] = {}
    by_name = {output.name: output for output in main.outputs}
    for output in main.outputs:
        name, _, part = output.name.rpartition(".")
        if name in names and part == COUNT:
            continue
        scalar = analysis.scalar(output.value) if output.name in names else None
        if name in names and part == SUM:
            # Both are given as sums, whatever computes them.
            count, first = by_name[f"{name}.{COUNT}"].value, len(g.ops)
            quotient = g.emit("divide", output.value, cast(g, count, output.value.tensor.dtype))
            scalar = _Scalar([output.value, count], g.ops[first:], True)
            output = Output(name, quotient)
        if scalar is None or not scalar.is_total:
            outputs.append(output)
            continue
        totals: dict[str, Value] = {}
        for value in scalar.sums:
            dtype = "float64" if "float" in value.tensor.dtype else "int64"
            name, kind = f"{TOTALS}.{output.name}.{value.name}", TensorType(value.tensor.shape, dtype)
            state = g.input(name, kind, "state")
            total = g.emit("add", state, cast(g, value, dtype))
            updates.append(Output(f"{name}{NEW}", g.emit("assign", state, total)))
            zeros[name] = torch.zeros(kind.shape, dtype=getattr(torch, dtype))
            totals[value.name] = cast(g, total, value.tensor.dtype)
        for op in scalar.ops:
            operands = [totals.get(v.name, v) for v in op.operands]
            results = g.emit(op.name, *operands, **op.attrs)
            found = results if isinstance(results, tuple) else (results,)
            totals.update((old.name, new) for old, new in zip(op.results, found, strict=True))
        outputs.append(Output(output.name, totals[output.value.name]))
    if not updates:
        return imported
    changed = Function(main.name, tuple(g.inputs), tuple(g.ops), (*outputs, *updates))
    changed = replace(changed, ops=live_ops(changed))
    module = replace(imported.module, functions=(changed, *imported.module.functions[1:]))
    return replace(imported, module=module, tensors={**imported.tensors, **zeros})


def evaluated_names(main: Function) -> list[str]:
    """Return the outputs of an evaluation that are not new values of weights."""
    return [output.name for output in main.outputs if not output.name.endswith(NEW)]


def accumulated(main: Function) -> list[str]:
    """Return the outputs of an evaluation that are of all batches: that of the last one counts."""
    states = [item.value.name for item in main.inputs if item.value.name.startswith(f"{TOTALS}.")]
    values = dependents(main, states)
    return [o.name for o in main.outputs if not o.name.endswith(NEW) and o.value.name in values]


@dataclass(frozen=True)
class _Scalar:
    """A scalar as a function of `sums` over samples: its `ops`, in order; `is_total` if it can be one of totals."""

    sums: Sequence[Value]
    ops: Sequence[Op]
    is_total: bool


@dataclass
class _Batches:
    """Dependence of the values of an evaluation on the samples."""

    main: Function
    rows: int
    _producers: Mapping[str, Op] = field(init=False)
    _dependent: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._producers = producers(self.main)
        self._dependent = dependents(self.main, [i.value.name for i in self.main.inputs if i.role == "input"])

    def scalar(self, value: Value) -> _Scalar | None:
        """Return a scalar as a function of sums over samples; None if it depends on them in another way."""
        sums: dict[str, Value] = {}
        wanted, ops = {value.name}, list[Op]()
        for op in reversed(self.main.ops):
            needed = [v for v in op.results if v.name in wanted]
            if not needed:
                continue
            if needed[0].name in self._dependent and self._adds_samples(op):
                sums[needed[0].name] = needed[0]
            elif any(map(self._is_data, (*needed, *op.operands))):
                return None
            elif needed[0].name in self._dependent:
                ops.append(op)
                wanted.update(v.name for v in op.operands)
        if not sums:
            return None
        return _Scalar([*sums.values()], ops[::-1], self._is_total(value, sums, ops[::-1]))

    def _is_data(self, value: Value) -> bool:
        """Return whether a value is an input, or has a dim of samples that depends on one."""
        is_input = value.name not in self._producers
        return value.name in self._dependent and (is_input or self._has_samples(value))

    def _has_samples(self, value: Value) -> bool:
        """Return whether a value has a dim of samples."""
        shape = value.tensor.shape
        return is_symbolic(shape) or bool(shape and shape[0] and shape[0] % self.rows == 0)

    def _adds_samples(self, op: Op) -> bool:
        """Return whether the results of an op for parts of the batch are added up to that for the batch."""
        entry = lookup(op.name)
        if any(map(self._has_samples, op.results)) or not any(map(self._has_samples, op.operands)):
            return False
        rule = entry.rule_for([v.tensor for v in op.operands], op.attrs, [v.tensor for v in op.results])
        reduced = [factor.kind for factor in rule.factors if factor.kind in ("sum", "max", "min")]
        return reduced == ["sum"] * len(reduced) != [] and not entry.split.expand

    def _is_total(self, value: Value, sums: Mapping[str, Value], ops: Sequence[Op]) -> bool:
        """Return whether the function is homogeneous of degree 0, or the sum itself, on numbers."""
        import torch

        within = {v.name for op in ops for v in op.results}
        operands = {v.name: v for op in ops for v in op.operands if v.name not in within}
        others = {name: v for name, v in operands.items() if name not in sums}
        inputs = {**sums, **others}
        outputs = (Output("value", value),)
        function = Function("main", tuple(Input(v, "input") for v in inputs.values()), tuple(ops), outputs)
        generator = torch.Generator().manual_seed(0)

        def number(v: Value) -> torch.Tensor:
            drawn = 4096 * (1 + torch.rand(v.tensor.shape, generator=generator, dtype=torch.float64))
            return drawn.to(getattr(torch, v.tensor.dtype))

        given = {name: number(v) for name, v in inputs.items()}
        constants = {name: self._constant(v) for name, v in others.items()}
        given |= {name: tensor for name, tensor in constants.items() if tensor is not None}
        doubled = {name: 2 * tensor if name in sums else tensor for name, tensor in given.items()}
        try:
            one, two = (float(interpret(function, tensors)["value"]) for tensors in (given, doubled))
        except (DistIRError, RuntimeError):
            return False
        if not ops:
            return True
        plain = sum(float(given[name].sum()) for name in sums)
        return math.isclose(one, two, rel_tol=1e-3) or (
            math.isclose(one, plain, rel_tol=1e-6) and math.isclose(two, 2 * plain, rel_tol=1e-6)
        )

    def _constant(self, value: Value) -> torch.Tensor | None:
        """Return the number that a value has in each call; None for one that depends on inputs or weights."""
        required, ops = {value.name}, list[Op]()
        for op in reversed(self.main.ops):
            if any(v.name in required for v in op.results):
                ops.append(op)
                required.update(v.name for v in op.operands)
        if any(item.value.name in required for item in self.main.inputs):
            return None
        function = Function("main", (), tuple(reversed(ops)), (Output("value", value),))
        return interpret(function, {})["value"]
