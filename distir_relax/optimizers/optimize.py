"""The pass that makes a step of training of a program with gradients: clipped, and every parameter updated in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.ir import Function, Module, Output, TensorType, Value, live_ops
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.clip import clipped
from distir_relax.optimizers.optimizer import Numbers, Optimizer

RATE = "learning_rate"
"""The input of a step that is its learning rate, a float64 without dims."""
STEP = "optimizer.step"
"""The state that counts steps, an int64 without dims."""
GRADIENT = ".grad"
NEW = ".new"
"""What names of outputs end in: of gradients, and of new values of weights and state."""


@dataclass(frozen=True, slots=True)
class Optimize:
    """The pass: global stage in and out. Outputs ``NAME.grad`` of parameters become updates of the parameters.

    Behind it the program has an input `RATE`, the state that the `optimizer` keeps (``NAME.exp_avg``), which is to
    begin with zeros (`with_state`), and for each tensor that it updates an output ``NAME.new``, the result of an op in
    place. `trained` are the parameters that are updated, by default all that have a gradient. With `clip_norm`
    gradients are scaled down, together, to that norm where theirs is larger. Raises `DistIRError` for a parameter
    without a gradient, for one that is of no floating dtype, and where there is none to train.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    optimizer: Optimizer
    trained: tuple[str, ...] | None = None
    clip_norm: float | None = None

    def run(self, module: Module) -> Module:
        """The module with a step of the optimizer behind its gradients."""
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise DistIRError(f"expected a norm above 0 to clip gradients to, found {self.clip_norm}")
        main = module.main
        parameters = {i.value.name: i.value for i in main.inputs if i.role == "parameter"}
        grads = {name: o.value for o in main.outputs if (name := o.name.removesuffix(GRADIENT)) in parameters}
        grads = {name: value for name, value in grads.items() if self.trained is None or name in self.trained}
        self._check(parameters, grads)
        g = Builder.of(main)
        g.location = ""
        outputs = [o for o in main.outputs if o.name.removesuffix(GRADIENT) not in parameters]
        outputs += self._step(g, {name: parameters[name] for name in grads}, grads)
        whole = Function(main.name, tuple(g.inputs), tuple(g.ops), tuple(outputs))
        return replace(module, functions=(replace(whole, ops=live_ops(whole)), *module.functions[1:]))

    def _check(self, parameters: Mapping[str, Value], grads: Mapping[str, Value]) -> None:
        wanted = parameters if self.trained is None else self.trained
        if unknown := [name for name in wanted if name not in parameters]:
            raise DistIRError(
                f"the program has no parameter {unknown[0]!r} to train",
                hint=f"its parameters are {', '.join(list(parameters)[:6])}",
            )
        if not grads or (self.trained is not None and len(grads) < len(set(self.trained))):
            lacks = ", ".join([name for name in wanted if name not in grads][:4]) or "any parameter"
            raise DistIRError(f"the program gives no gradient of {lacks}", hint="put Differentiate() before Optimize")

    def _step(self, g: Builder, parameters: Mapping[str, Value], grads: Mapping[str, Value]) -> list[Output]:
        """Write the step; the outputs that are new values."""
        rate = g.input(RATE, TensorType((), "float64"))
        outputs: list[Output] = []
        count: Value | None = None
        if self.optimizer.counts:
            before = g.input(STEP, TensorType((), "int64"), "state")
            after = g.emit("add", before, g.constant(1, "int64"))
            outputs.append(Output(STEP + NEW, g.emit("assign", before, after)))
            count = cast(g, after, "float64")
        if self.clip_norm is not None:
            grads = clipped(g, grads, self.clip_norm)
        numbers: dict[str, Numbers] = {}
        for name, parameter in parameters.items():
            dtype = parameter.tensor.dtype
            if dtype not in numbers:
                g.hint = ""
                numbers[dtype] = self.optimizer.numbers(g, rate, count, dtype)
            state = {kept: g.input(f"{name}.{kept}", parameter.tensor, "state") for kept in self.optimizer.keeps}
            g.hint = f"{name}{NEW}"
            new = self.optimizer.update(g, parameter, grads[name], state, numbers[dtype])
            outputs += [Output(f"{name}.{kept}{NEW}" if kept else f"{name}{NEW}", v) for kept, v in new.items()]
        return outputs
