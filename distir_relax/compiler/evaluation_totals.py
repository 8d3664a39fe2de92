"""Totals over the batches of an evaluation, from which the loss and the metrics are computed as of one batch.

A scalar such as a mean over labels is a function of sums over samples, ``divide(sum(losses), sum(labels))``, and of
means. The evaluation keeps these as state, adds those of each batch, and applies the function to the totals: batches
count by their labels, as they do within a batch in training. That is done for scalars whose value does not depend on
the unit of the sums, f(2 s) = f(s), and for sums themselves, f(s) = s; the function is tried on numbers. Others, such
as the largest error, or a sum divided by the number of samples, are means over batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch.loss_module import TOTALS
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import NEXT_ROLE, Function, Input, Op, Output, TensorType, Value, dependents, live_ops, producers
from distir_relax.layout import is_symbolic, typical_value
from distir_relax.ops import Builder, cast, evaluate, lookup
from distir_relax.ops.table import Rule
from distir_relax.ops.table.rule import BLOCKED, Factor
from distir_relax.optimizers import next_value

if TYPE_CHECKING:
    import torch

SUM, COUNT = "sum", "count"
"""Suffixes of the outputs of a metric that returns a pair, after a dot."""

_UNKNOWN = Factor("", 0, BLOCKED)


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
            scalar = _Scalar([output.value, count], [], g.ops[first:], True)
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
            updates.append(next_value(name, g.emit("assign", state, total)))
            zeros[name] = torch.zeros(kind.shape, dtype=getattr(torch, dtype))
            totals[value.name] = cast(g, total, value.tensor.dtype)
        for value, elements in scalar.means:
            name, count = f"{TOTALS}.{output.name}.{value.name}", g.constant(elements, "float64")
            terms = {name: g.emit("multiply", cast(g, value, "float64"), count), f"{name}.{COUNT}": count}
            sums = []
            for key, term in terms.items():
                state = g.input(key, TensorType(term.tensor.shape, "float64"), "state")
                sums.append(g.emit("add", state, term))
                updates.append(next_value(key, g.emit("assign", state, sums[-1])))
                zeros[key] = torch.zeros(term.tensor.shape, dtype=torch.float64)
            totals[value.name] = cast(g, g.emit("divide", *sums), value.tensor.dtype)
        for op in scalar.ops:
            operands = [totals.get(v.name, v) for v in op.operands]
            results = g.emit(op.name, *operands, **op.attrs)
            found = results if isinstance(results, tuple) else (results,)
            totals.update((old.name, new) for old, new in zip(op.results, found, strict=True))
        outputs.append(replace(output, value=totals[output.value.name]))
    if not updates:
        return imported
    changed = Function(main.name, tuple(g.inputs), tuple(g.ops), (*outputs, *updates))
    changed = replace(changed, ops=live_ops(changed))
    module = replace(imported.module, functions=(changed, *imported.module.functions[1:]))
    return replace(imported, module=module, tensors={**imported.tensors, **zeros})


def evaluated_names(main: Function) -> list[str]:
    """Return the outputs of an evaluation that are not new values of weights."""
    return [output.name for output in main.outputs if output.role != NEXT_ROLE]


def accumulated(main: Function) -> list[str]:
    """Return the outputs of an evaluation that are of all batches: that of the last one counts."""
    states = [item.value.name for item in main.inputs if item.value.name.startswith(f"{TOTALS}.")]
    values = dependents(main, states)
    return [o.name for o in main.outputs if o.role != NEXT_ROLE and o.value.name in values]


@dataclass(frozen=True)
class _Scalar:
    """A scalar as a function of sums and means over samples: its `ops`, in order.

    It `is_total` if it can be one of totals. A mean goes with the number of its elements, which may be symbolic.
    """

    sums: Sequence[Value]
    means: Sequence[tuple[Value, Any]]
    ops: Sequence[Op]
    is_total: bool


@dataclass
class _Batches:
    """Dependence of the values of an evaluation on the samples."""

    main: Function
    rows: int
    _producers: Mapping[str, Op] = field(init=False)
    _dependent: set[str] = field(init=False)
    _samples: dict[str, set[int]] = field(init=False, default_factory=dict)
    """The dims of samples, of values that have some."""

    def __post_init__(self) -> None:
        self._find_samples()
        self._producers = producers(self.main)
        self._dependent = dependents(self.main, [i.value.name for i in self.main.inputs if i.role == "input"])

    def scalar(self, value: Value) -> _Scalar | None:
        """Return a scalar as a function of sums and means over samples; None if it depends on them in another way."""
        sums: dict[str, Value] = {}
        means: dict[str, tuple[Value, Any]] = {}
        wanted, ops = {value.name}, list[Op]()
        for op in reversed(self.main.ops):
            needed = [v for v in op.results if v.name in wanted]
            if not needed:
                continue
            if needed[0].name in self._dependent and self._adds_samples(op):
                sums[needed[0].name] = needed[0]
            elif needed[0].name in self._dependent and self._averages_samples(op):
                elements = op.operands[0].tensor.elements // max(1, math.prod(needed[0].tensor.shape))
                means[needed[0].name] = needed[0], elements
            elif any(map(self._is_data, (*needed, *op.operands))):
                return None
            elif needed[0].name in self._dependent:
                ops.append(op)
                wanted.update(v.name for v in op.operands)
        if not sums and not means:
            return None
        averages = {name: mean for name, (mean, _) in means.items()}
        is_total = self._is_total(value, sums, averages, ops[::-1])
        return _Scalar([*sums.values()], [*means.values()], ops[::-1], is_total)

    def _is_data(self, value: Value) -> bool:
        """Return whether a value is an input, or has a dim of samples that depends on one."""
        is_input = value.name not in self._producers
        return value.name in self._dependent and (is_input or self._has_samples(value))

    def _has_samples(self, value: Value) -> bool:
        """Return whether a value has a dim of samples."""
        return value.name in self._samples

    def _adds_samples(self, op: Op) -> bool:
        """Return whether the results of an op for parts of the batch are added up to that for the batch."""
        special = {"*", *(factor.name for factor in self._factors(op).values())}
        return self._reduces_samples(op) and special.isdisjoint(lookup(op.name).split.expand)

    def _averages_samples(self, op: Op) -> bool:
        """Return whether the result is the mean over dims, those of samples among them: linear, and 1 for ones."""
        import torch

        entry = lookup(op.name)
        if (
            len(op.operands) != 1
            or not self._reduces_samples(op)
            or frozenset({0}) not in entry.linear_sets(1, op.attrs)
        ):
            return False
        kind = op.operands[0].tensor
        ones = torch.ones((2,) * len(kind.shape), dtype=getattr(torch, kind.dtype))
        return bool((evaluate(op, [ones])[0] == 1).all())

    def _reduces_samples(self, op: Op) -> bool:
        """Return whether an op sums up over samples."""
        factors = self._factors(op)
        if not factors or any(map(self._has_samples, op.results)):
            return False
        return all(factor.kind == "sum" for factor in factors.values())

    def _factors(self, op: Op) -> dict[int, Factor]:
        """Return the factors of an op that are samples, by index; a dim of samples without one has the index -1."""
        rule = self._rule(op)
        indices = {
            index
            for value, dims in zip(op.operands, rule.operands, strict=True)
            for dim in self._samples.get(value.name, ())
            for index in dims[dim] or (-1,)
        }
        return {index: rule.factors[index] if index >= 0 else _UNKNOWN for index in indices}

    def _rule(self, op: Op) -> Rule:
        return lookup(op.name).rule_for([v.tensor for v in op.operands], op.attrs, [v.tensor for v in op.results])

    def _find_samples(self) -> None:
        """Find the dims of samples of all values, which begin as the first dims of inputs."""
        for item in self.main.inputs:
            shape = item.value.tensor.shape
            if item.role == "input" and shape and typical_value(shape[0]) == self.rows:
                self._samples[item.value.name] = {0}
        for op in self.main.ops:
            factors = self._factors(op)
            if not factors:
                continue
            for value, result in zip(op.results, self._rule(op).results, strict=True):
                dims = {dim for dim, indices in enumerate(result) if factors.keys() & set(indices)}
                if dims or -1 in factors:
                    self._samples[value.name] = {*range(len(result))} if -1 in factors else dims

    def _is_total(self, value: Value, sums: Mapping[str, Value], means: Mapping[str, Value], ops: Sequence[Op]) -> bool:
        """Return whether the function is homogeneous of degree 0 in the sums, or the sum itself, on numbers."""
        import torch

        if not ops:
            return True
        within = {v.name for op in ops for v in op.results}
        operands = {v.name: v for op in ops for v in op.operands if v.name not in within}
        others = {name: v for name, v in operands.items() if name not in sums and name not in means}
        inputs = {**sums, **means, **others}
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
        plain = sum(float(given[name].sum()) for name in sums)
        return math.isclose(one, two, rel_tol=1e-3) or (
            not means and math.isclose(one, plain, rel_tol=1e-6) and math.isclose(two, 2 * plain, rel_tol=1e-6)
        )

    def _constant(self, value: Value) -> torch.Tensor | None:
        """Return the number that a value has in each call; None for one that depends on inputs or weights."""
        required, ops = {value.name}, list[Op]()
        for op in reversed(self.main.ops):
            if any(v.name in required for v in op.results):
                ops.append(op)
                required.update(v.name for v in op.operands)
        is_given = any(item.value.name in required for item in self.main.inputs)
        if is_given or any(is_symbolic(v) for op in ops for v in op.attrs.values()):
            return None
        function = Function("main", (), tuple(reversed(ops)), (Output("value", value),))
        return interpret(function, {})["value"]
