"""Gradients that a model computes itself: of a penalty on gradients, of an energy by positions, of an inner step.

`torch.export` cannot trace autograd's engine. While a model is exported, ``torch.autograd.grad``, ``torch.func.grad``
and ``grad_and_value`` are ops of the graph, ``distir::gradients``; the importer puts the backward steps of all ops so
far in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from distir_relax.autodiff import gradients
from distir_relax.autodiff.own_gradients import has_own_gradient
from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_here
from distir_relax.ir import Value, required_ops
from distir_relax.ops import Builder, filled
from distir_relax.support.torch_compat import FUNCTIONAL_GRADIENT, graph_op, replaced, tree_leaves, tree_map

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


@contextmanager
def captured_gradients() -> Iterator[None]:
    """Within the context, gradients are ops of the graph that is traced."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Capture(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_gradient = func is torch.autograd.grad
            return (_gradients if is_gradient else func)(*args, **(kwargs or {}))

    with Capture(), replaced(FUNCTIONAL_GRADIENT, _gradient_and_value):
        yield


def is_gradients(target: Any) -> bool:
    """Whether the target of a node of an exported graph is the op of gradients."""
    return str(target) == "distir.gradients.default"


def is_own_input(target: Any) -> bool:
    """Whether the target of a node of an exported graph is the op that makes a value of its own of an input."""
    return str(target) == "distir.own_input.default"


def computes_gradients(program: ExportedProgram) -> bool:
    """Whether a program has gradients, which only an imported program computes."""
    return any(is_gradients(node.target) for node in program.graph.nodes)


def emit_gradients(
    g: Builder, outputs: Sequence[Value], inputs: Sequence[Value], seeds: Sequence[Value], differentiable: bool
) -> list[Value]:
    """Emit the gradients of `outputs`, times `seeds` or one, with regard to `inputs`.

    Raises `ImportModelError` for an input that no output depends on, and as `autodiff.gradients` does.
    """
    location = g.location
    reached = {op.results[0].name for op in required_ops(g.ops, [value.name for value in outputs])}
    if any(has_own_gradient(op) and op.results[0].name in reached for op in g.ops):
        # What it saves would be constant there.
        raise ImportModelError(
            "the gradient is taken through a torch.autograd.Function", location, "write the function as ops of torch"
        )
    grad_of: dict[str, Value] = {}
    for number, output in enumerate(outputs):
        seed = seeds[number] if seeds else filled(g, output.tensor.shape, 1.0, output.tensor.dtype)
        known = grad_of.get(output.name)
        grad_of[output.name] = seed if known is None else g.emit("add", known, seed)
    found = gradients(g, tuple(g.ops), grad_of, [value.name for value in inputs])
    g.location = location
    if missing := [value.name for value in inputs if value.name not in found]:
        raise ImportModelError(
            f"the gradient is taken with regard to %{missing[0]}, on which its outputs do not depend", location,
            "leave it out of the inputs: in a program no gradient is None",
        )  # fmt: skip
    results = [found[value.name] for value in inputs]
    return results if differentiable else [g.emit("stop_gradient", result) for result in results]


def _gradients(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
    only_inputs: bool = True, allow_unused: Any = None, is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """See ``torch.autograd.grad``."""
    import torch

    if is_grads_batched:
        raise _refused("with is_grads_batched, which a program does not do", "call it once for each of the batch")
    of, wrt = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (outputs, inputs))
    given = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs or ())
    if any(x.numel() != 1 for x in of[len(given) :]):
        raise _refused("of a tensor that is no number, without grad_outputs", "give grad_outputs=torch.ones_like(y)")
    seeds = [torch.ones_like(x) if seed is None else seed for x, seed in zip(of, given, strict=False)]
    return tuple(_ops()[0](of, wrt, seeds, create_graph))


def _refused(call: str, hint: str) -> ImportModelError:
    where = location_here()
    return ImportModelError(f"torch.autograd.grad is called {call}", where, hint)


def _gradient_and_value(function: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
    """See ``torch.func.grad_and_value``."""
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    own = list(args)
    for number in chosen:
        own[number] = tree_map(_ops()[1], own[number])
    output = function(*own, **kwargs)
    value, aux = output if has_aux else (output, None)
    leaves = [leaf for number in chosen for leaf in tree_leaves(own[number])]
    results = iter(_ops()[0]([value], leaves, [], True))
    found = tuple(tree_map(lambda leaf: next(results), own[number]) for number in chosen)
    gradient = found[0] if isinstance(argnums, int) else found
    return (gradient, (value, aux)) if has_aux else (gradient, value)


@cache
def _ops() -> tuple[Any, Any]:
    """Return the ops ``distir::gradients`` and ``distir::own_input``; they have no results outside of an export."""
    import torch

    def gradients(outputs: Any, inputs: Any, seeds: Any, create_graph: bool) -> list[torch.Tensor]:
        return [x.clone() for x in inputs]

    schema = "(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds, bool create_graph) -> Tensor[]"
    of_inputs = lambda outputs, inputs, seeds, create_graph: [torch.empty_like(x) for x in inputs]  # noqa: E731
    own = graph_op("own_input", "(Tensor x) -> Tensor", lambda x: x.clone(), torch.empty_like)
    return graph_op("gradients", schema, gradients, of_inputs), own
