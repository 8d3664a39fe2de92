"""A model and the program read in from it, compared on the example call.

`torch.export` itself has read models wrongly, without a word; so may a conversion. Both are found here, before anything
is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distir_relax.analysis.interpret import interpret
from distir_relax.errors import ImportModelError
from distir_relax.frontends.imported import Imported
from distir_relax.ir import Output

if TYPE_CHECKING:
    import torch

# Of each dtype, the difference that another order of summation may make, relative to the largest value (at least 1).
_TOLERANCE = {"float64": 1e-8, "float32": 2e-3, "float16": 5e-2, "bfloat16": 2e-1}

_Call = tuple[str, int]


def check_import(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], imported: Imported) -> None:
    """Run `model` and the program on the example call; the model's buffers are left as they were.

    Raises `ImportModelError`, with the first module whose result the program does not have, where they differ by more
    than rounding. On the meta device there is nothing to compare.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    given = [leaf for leaf in tree_leaves((list(args), dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    if any(t.is_meta for t in (*given, *model.parameters(), *model.buffers())):
        return
    with torch.no_grad(), _as_it_was(model):
        expected = model(*_copied(list(args)), **_copied(dict(kwargs)))
    found = _run(imported, args, kwargs, imported.module.main.outputs)
    pairs = zip(tree_leaves(expected), tree_leaves(imported.rebuild(found)), strict=True)
    worst = max((_difference(a, b) for a, b in pairs if isinstance(a, torch.Tensor)), key=lambda d: d[0])
    if worst[0] <= 1:
        return
    where = _first_difference(model, args, kwargs, imported)
    raise ImportModelError(
        f"the program that was read in is not the model: on the example call, their results differ by {worst[1]:.2g}",
        f"{where}, the first module whose result differs" if where else "",
        "torch.export, or the import after it, has read the model wrongly: write this module in another way, or "
        "take the program as it is with check_import=False",
    )


def _run(
    imported: Imported, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Output]
) -> dict[str, torch.Tensor]:
    import torch

    inputs = imported.flatten(_copied(list(args)), _copied(dict(kwargs)))
    state = {name: tensor.clone() for name, tensor in imported.tensors.items() if _is_state(imported, name)}
    with torch.no_grad():
        main = replace(imported.module.main, outputs=tuple(outputs))
        return interpret(main, {**imported.tensors, **state, **{k: v.detach() for k, v in inputs.items()}})


def _is_state(imported: Imported, name: str) -> bool:
    return any(item.role == "state" and item.value.name == name for item in imported.module.main.inputs)


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
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], imported: Imported
) -> str:
    """The path of the first module, in the order in which they end, none of whose results the program makes in it."""
    calls = _results_of_modules(model, args, kwargs)
    main = imported.module.main
    made = [value for op in main.ops for value in op.results]
    values = _run(imported, args, kwargs, [Output(value.name, value) for value in made])
    inside: dict[_Call, list[torch.Tensor]] = {}
    for op in main.ops:
        for frame in imported.scopes.get(op.results[0].name, ()):
            inside.setdefault((frame.path, frame.call), []).extend(values[v.name] for v in op.results)
    for call, results in calls:
        candidates = inside.get(call)
        if candidates and not any(_difference(r, c)[0] <= 1 for r in results for c in candidates):
            return call[0]
    return ""


def _results_of_modules(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[_Call, list[torch.Tensor]]]:
    import torch
    from torch.utils._pytree import tree_leaves

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
        with torch.no_grad(), _as_it_was(model):
            model(*_copied(list(args)), **_copied(dict(kwargs)))
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards, the model's buffers hold what they did before."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, data in before:
            if buffer.shape == data.shape:
                buffer.copy_(data)


def _copied(item: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, item)
