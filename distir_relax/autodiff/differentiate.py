"""The pass that adds to a program the gradients of one of its results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.autodiff.backward import gradients, is_differentiable
from distir_relax.autodiff.call_gradients import Functions
from distir_relax.errors import DistIRError
from distir_relax.ir import Function, Module, Output, live_ops
from distir_relax.ops import Builder


@dataclass(frozen=True, slots=True)
class Differentiate:
    """The pass: global stage in and out. Each of the inputs `wrt` gets an output ``NAME.grad``, its gradient.

    `of` is the output that is differentiated, a number of a floating dtype; by default the first. By default `wrt` is
    all parameters. A function is differentiated once, however often it is called: into a forward that keeps what the
    backward needs, and a backward in two slices, of the gradients of its inputs and of its weights. Raises
    `DistIRError` for an output that is no number, and for an input that it does not depend on; `UnsupportedOpError` for
    an op that cannot be differentiated.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    of: str = ""
    wrt: tuple[str, ...] | None = None
    checkpoint: str = "none"

    def run(self, module: Module) -> Module:
        """The module with gradients as outputs behind those that it has."""
        main = module.main
        output = next((o for o in main.outputs if o.name == self.of), main.outputs[0])
        kind = output.value.tensor
        if kind.shape != () or not is_differentiable(output.value):
            raise DistIRError(
                f"expected a loss that is a number, found {kind}", f"output {output.name!r}",
                "return its mean or its sum",
            )  # fmt: skip
        wanted = [i.value for i in main.inputs if self._wants(i.value.name, i.role) and is_differentiable(i.value)]
        functions = Functions(module, self.checkpoint)
        ops = functions.forward(main.ops, [v.name for v in wanted])
        g = Builder.of(replace(main, ops=ops))
        found = gradients(
            g, ops, {output.value.name: g.constant(1.0, kind.dtype)}, [v.name for v in wanted], functions.step(g)
        )
        missing = [v.name for v in wanted if v.name not in found]
        if missing:
            raise DistIRError(
                f"the loss does not depend on {', '.join(missing[:4])}", f"output {output.name!r}",
                "leave these out of the parameters that are trained",
            )  # fmt: skip
        grads = tuple(Output(f"{v.name}.grad", found[v.name]) for v in wanted)
        whole = Function(main.name, main.inputs, tuple(g.ops), (*main.outputs, *grads))
        return replace(module, functions=(replace(whole, ops=live_ops(whole)), *functions.used()))

    def _wants(self, name: str, role: str) -> bool:
        return role == "parameter" if self.wrt is None else name in self.wrt
