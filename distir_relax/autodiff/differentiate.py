"""Differentiate a program: add the gradients of one of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.autodiff.backward import gradients, is_differentiable
from distir_relax.autodiff.call_gradients import Functions
from distir_relax.autodiff.own_gradients import without_own_gradients
from distir_relax.errors import DistIRError
from distir_relax.ir import GRADIENT_ROLE, Function, Module, Op, Output, TensorType, Value, live_ops
from distir_relax.ops import Builder, cast, update_after_reads


@dataclass(frozen=True, slots=True)
class Differentiate:
    """Pass: global stage in and out. Each of the inputs `wrt` gets an output ``NAME.grad``, its gradient.

    `of` is the output to differentiate, a scalar of a floating dtype; by default the first. By default `wrt` is all
    parameters. A function is differentiated once, regardless of its number of calls: into a forward that saves values
    for the backward, and a backward in two slices, for the gradients of its inputs and of its weights. Raises
    `DistIRError` if the output is not a scalar, and for an input that it does not depend on; `UnsupportedOpError` for
    an op that cannot be differentiated. With `scale`, gradients are those of the output times a state of this name, a
    float32 scalar. Of a program with `several` losses, each is differentiated: the name of an output,
    followed by those of the inputs.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    of: str = ""
    wrt: tuple[str, ...] | None = None
    checkpoint: str = "none"
    scale: str = ""
    several: tuple[tuple[str, ...], ...] = ()

    def run(self, module: Module) -> Module:
        """Append gradients to the module's outputs."""
        main = module.main
        outputs = {o.name: o for o in main.outputs}
        if self.several:
            pairs = [(outputs[of], [i.value for i in main.inputs if i.value.name in wrt]) for of, *wrt in self.several]
        else:
            wrt = [i.value for i in main.inputs if self._is_wrt(i.value.name, i.role) and is_differentiable(i.value)]
            pairs = [(outputs.get(self.of, main.outputs[0]), wrt)]
        functions = Functions(module, self.checkpoint)
        ops = functions.forward(main.ops, [v.name for _, wrt in pairs for v in wrt])
        g = Builder.of(replace(main, ops=ops))
        grads: dict[str, Value] = {}
        for output, wrt in pairs:
            grads |= self._gradients(g, ops, output, [v.name for v in wrt], functions)
        wrt = [v for _, wrt in pairs for v in wrt]
        grad_outputs = tuple(Output(f"{v.name}.grad", grads[v.name], role=GRADIENT_ROLE, of=v.name) for v in wrt)
        ops = update_after_reads(g.ops)
        function = Function(main.name, tuple(g.inputs), ops, (*main.outputs, *grad_outputs))
        function = replace(function, ops=live_ops(function))
        return replace(module, functions=tuple(map(without_own_gradients, (function, *functions.used()))))

    def _gradients(
        self, g: Builder, ops: Sequence[Op], output: Output, names: Sequence[str], functions: Functions
    ) -> dict[str, Value]:
        """Emit the gradients of an output by the inputs of these names."""
        loss_type = output.value.tensor
        if loss_type.shape != () or not is_differentiable(output.value):
            raise DistIRError(
                f"expected a loss that is a number, found {loss_type}", f"output {output.name!r}",
                "return its mean or its sum",
            )  # fmt: skip
        seed = g.constant(1.0, loss_type.dtype)
        if self.scale:
            seed = cast(g, g.input(self.scale, TensorType((), "float32"), "state"), loss_type.dtype)
        grads = gradients(g, ops, {output.value.name: seed}, names, functions.step(g))
        missing = [name for name in names if name not in grads]
        if missing:
            raise DistIRError(
                f"the loss does not depend on {', '.join(missing[:4])}", f"output {output.name!r}",
                "leave these out of the parameters that are trained",
            )  # fmt: skip
        return grads

    def _is_wrt(self, name: str, role: str) -> bool:
        return role == "parameter" if self.wrt is None else name in self.wrt
