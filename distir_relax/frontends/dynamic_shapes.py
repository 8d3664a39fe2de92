"""Dims of inputs whose size may differ from call to call, as users declare them: names, bounds, specifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.imported_model import Imported
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.layout import Symbol

DimSpec = Mapping[str, Any]
"""The symbolic dims by input: ``{"input_ids": {0: "batch", 1: Dim("sequence", max=2048)}}``."""

Symbols = Mapping[str, Mapping[int, Symbol]]
"""The symbols of the dims of each input, by its name."""


def Dim(name: str, *, min: int = 1, max: int | None = None, typical: int | None = None) -> Symbol:
    """Return a symbolic dim: its size is the same wherever its name occurs, and may differ from call to call.

    Where costs decide on a layout, they are those of the `typical` size, by default that of the example call.

    Raises `DistIRError` for a name that is not an identifier, and for bounds that are not ``0 <= min <= max``.
    """
    return Symbol(name, min, max, -1 if typical is None else typical)


def fix_dims(imported: Imported, dims: Mapping[str, Any]) -> Imported:
    """Return an imported model whose symbols have the single numbers among `dims`. Raises as `specialize` does."""
    symbols = module_symbols(imported.module)
    sizes = {name: size for name, size in dims.items() if isinstance(size, int) and name in symbols}
    return replace(imported, module=specialize(imported.module, sizes)) if sizes else imported


def find_symbols(spec: DimSpec | None, dims: Mapping[str, Any], shapes: Mapping[str, Sequence[Any]]) -> Symbols:
    """Return the symbols of inputs of these `shapes` by `spec`; `dims` are bounds by name, which replace those of it.

    A single number in `dims` is ignored: `fix_dims` sets it, once the model is imported.

    Keys of `spec` are names of inputs, or of arguments with nested specifications. A text names a dim whose bounds may
    stand elsewhere in `spec`. Raises `ImportModelError` for names and dims that do not exist, and for two different
    ranges of one name.
    """
    symbols: dict[str, dict[int, Symbol]] = {}
    by_name: dict[str, Symbol] = {}
    inputs = _flat(spec or {}, "", shapes)
    items = [item for dims_of_input in inputs.values() for item in dims_of_input.values()]
    ranges = {symbol.name: symbol for item in items if (symbol := _as_symbol(item)) is not None}
    for name, dims_of_input in inputs.items():
        rank = len(shapes[name])
        for dim, item in dims_of_input.items():
            if not isinstance(dim, int) or not -rank <= dim < rank:
                raise ImportModelError(f"expected a dim of {name!r}, 0 to {rank - 1}, found {dim!r}")
            symbol = _symbol(item, ranges, dims, f"dim {dim} of {name!r}")
            if by_name.setdefault(symbol.name, symbol) != symbol:
                raise ImportModelError(
                    f"expected one range of {symbol.name}, found {_range(by_name[symbol.name])} and {_range(symbol)}"
                )
            symbols.setdefault(name, {})[dim % rank] = symbol
    if unknown := dims.keys() - by_name.keys():
        raise ImportModelError(
            f"the model has no dim {sorted(unknown)[0]!r}",
            hint=f"its dims are {', '.join(by_name)}" if by_name else "name dims by dynamic_shapes",
        )
    return symbols


def _flat(spec: Any, prefix: str, shapes: Mapping[str, Sequence[Any]]) -> dict[str, Mapping[int, Any]]:
    """Return the dims of each input, from a specification that may be nested as the arguments are."""
    result: dict[str, Mapping[int, Any]] = {}
    for key, item in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
        name = f"{prefix}_{key}" if isinstance(key, int) else f"{prefix}.{key}" if prefix else str(key)
        if item is None:
            continue
        if name in shapes:
            pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
            result[name] = {dim: part for dim, part in pairs if part is not None and not isinstance(part, int)}
        elif isinstance(item, (Mapping, list, tuple)) and any(n.startswith((f"{name}.", f"{name}_")) for n in shapes):
            result.update(_flat(item, name, shapes))
        else:
            raise ImportModelError(f"the model has no input {name!r}", hint=f"its inputs are {', '.join(shapes)}")
    return result


def _as_symbol(item: Any) -> Symbol | None:
    """Return the symbol of a Dim, ours or torch's; None for anything else."""
    if isinstance(item, Symbol):
        return item
    if hasattr(item, "__name__") and hasattr(item, "min") and hasattr(item, "max"):
        # The default maximum of torch's is infinite.
        maximum = item.max if isinstance(item.max, int) and item.max < 1 << 62 else None
        return Symbol(item.__name__, int(item.min), maximum)
    return None


def _symbol(item: Any, ranges: Mapping[str, Symbol], dims: Mapping[str, Any], where: str) -> Symbol:
    symbol = ranges.get(item) or Dim(item) if isinstance(item, str) else _as_symbol(item)
    if symbol is None:
        raise ImportModelError(f"expected a name, a Dim, or None for {where}, found {item!r}")
    if not isinstance(dims.get(symbol.name, 0), int):
        low, high = bounds_of(dims[symbol.name], symbol.name)
        return Symbol(symbol.name, low, high)
    return symbol


def bounds_of(bounds: Any, name: str) -> tuple[int, int | None]:
    """Return (low, high) of a size, a pair, or a Dim. Raises `ImportModelError` for anything else."""
    if isinstance(bounds, int):
        return bounds, bounds
    if isinstance(bounds, Symbol):
        return bounds.low, bounds.high
    if isinstance(bounds, (tuple, list)) and len(bounds) == 2:
        low, high = bounds
        if isinstance(low, int) and (high is None or isinstance(high, int)):
            return low, high
    raise ImportModelError(f"expected a size or bounds (low, high) of {name}, found {bounds!r}")


def _range(symbol: Symbol) -> str:
    return f"{symbol.low} to {'any' if symbol.high is None else symbol.high}"
