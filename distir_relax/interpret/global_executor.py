"""Reference executor of the global stage: the abstract interpreter over real tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distir_relax.errors import RunError
from distir_relax.interpret.interpreter import Domain, Interpreter
from distir_relax.ir import Function, Module, Op
from distir_relax.ops import evaluate
from distir_relax.ops.table.dispatch import type_of

if TYPE_CHECKING:
    import torch


def interpret(program: Function | Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a function, or the entry function of a module; return its outputs by output name.

    `inputs` has a tensor for each of the function's inputs, parameters and constants included, by value name.
    Raises `RunError` if one is missing or does not have the declared shape and dtype.
    """
    module = program if isinstance(program, Module) else Module("global", (program,))
    function = module.main
    tensors = []
    for item in function.inputs:
        name = item.value.name
        if name not in inputs:
            raise RunError(f"expected a tensor for {item.role} {name!r}, found none")
        found = type_of(inputs[name])
        if found != item.value.type:
            raise RunError(f"expected {item.value.type} for {item.role} {name!r}, found {found}")
        tensors.append(inputs[name])
    results = Interpreter(module, _Tensors()).run(tensors)
    return {output.name: tensor for output, tensor in zip(function.outputs, results, strict=True)}


class _Tensors(Domain["torch.Tensor"]):
    def apply(self, op: Op, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return evaluate(op, operands)
