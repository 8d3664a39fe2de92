"""The claims of a plan, as pairs of numbers that must be equal: ranks' programs and the model on tensors of one kind.

The model is the user's module, in torch, on these tensors. New weights of a training step are those of plain gradient
descent, with gradients by torch's autograd.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import distir_relax as dr
from distir_relax.interpret import scatter
from distir_relax.ir import DTensorType, Module, inline
from distir_relax.layout import Partial, local_intervals
from tests.exact.exact_numbers import Numbers
from tests.exact.exact_tensors import Exact, lifted
from tests.exact.rank_executor import execute_ranks
from tests.exact.small_functions import Function

Draw = Callable[[str, torch.Tensor], torch.Tensor]
"""The tensor of an input of floats, by its name and a tensor of its shape and dtype."""


class Claims:
    """The claims of the plan of a function on tensors that `draw` gives.

    `expected` has the outputs that are checked; `unchecked` names the others.
    """

    def __init__(self, function: Function, plan: dr.Plan, draw: Draw) -> None:
        self.plan = plan
        self.sharded = inline(plan.modules["sharded"])
        imported = plan.imported
        own = imported.module.main.inputs
        names = [item.value.name for item in own if item.role == "input"]
        arguments = [
            x if not x.is_floating_point() else draw(n, x) for n, x in zip(names, function.inputs, strict=True)
        ]
        model = function.model().double()
        parameters = {imported.names[name]: draw(name, x.detach()) for name, x in model.named_parameters()}
        known = {**dict(zip(names, arguments, strict=True)), **parameters}
        known |= {item.value.name: imported.tensors[item.value.name] for item in own if item.value.name not in known}
        self.whole = self._split([item.value.name for item in self.sharded.main.inputs], known)
        for item in self.sharded.main.inputs:
            if item.value.name not in self.whole:
                kind = item.value.dtensor
                like = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
                self.whole[item.value.name] = draw(item.value.name, like)
        of_model = {name: parameters[imported.names[name]] for name, _ in model.named_parameters()}
        results = _run(function, model, of_model, arguments, self.whole.get("learning_rate"))
        outputs = [output.name for output in imported.module.main.outputs]
        found = dict(zip(outputs, results, strict=False))
        found |= dict(zip((f"{name}.new" for name in parameters), results[len(outputs) :], strict=False))
        self.expected = self._split([output.name for output in self.sharded.main.outputs], found)
        self.unchecked = [o.name for o in self.sharded.main.outputs if o.name not in self.expected]

    def _split(self, names: list[str], wholes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors by name; those of microbatches, which end in a number, are parts of their batch, in order."""
        kinds = {v.name: v.dtensor for v in (*(i.value for i in self.sharded.main.inputs),)}
        kinds |= {output.name: output.value.dtensor for output in self.sharded.main.outputs}
        result, starts = {}, dict.fromkeys(wholes, 0)
        for name in names:
            match = re.fullmatch(r"(.*)\.(\d+)", name)
            if name in wholes:
                result[name] = wholes[name]
            elif match and match[1] in wholes:
                result[name] = wholes[match[1]].narrow(0, starts[match[1]], kinds[name].shape[0])
                starts[match[1]] += kinds[name].shape[0]
        return result

    def pairs(self, ranked: Module | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each output of each rank, its elements and those that they must be.

        `ranked` are other programs of the ranks. Raises what executing them raises.
        """
        ranked = self.plan.modules["ranked"] if ranked is None else ranked
        found = execute_ranks(ranked, [self._local(ranked, rank) for rank in range(len(ranked.ranks))])
        result = []
        for output in self.sharded.main.outputs:
            if output.name not in self.expected:
                continue
            layout = output.value.dtensor
            whole, mesh = self.expected[output.name], self.sharded.meshes[layout.mesh]
            assert not any(isinstance(p, Partial) for p in layout.placements)
            holders = [rank for rank, outputs in enumerate(found) if output.name in outputs]
            assert holders, f"no rank has {output.name}"
            for rank in holders:
                part = _part(whole, layout, mesh.coordinates(rank % mesh.size))
                if tuple(part.shape) != tuple(found[rank][output.name].shape):
                    raise ValueError(f"rank {rank} has another shape of {output.name}")
                result.append((found[rank][output.name], part))
        return result

    def _local(self, ranked: Module, rank: int) -> dict[str, torch.Tensor]:
        function = next(f for f in ranked.functions if f.name == ranked.ranks[rank])
        local = {}
        for item in self.sharded.main.inputs:
            if any(own.value.name == item.value.name for own in function.inputs):
                layout = item.value.dtensor
                mesh = self.sharded.meshes[layout.mesh]
                local[item.value.name] = scatter(self.whole[item.value.name], layout, mesh)[rank % mesh.size]
        return local


def _part(whole: torch.Tensor, layout: DTensorType, coordinates: tuple[int, ...]) -> torch.Tensor:
    for dim, size in enumerate(layout.shape):
        index = [i for a, b in local_intervals(layout.placements, dim, size, coordinates) for i in range(a, b)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return whole


def _run(
    function: Function,
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    arguments: Sequence[torch.Tensor],
    rate: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return the results of a model; of one that is trained, the loss and the new parameters."""
    call = torch.func.functional_call
    if not function.trained:
        with torch.no_grad():
            return tree_leaves(call(model.eval(), dict(parameters), tuple(arguments)))
    trained = {name: x.detach().requires_grad_() for name, x in parameters.items()}
    assert function.loss is not None
    assert rate is not None
    loss = function.loss(call(model, trained, (arguments[0],)), arguments[1])
    gradients = torch.autograd.grad(loss, list(trained.values()))
    with torch.no_grad():
        new = [x - rate * gradient for x, gradient in zip(trained.values(), gradients, strict=True)]
    return [loss.detach(), *(x.detach() for x in new)]


def numbers_of(numbers: Numbers[Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, int]]:
    """Return pairs of elements, as indices of numbers. Raises ValueError for integers that differ."""
    result = []
    for one, other in pairs:
        if not isinstance(one, Exact) and not one.is_floating_point():
            if not torch.equal(one, other):
                raise ValueError("integers differ")
            continue
        columns = (lifted(numbers, x).reshape(-1).tolist() for x in (one, other))
        result += zip(*columns, strict=True)
    return result
