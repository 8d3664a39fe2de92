"""A model and its exported program, compared on the example call.

`torch.export` has read models wrongly, without a word. The program is run by torch, op for op as the model is, so that
not even a choice between nearly equal values differs where it is right.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import frames_of
from distir_relax.frontends.torch.module_state import Attributes, depends_on, kept
from distir_relax.support.torch_compat import tree_leaves, tree_map

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

# Of each dtype, the difference that another order of summation may make, relative to the largest value (at least 1).
_TOLERANCE = {"float64": 1e-8, "float32": 2e-3, "float16": 5e-2, "bfloat16": 2e-1}

_Call = tuple[str, int]


def check_import(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], program: ExportedProgram
) -> None:
    """Run `model` and `program` on the example call, and compare results, buffers, and arguments that are written to.

    The model is left as it was.

    Raises `ImportModelError`, with the first module whose result the program does not have, where they differ by more
    than rounding. On the meta device there is nothing to compare.
    """
    import torch

    given = [leaf for leaf in tree_leaves((list(args), dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    if any(t.is_meta for t in (*given, *model.parameters(), *model.buffers())):
        return
    with warnings.catch_warnings():
        # State in plain objects is a buffer of the program.
        warnings.filterwarnings("ignore", "A model attribute .* requires gradient")
        run = program.module()
    expected, found = _call(model, model, args, kwargs), _call(model, run, args, kwargs)
    apart = [_difference(a, b) for a, b in zip(expected, found, strict=True)]
    worst = max(apart, key=lambda found: found[0], default=(0.0, 0.0))
    if worst[0] <= 1:
        return
    where = _first_difference(model, args, kwargs, program)
    raise ImportModelError(
        f"torch.export has read the model wrongly: on the example call, its program's results differ by {worst[1]:.2g}",
        f"{where}, the first module whose result differs" if where else "",
        "write this module in another way, or take the program as it is with check_import=False",
    )


def _call(model: torch.nn.Module, run: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a call of `run`, the model or its program, gives, and what the arguments and the model's buffers are then.

    What is drawn at random is the same in each call: dropout of the model and of its program drop alike.

    Raises `ImportModelError` where another call would give something else.
    """
    import torch

    def tensors(item: Any) -> list[torch.Tensor]:
        return [x.detach().clone() for x in tree_leaves(item) if isinstance(x, torch.Tensor)]

    with torch.no_grad(), kept(model), torch.random.fork_rng(devices=()):
        before = Attributes(model)
        given = _copied((tuple(args), dict(kwargs)))
        torch.manual_seed(0)
        results = tensors(run(*given[0], **given[1]))
        buffers = dict(run.named_buffers())
        state = [buffers.get(name, buffer) for name, buffer in model.named_buffers()]
        after = tensors((given, state))
        if run is model and (added := before.added()):
            before.restore_data()
            torch.manual_seed(0)
            again = tensors(run(*_copied(tuple(args)), **_copied(dict(kwargs))))
            if len(again) != len(results) or any(_difference(a, b)[0] > 1 for a, b in zip(results, again, strict=True)):
                raise depends_on(added)
        return results + after


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """How far two results are apart, as a multiple of what is tolerated, and in itself."""
    import torch

    if a.shape != b.shape:
        return float("inf"), float("inf")
    if not a.numel():
        return 0.0, 0.0
    if not a.is_floating_point():
        # A number chosen by the largest of two equal values may be another.
        wrong = float((a != b).double().mean())
        return wrong / 0.01, wrong
    x, y = a.double(), b.double()
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()) or not bool((x == y)[~finite & ~x.isnan()].all()):
        return float("inf"), float("nan")
    x, y = x[finite], y[finite]
    if not x.numel():
        return 0.0, 0.0
    apart = float((x - y).abs().max())
    return apart / max(1.0, float(x.abs().max())) / _TOLERANCE[str(a.dtype).removeprefix("torch.")], apart


def _first_difference(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], program: ExportedProgram
) -> str:
    """The path of the first module, in the order in which they end, none of whose results the program makes in it."""
    inside = _values_in_modules(model, args, kwargs, program)
    for call, results in _results_of_modules(model, args, kwargs):
        candidates = inside.get(call)
        if candidates and not any(_difference(r, c)[0] <= 1 for r in results for c in candidates):
            return call[0]
    return ""


def _values_in_modules(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], program: ExportedProgram
) -> dict[_Call, list[torch.Tensor]]:
    """The tensors that a program makes in each call of each module."""
    import torch
    from torch.export.graph_signature import InputKind
    from torch.fx import Interpreter, Node

    inside: dict[_Call, list[torch.Tensor]] = {}

    class Watching(Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            made = [t.clone() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            for frame in frames_of(n) if n.op == "call_function" else ():
                inside.setdefault((frame.path, frame.call), []).extend(made)
            return result

    tensors = {**program.state_dict, **program.constants}
    given = iter(tree_leaves(_copied((tuple(args), dict(kwargs)))))
    specs = program.graph_signature.input_specs
    inputs = [next(given) if s.kind is InputKind.USER_INPUT else tensors[str(s.target)] for s in specs]
    with torch.no_grad(), kept(model):
        Watching(program.graph_module).run(*inputs)
    return inside


def _results_of_modules(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[_Call, list[torch.Tensor]]]:
    import torch

    found: list[tuple[_Call, list[torch.Tensor]]] = []
    count: Counter[str] = Counter()

    def remember(path: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensors = [t.clone() for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            found.append(((path, count[path]), tensors))
            count[path] += 1

        return hook

    hooks = [m.register_forward_hook(remember(path)) for path, m in model.named_modules() if path]
    try:
        with torch.no_grad(), kept(model):
            model(*_copied(list(args)), **_copied(dict(kwargs)))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _copied(item: Any) -> Any:
    import torch

    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, item)
