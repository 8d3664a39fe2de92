"""A sharded program against its model: results, gradients, and new values of the optimizer's step.

The sharded program may have inputs and outputs in parts, for microbatches. Gradients are those of the chain rule on the
imported model (`distir_relax.proof.gradients`), whatever autodiff and the passes after it have made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from distir_relax.counterexample.comparison import (
    WHOLE,
    Comparison,
    Inputs,
    Outputs,
    only_output,
    run_whole,
    used_inputs,
    without_layouts,
)
from distir_relax.ir import MicrobatchParts, Module, Output, TensorType, live_ops
from distir_relax.optimizers import GRADIENT, LOSS_SCALE
from distir_relax.proof.gradients import emit_gradients

if TYPE_CHECKING:
    import torch


class ModelComparison(Comparison):
    """A sharded program against the model; `update` is the program of the optimizer's step.

    `parts` are the types of all outputs of the sharded program, if it is a part of it.
    """

    def __init__(
        self,
        model: Module,
        sharded: Module,
        update: Module | None = None,
        parts: Mapping[str, TensorType] | None = None,
    ) -> None:
        self._model, self._sharded, self._update = model, sharded, update
        self._program = without_layouts(sharded)
        self._types = parts or {output.name: output.value.tensor for output in self._program.main.outputs}
        self._names = [output.name for output in sharded.main.outputs]
        records = [record for record in sharded.records if isinstance(record, MicrobatchParts)]
        self._inputs = {r.value: r for r in records if r.role == "input"}
        self._outputs = {r.value: r for r in records if r.role == "output"}

    @property
    def inputs(self) -> Mapping[str, TensorType]:
        """See `Comparison`. The model's inputs are used by gradients, whatever they do in the sharded program."""
        used = used_inputs(self._program.main) | used_inputs(self._model.main)
        parts = {part for record in self._inputs.values() for part in record.parts}
        if self._update is not None:
            used |= used_inputs(self._update.main)
        return {
            item.value.name: item.value.tensor
            for item in self._program.main.inputs
            if item.value.name in used or item.value.name in parts
        }

    @property
    def programs(self) -> tuple[Module, ...]:
        """See `Comparison`."""
        return self._model, self._program

    def expected(self, inputs: Inputs) -> Outputs:
        """See `Comparison`. Names are those of the sharded program."""
        results = run_whole(self._with_gradients, {**inputs, **self._joined(inputs)})
        gradients = {name: x for name, x in results.items() if name in self._gradients}
        found = self._divided({name: x for name, x in results.items() if name not in self._gradients})
        found.update(gradients)
        if self._update is not None:
            found.update(run_whole(self._update, {**inputs, **gradients}))
        return {name: {WHOLE: found[name]} for name in self._names if name in found}

    def found(self, inputs: Inputs) -> Outputs:
        """See `Comparison`."""
        return {name: {WHOLE: x} for name, x in run_whole(self._program, inputs).items()}

    def only(self, output: str) -> ModelComparison:
        """See `Comparison`."""
        update = self._update
        if update is not None:
            is_updated = any(o.name == output for o in update.main.outputs)
            update = only_output(update, output) if is_updated else None
        return ModelComparison(self._model, only_output(self._sharded, output), update, self._types)

    @cached_property
    def _gradients(self) -> dict[str, str]:
        """The model's inputs of whose gradients outputs or new values are computed, by the name of the gradient."""
        wanted = set(self._names)
        if self._update is not None:
            wanted |= used_inputs(self._update.main)
        names = [item.value.name for item in self._model.main.inputs]
        return {f"{name}{GRADIENT}": name for name in names if f"{name}{GRADIENT}" in wanted}

    @cached_property
    def _with_gradients(self) -> Module:
        """The model, with the gradients of its first output as outputs."""
        main = self._model.main
        if not self._gradients:
            return self._model
        given = {item.value.name: item for item in self._program.main.inputs}
        scale = given.get(LOSS_SCALE)
        inputs = main.inputs if scale is None else (*main.inputs, scale)
        names = [*(i.value.name for i in inputs), *(v.name for op in main.ops for v in op.results)]
        wrt = list(self._gradients.values())
        ops, values = emit_gradients(
            main.ops, names, main.outputs[0].value, wrt, None if scale is None else scale.value
        )  # fmt: skip
        outputs = [Output(gradient, values[name]) for gradient, name in self._gradients.items() if name in values]
        function = replace(main, inputs=inputs, ops=(*main.ops, *ops), outputs=(*main.outputs, *outputs))
        return replace(self._model, functions=(replace(function, ops=live_ops(function)),))

    def _joined(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Return the model's inputs that the sharded program has in parts, for microbatches."""
        import torch

        return {
            name: torch.cat([inputs[part] for part in record.parts], record.dim)
            for name, record in self._inputs.items()
        }

    def _divided(self, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's results, those with samples in the parts of microbatches."""
        found = {}
        for name, tensor in results.items():
            record = self._outputs.get(name)
            if record is None:
                found[name] = tensor
                continue
            sizes = [self._types[part].shape[record.dim] for part in record.parts]
            parts: Sequence[torch.Tensor] = tensor.split(sizes, record.dim)  # type: ignore[no-untyped-call]
            found.update(zip(record.parts, parts, strict=True))
        return found
