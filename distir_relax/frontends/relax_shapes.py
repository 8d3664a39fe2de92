"""Sizes of a Relax function: its symbolic dims become symbols, or get the sizes that the user gives.

Sizes that the user gives are bound by TVM, which substitutes them, and folds computed dims.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.frontends.dynamic_shapes import find_symbols
from distir_relax.ir import fresh_name
from distir_relax.layout import Symbol, are_equal, floor_divide, maximum, minimum, size_of


def bind_shapes(mod: Any, name: str, shapes: Mapping[str, Sequence[int]]) -> Any:
    """Bind the symbolic dims of function `name`, so that its parameters have the given `shapes`.

    A symbol has one value for all parameters. Raises `ImportModelError` for an unknown parameter, a shape that does not
    match its type, and two sizes of one symbol.
    """
    from tvm import relax

    function = mod[name]
    kinds = {p.name: _tensor(p.ty) for p in function.params}
    if unknown := sorted(set(shapes) - set(kinds)):
        raise ImportModelError(f"@{name} has no parameters {', '.join(unknown)}", hint=f"it has {', '.join(kinds)}")
    sizes: dict[str, int] = {}
    for parameter, shape in shapes.items():
        _bind(f"@{name}, {parameter}", kinds[parameter], tuple(shape), sizes)
    return relax.transform.BindSymbolicVars(dict(sizes), name)(mod) if sizes else mod


def open_symbols(function: Any, name: str, inputs: Sequence[Any], dims: Mapping[str, Any]) -> dict[Any, int]:
    """Return the size of each symbolic dim of a function's parameters, by TVM variable.

    `inputs` are those parameters that are no weights. The bounds of a symbol are those of `dims`, or of the function's
    upper bounds. Raises `ImportModelError` for a symbol that is no dim of an input, and for invalid `dims`.
    """
    uppers = {str(key): int(n) for key, n in dict((function.attrs or {}).get("tir_var_upper_bound", {})).items()}
    names: dict[Any, str] = {}
    spec: dict[str, dict[int, Any]] = {}
    used: set[str] = set()
    for parameter in inputs:
        for dim, size in enumerate(getattr(_tensor(parameter.ty), "shape", None) or ()):
            if _is_variable(size):
                if size not in names:
                    names[size] = fresh_name(_identifier(str(size.name)), used)
                symbol = Symbol(names[size], 1, uppers.get(str(size.name)))
                spec.setdefault(parameter.name, {})[dim] = symbol
    _check_closed(function, name, names)
    shapes = {p.name: [None] * len(getattr(_tensor(p.ty), "shape", None) or ()) for p in inputs}
    found = find_symbols(spec, dims, shapes)
    by_name = {symbol.name: symbol for symbols in found.values() for symbol in symbols.values()}
    return {variable: size_of(by_name[symbol]) for variable, symbol in names.items()}


def convert_size(expression: Any, sizes: Mapping[Any, int]) -> int:
    """Convert a TVM expression to a size; `sizes` are those of variables.

    Raises `NotImplementedError` for an expression that is no size.
    """
    from tvm import tirx

    if isinstance(expression, int):
        return expression
    if isinstance(expression, tirx.IntImm):
        return int(expression.value)
    if _is_variable(expression) and expression in sizes:
        return sizes[expression]
    if isinstance(expression, tirx.Cast):
        return convert_size(expression.value, sizes)
    for kind, operation in _operations().items():
        if isinstance(expression, kind):
            first, second = (convert_size(part, sizes) for part in (expression.a, expression.b))
            try:
                return operation(first, second)
            except DistIRError as error:
                raise NotImplementedError(error.message) from None
    raise NotImplementedError(f"the size {expression}")


def bind_dims(dims: Sequence[Any], actual: Sequence[int], sizes: MutableMapping[Any, int]) -> bool:
    """Add to `sizes` the variables of `dims` that are new; return whether the others have the `actual` values.

    What depends on the symbols is a guard.
    """
    if len(dims) != len(actual):
        return False
    for dim, size in zip(dims, actual, strict=True):
        if _is_variable(dim) and dim not in sizes:
            sizes[dim] = size
        elif not are_equal(convert_size(dim, sizes), size):
            return False
    return True


def _operations() -> dict[type[Any], Callable[[int, int], int]]:
    from tvm import tirx

    return {
        tirx.Add: lambda a, b: a + b,
        tirx.Sub: lambda a, b: a - b,
        tirx.Mul: lambda a, b: a * b,
        tirx.FloorDiv: floor_divide,
        tirx.FloorMod: lambda a, b: a - b * floor_divide(a, b),
        tirx.Min: minimum,
        tirx.Max: maximum,
    }


def _tensor(kind: Any) -> Any:
    return getattr(kind, "tensor_ty", kind)


def _is_variable(size: Any) -> bool:
    from tvm import tirx

    return isinstance(size, tirx.Var)


def _identifier(name: str) -> str:
    text = re.sub(r"\W", "_", name)
    return text if text.isidentifier() else f"size_{text}"


def _bind(where: str, kind: Any, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    dims = _dims(kind)
    if dims is None or len(dims) != len(shape) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ImportModelError(f"expected a shape for {kind}, found {shape}", where)
    for dim, size in zip(dims, shape, strict=True):
        if isinstance(dim, int) and dim != size:
            raise ImportModelError(f"expected a shape for {kind}, found {shape}", where)
        if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
            raise ImportModelError(f"the dim {dim!r} is {size} here, and {sizes[dim]} elsewhere", where)


def _dims(kind: Any) -> list[int | str | None] | None:
    """Return the dims of a tensor type: sizes, names of symbols, None for dims computed from symbols."""
    from tvm import tirx

    if getattr(kind, "shape", None) is None:
        return None
    return [
        int(n.value) if isinstance(n, tirx.IntImm) else str(n.name) if isinstance(n, tirx.Var) else None
        for n in kind.shape
    ]


def _check_closed(function: Any, name: str, names: Mapping[Any, str]) -> None:
    """Raise `ImportModelError` for a symbol in a parameter that is not alone the size of some input's dim."""
    from tvm import relax

    for parameter in function.params:
        kind = _tensor(parameter.ty)
        missing = [str(v.name) for v in relax.analysis.tir_vars_in_type(kind) if v not in names]
        if missing:
            raise ImportModelError(
                f"the dims {', '.join(missing)} of {parameter.name} are left open: {kind}",
                f"@{name}",
                f'give the shapes of inputs: input_shapes={{"{parameter.name}": (1, ...)}}',
            )
