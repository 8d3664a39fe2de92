"""Comparison of a model with its exported program on the example call.

`torch.export` has exported models incorrectly without an error. torch runs the program op by op as it runs the model,
so that even a choice between nearly equal values agrees for a correct program.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import frames_of
from distir_relax.frontends.torch.module_state import (
    ModuleSnapshot,
    preserve_attributes,
    restored_parameters,
    stateful_call_error,
)
from distir_relax.support.torch_compat import tree_leaves, tree_map

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

# Tolerance by dtype for another order of summation, relative to the largest value (at least 1).
_TOLERANCE = {"float64": 1e-8, "float32": 2e-3, "float16": 5e-2, "bfloat16": 2e-1}

_Call = tuple[str, int]


def check_import(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], program: ExportedProgram
) -> None:
    """Run `model` and `program` on the example call, and compare results, buffers, and mutated arguments.

    The model is left unchanged.

    Raises `ImportModelError`, with the first module whose result is missing in the program, for differences beyond
    rounding. On the meta device there is nothing to compare.
    """
    if not has_data(model, args, kwargs):
        return
    with warnings.catch_warnings():
        # State in plain objects is a buffer of the program.
        warnings.filterwarnings("ignore", "A model attribute .* requires gradient")
        run = program.module()
    expected, actual = call_model(model, model, args, kwargs), call_model(model, run, args, kwargs)
    differences = [difference_of(a, b) for a, b in zip(expected, actual, strict=True)]
    worst = max(differences, key=lambda pair: pair[0], default=(0.0, 0.0))
    if worst[0] <= 1:
        return
    where = _first_difference(model, args, kwargs, program)
    raise ImportModelError(
        f"torch.export has exported the model incorrectly: on the example call, the results differ by {worst[1]:.2g}",
        f"{where}, the first module whose result differs" if where else "",
        "write this module in another way, or skip the check with check_import=False",
    )


def has_data(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether neither the model nor its call has a tensor on the meta device."""
    import torch

    tensors = [leaf for leaf in tree_leaves((list(args), dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    return not any(t.is_meta for t in (*tensors, *model.parameters(), *model.buffers()))


def call_model(model: torch.nn.Module, run: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Call `run`, the model or its program; return results, arguments and the model's buffers after the call.

    Random numbers are equal in each call: the model and its program have the same dropout.

    Raises `ImportModelError` if a second call would return something else.
    """
    import torch

    def tensors(item: Any) -> list[torch.Tensor]:
        return [x.detach().clone() for x in tree_leaves(item) if isinstance(x, torch.Tensor)]

    with torch.no_grad(), preserve_attributes(model), restored_parameters(model), torch.random.fork_rng(devices=()):
        before = ModuleSnapshot(model)
        arguments = _copy((tuple(args), dict(kwargs)))
        torch.manual_seed(0)
        results = tensors(run(*arguments[0], **arguments[1]))
        buffers = dict(run.named_buffers())
        state = [buffers.get(name, buffer) for name, buffer in model.named_buffers()]
        after = tensors((arguments, state))
        if run is model and (added := before.added()):
            before.restore_data()
            torch.manual_seed(0)
            again = tensors(run(*_copy(tuple(args)), **_copy(dict(kwargs))))
            if len(again) != len(results) or any(
                difference_of(a, b)[0] > 1 for a, b in zip(results, again, strict=True)
            ):
                raise stateful_call_error(added)
        return results + after


def difference_of(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return the difference of two results, relative to the tolerance, and absolute."""
    import torch

    if a.shape != b.shape:
        return float("inf"), float("inf")
    if not a.numel():
        return 0.0, 0.0
    if not a.is_floating_point():
        # An index of the largest of two equal values may differ.
        mismatches = float((a != b).double().mean())
        return mismatches / 0.01, mismatches
    x, y = a.double(), b.double()
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()) or not bool((x == y)[~finite & ~x.isnan()].all()):
        return float("inf"), float("nan")
    x, y = x[finite], y[finite]
    if not x.numel():
        return 0.0, 0.0
    difference = float((x - y).abs().max())
    return difference / max(1.0, float(x.abs().max())) / _TOLERANCE[str(a.dtype).removeprefix("torch.")], difference


def _first_difference(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], program: ExportedProgram
) -> str:
    """Return the path of the first module, in order of completion, none of whose results is in the program."""
    program_values = _values_in_modules(model, args, kwargs, program)
    for call, results in _results_of_modules(model, args, kwargs):
        candidates = program_values.get(call)
        if candidates and not any(difference_of(r, c)[0] <= 1 for r in results for c in candidates):
            return call[0]
    return ""


def _values_in_modules(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], program: ExportedProgram
) -> dict[_Call, list[torch.Tensor]]:
    """Return the tensors that a program computes in each call of each module."""
    import torch
    from torch.export.graph_signature import InputKind
    from torch.fx import Interpreter, Node

    values: dict[_Call, list[torch.Tensor]] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            tensors = [t.clone() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            for frame in frames_of(n) if n.op == "call_function" else ():
                values.setdefault((frame.path, frame.call), []).extend(tensors)
            return result

    tensors = {**program.state_dict, **program.constants}
    arguments = iter(tree_leaves(_copy((tuple(args), dict(kwargs)))))
    specs = program.graph_signature.input_specs
    inputs = [next(arguments) if s.kind is InputKind.USER_INPUT else tensors[str(s.target)] for s in specs]
    with torch.no_grad(), preserve_attributes(model):
        Recorder(program.graph_module).run(*inputs)
    return values


def _results_of_modules(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[_Call, list[torch.Tensor]]]:
    import torch

    results: list[tuple[_Call, list[torch.Tensor]]] = []
    count: Counter[str] = Counter()

    def record(path: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensors = [t.clone() for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            results.append(((path, count[path]), tensors))
            count[path] += 1

        return hook

    hooks = [m.register_forward_hook(record(path)) for path, m in model.named_modules() if path]
    try:
        with torch.no_grad(), preserve_attributes(model), restored_parameters(model):
            model(*_copy(list(args)), **_copy(dict(kwargs)))
    finally:
        for hook in hooks:
            hook.remove()
    return results


def _copy(item: Any) -> Any:
    import torch

    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, item)
