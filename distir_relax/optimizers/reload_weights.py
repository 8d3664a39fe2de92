"""Weights of a program that change between its calls: those of an evaluation during training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.ir import Module
from distir_relax.ops import Builder
from distir_relax.optimizers.optimize import next_value


@dataclass(frozen=True, slots=True)
class ReloadWeights:
    """Pass within the global stage: weights called `names` may be written between two calls.

    Each is assigned to itself, which takes no time, and is an output ``NAME.new``: as the weights of a training step,
    it is then kept as it is, and nothing is computed from it in advance. Names that are no weights are ignored.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    names: tuple[str, ...]

    def run(self, module: Module) -> Module:
        """Return the module with an assignment of each weight at its end."""
        main = module.main
        g = Builder.of(main)
        g.location = ""
        weights = {i.value.name: i.value for i in main.inputs if i.role in ("parameter", "state")}
        new = [(name, g.emit("assign", weights[name], weights[name])) for name in self.names if name in weights]
        outputs = (*main.outputs, *(next_value(name, value) for name, value in new))
        return replace(module, functions=(replace(main, ops=tuple(g.ops), outputs=outputs), *module.functions[1:]))
