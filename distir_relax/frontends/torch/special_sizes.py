"""Comparison of a model with its program at sizes 0 and 1 of symbolic dims.

`torch.export` takes a symbolic dim to have at least two elements: of a model with a case for one element, such as
``if x.shape[0] == 1``, it exports the other case without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.frontends.dynamic_shapes import Symbols
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.location import location_of_frames
from distir_relax.frontends.torch.export_check import call_model, difference_of, has_data
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import Module
from distir_relax.ir.symbols import specialize
from distir_relax.layout import Symbol
from distir_relax.support.torch_compat import tree_leaves, tree_map

if TYPE_CHECKING:
    import torch


def check_special_sizes(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaves: Mapping[str, Any],
    symbols: Symbols,
    imported: Imported,
) -> None:
    """Run the model and its program on parts of the example, whose tensors are `leaves` by name, and compare results.

    The other symbols are 2, which takes little time, or as in the example where that fails. Sizes that the model does
    not take, and those that a guard excludes, are skipped.

    Raises `ImportModelError`, with the line of the case, for differences beyond rounding.
    """
    if not has_data(model, args, kwargs):
        return
    sizes = {symbol: int(leaves[name].shape[dim]) for name, dims in symbols.items() for dim, symbol in dims.items()}
    small = {symbol: min(size, max(symbol.low, 2)) for symbol, size in sizes.items()}
    call = tuple(args), dict(kwargs)
    for symbol, size in _special_sizes(sizes):
        for others in (small, sizes):
            values = {**others, symbol: size}
            part = _part_of_call(call, leaves, symbols, values)
            try:
                module = specialize(imported.module, {s.name: n for s, n in values.items()})
                expected = call_model(model, model, *part)
            except Exception:  # a guard excludes the sizes, or the model raises whatever it raises
                continue
            if difference := _difference(imported, module, part, expected):
                raise ImportModelError(
                    f"the model has a case of its own for {symbol} = {size}, which torch.export ignores: {difference}",
                    _line_of_case(model, _part_of_call(call, leaves, symbols, others), part),
                    f"remove that case from the model, or exclude the size: dr.Dim({symbol.name!r}, min={size + 1})",
                )
            break


def _special_sizes(sizes: Mapping[Symbol, int]) -> Iterator[tuple[Symbol, int]]:
    """Yield the sizes of symbols, one at a time, that the example has more of."""
    for symbol, example in sizes.items():
        yield from ((symbol, size) for size in (0, 1) if symbol.contains(size) and size < example)


def _part_of_call(
    call: tuple[Any, Any], leaves: Mapping[str, Any], symbols: Symbols, sizes: Mapping[Symbol, int]
) -> tuple[Any, Any]:
    """Return the example call with the first elements of its tensors, so that symbols have these sizes."""
    parts = {}
    for name, dims in symbols.items():
        x = leaves[name]
        for dim, symbol in dims.items():
            x = x.narrow(dim, 0, sizes[symbol])
        parts[id(leaves[name])] = x
    result: tuple[Any, Any] = tree_map(lambda x: parts.get(id(x), x), call)
    return result


def _difference(imported: Imported, module: Module, call: tuple[Any, Any], expected: Sequence[torch.Tensor]) -> str:
    """Return how the results of the program on a call differ from the `expected` ones; "" if they do not."""
    try:
        inputs = imported.flatten(*call)
        found = imported.rebuild(interpret(module, {**imported.tensors, **inputs}))
    except DistIRError as error:
        return error.message
    results = [x for x in tree_leaves(found) if hasattr(x, "shape")]
    worst = max((difference_of(a, b) for a, b in zip(expected, results, strict=False)), default=(0.0, 0.0))
    return f"the results differ by {worst[1]:.2g}" if worst[0] > 1 else ""


def _line_of_case(model: torch.nn.Module, example: tuple[Any, Any], special: tuple[Any, Any]) -> str:
    """Return the line of the model's first call of torch on the special sizes that it does not have on the example."""
    calls = zip_longest(_calls_of_torch(model, special), _calls_of_torch(model, example), fillvalue=("", ""))
    return next((first[1] or second[1] for first, second in calls if first != second), "")


def _calls_of_torch(model: torch.nn.Module, call: tuple[Any, Any]) -> list[tuple[str, str]]:
    """Return the functions of torch that a model calls, with their lines."""
    from torch.overrides import TorchFunctionMode

    calls: list[tuple[str, str]] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            frames = [(frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe())]
            calls.append((getattr(func, "__name__", str(func)), location_of_frames(reversed(frames))))
            return func(*args, **(kwargs or {}))

    with Recorder():
        call_model(model, model, *call)
    return calls
