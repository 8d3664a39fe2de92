"""Symbolic dims in `torch.export`: its specification, and the line of the model where it fixes a size."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.dynamic_shapes import Symbols
from distir_relax.frontends.location import location_of_frames
from distir_relax.layout import Symbol
from distir_relax.support.torch_compat import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    import torch

_LOGGING = os.path.dirname(logging.__file__)
_LOGGER = "torch.fx.experimental.symbolic_shapes"


def torch_specification(
    arguments: Mapping[str, Any], leaf_names: Mapping[str, Sequence[str]], symbols: Symbols
) -> dict[str, Any]:
    """Return the `dynamic_shapes` of `torch.export` for arguments by name, whose leaves have these names."""
    import torch

    dims: dict[Symbol, Any] = {}

    def leaf(name: str) -> Any:
        for symbol in symbols.get(name, {}).values():
            if symbol not in dims:
                dims[symbol] = torch.export.Dim(symbol.name, min=symbol.low, max=symbol.high)
        return {dim: dims[symbol] for dim, symbol in symbols[name].items()} if name in symbols else None

    result = {}
    for argument, value in arguments.items():
        _, structure = tree_flatten(value)
        result[argument] = tree_unflatten(list(map(leaf, leaf_names[argument])), structure)
    return result


@contextmanager
def explicit_arguments(model: torch.nn.Module, kwargs: Mapping[str, Any], spec: dict[str, Any]) -> Iterator[None]:
    """While active, `forward` has each of `kwargs` that its own ``**kwargs`` collects as a parameter, and `spec`, of
    `torch_specification`, is changed accordingly.

    The last step of `torch.export` with symbolic dims takes arguments by these names, not as one dict.
    """
    forward = model.forward
    signature = inspect.signature(forward)
    parameters = dict(signature.parameters)
    variadic = next((name for name, p in parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    collected = kwargs.keys() - parameters.keys()
    if variadic is None or not collected:
        yield
        return
    spec.update(spec.pop(variadic, {}))
    del parameters[variadic]
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name in collected]

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call.__signature__ = signature.replace(parameters=[*parameters.values(), *named])  # type: ignore[attr-defined]
    own = vars(model).get("forward")
    model.forward = call
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def with_example_sizes(symbols: Symbols, shapes: Mapping[str, Sequence[int]]) -> Symbols:
    """Return the symbols with the example's sizes as typical ones, unless the user has given others.

    Raises `ImportModelError` if two inputs of the example differ in one, if it is out of bounds, and if it is below 2,
    where torch would compile for this size alone.
    """
    sizes: dict[str, int] = {}
    for name, dims in symbols.items():
        for dim, symbol in dims.items():
            size = int(shapes[name][dim])
            where = f"dim {dim} of the example's {name!r}"
            if sizes.setdefault(symbol.name, size) != size:
                raise ImportModelError(f"expected {sizes[symbol.name]} in {where}, the size of {symbol}, found {size}")
            if not symbol.contains(size):
                raise ImportModelError(f"expected {symbol} of {symbol.range} in {where}, found {size}")
            if size < 2 and symbol.high != size:
                raise ImportModelError(
                    f"expected at least 2 in {where}, found {size}",
                    hint=f"the example shows torch a general {symbol}: sizes of 0 and 1 are special to it",
                )
    default = {
        symbol.name: Symbol(symbol.name, symbol.low, symbol.high) for d in symbols.values() for symbol in d.values()
    }
    return {
        name: {
            dim: replace(symbol, typical=sizes[symbol.name]) if symbol == default[symbol.name] else symbol
            for dim, symbol in dims.items()
        }
        for name, dims in symbols.items()
    }


@dataclass(frozen=True, slots=True)
class Decisions:
    """The comparisons of sizes that torch has decided while it exported a model.

    `places` are their lines in the model, by the comparison as torch prints it; `sources` are the expressions of its
    symbols, such as ``L['x'].size()[0]``.
    """

    places: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def where(self, source: str) -> str:
        """Return the lines of the decisions on a symbol; of all decisions if there are none."""
        names = [name for name, other in self.sources.items() if other == source]
        own = [place for text, place in self.places.items() if any(re.search(rf"\b{name}\b", text) for name in names)]
        return "; ".join(dict.fromkeys(place for place in own or self.places.values() if place))


@contextmanager
def recorded_decisions() -> Iterator[Decisions]:
    """Yield the decisions of an export within the context."""
    decisions = Decisions()
    logger = logging.getLogger(_LOGGER)
    handler = _Recorder(decisions)
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield decisions
    finally:
        logger.handlers = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def specialization_error(error: Exception, decisions: Decisions, symbols: Symbols) -> ImportModelError | None:
    """Return the error for a dim that the model does not leave open, with the line that fixes it; None for others."""
    sources = {s.name: f"L['{leaf}'].size()[{dim}]" for leaf, dims in symbols.items() for dim, s in dims.items()}
    sources.update(re.findall(r"(\w+) = (L\[.+?\.size\(\)\[\d+\])", str(error)))
    text = _with_names(str(error), sources)
    names = {symbol.name for dims in symbols.values() for symbol in dims.values()}
    fixed = [line for line in text.splitlines() if line.lstrip().startswith("- ")]
    if "Constraints violated" not in text and "constraints" not in text.lower():
        return None
    cause = next((line.strip(" -") for line in fixed if any(name in line for name in names)), text.splitlines()[0])
    symbol = next((name for name in sorted(names, key=len, reverse=True) if f" {name} " in f"{cause} "), "")
    where = decisions.where(sources.get(symbol, ""))
    if "specialized it to be a constant" in cause:
        size = cause.rpartition("(")[2].partition(")")[0]
        return ImportModelError(
            f"the model works for {symbol} = {size} only",
            where,
            f"remove the comparison or the loop over {symbol} there, or leave {symbol} out of dynamic_shapes",
        )
    fix = re.search(rf"^ *{symbol} = (.+)$", text.partition("Suggested fixes")[2], re.MULTILINE) if symbol else None
    hint = (
        f"give it these bounds: {symbol} = {_without_special(fix[1], symbol, fixed)}"
        if fix
        else "name the dims that vary, or give them bounds"
    )
    return ImportModelError(f"the model does not work for every {symbol or 'size'}: {cause}", where, hint)


def _without_special(bounds: str, symbol: str, causes: Sequence[str]) -> str:
    """Return the bounds that torch suggests, ``Dim('t', min=3, max=9)``, without sizes that its guards exclude.

    Where a size is compared with 1, as ``t - 2`` is, torch suggests a range that begins with it.
    """
    guards = [re.search(r"guard ([^.]+) != (-?\d+)\.?$", cause) for cause in causes]
    excluded = [guard for guard in guards if guard and re.search(rf"\b{re.escape(symbol)}\b", guard[1])]

    def is_special(size: int) -> bool:
        return any(_value(guard[1], symbol, size) == int(guard[2]) for guard in excluded)

    def next_to(match: re.Match[str]) -> str:
        size, step = int(match[2]), 1 if match[1] == "min" else -1
        while size > 1 and is_special(size):
            size += step
        return f"{match[1]}={size}"

    return re.sub(r"\b(min|max)=(\d+)", next_to, bounds)


def _value(expression: str, symbol: str, size: int) -> int | None:
    """Return the value of sums and products of a symbol and numbers; None for other expressions."""
    number = re.sub(rf"\b{re.escape(symbol)}\b", f"({size})", expression)
    return int(eval(number)) if re.fullmatch(r"[-+*() \d]+", number) else None


def _with_names(text: str, sources: Mapping[str, str]) -> str:
    """Replace torch's expressions for sizes, ``L['x'].size()[0]``, by the names of dims."""
    for name, source in sources.items():
        text = text.replace(f"{name} = {source}", name).replace(source, name)
    return text


class _Recorder(logging.Handler):
    """Records the user's line of each guard that torch logs, and the expressions of its symbols."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__(logging.INFO)
        self.decisions = decisions

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if created := re.match(r"create_symbol (\w+) = .*? for (L\[.+?\.size\(\)\[\d+\])", message):
            self.decisions.sources[created[1]] = created[2]
        if message.startswith("eval ") and "[guard added]" in message:
            frame = sys._getframe()
            frames = []
            while frame is not None:
                if not frame.f_code.co_filename.startswith(_LOGGING):
                    frames.append((frame.f_code.co_filename, frame.f_lineno))
                frame = frame.f_back  # type: ignore[assignment]
            comparison = message.removeprefix("eval ").partition(" [guard added]")[0]
            self.decisions.places.setdefault(comparison, location_of_frames(reversed(frames)))
