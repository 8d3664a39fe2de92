"""Binding of symbolic dims of a Relax function: TVM substitutes the symbols, and folds computed dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distir_relax.errors import ImportModelError


def bind_shapes(mod: Any, name: str, shapes: Mapping[str, Sequence[int]]) -> Any:
    """Bind the symbolic dims of function `name`, so that its parameters have the given `shapes`.

    A symbol has one value for all parameters. Raises `ImportModelError` for an unknown parameter, a shape that does not
    match its type, two sizes of one symbol, and unbound symbols.
    """
    from tvm import relax

    function = mod[name]
    kinds = {p.name: _tensor(p.ty) for p in function.params}
    if unknown := sorted(set(shapes) - set(kinds)):
        raise ImportModelError(f"@{name} has no parameters {', '.join(unknown)}", hint=f"it has {', '.join(kinds)}")
    sizes: dict[str, int] = {}
    for parameter, shape in shapes.items():
        _bind(f"@{name}, {parameter}", kinds[parameter], tuple(shape), sizes)
    _check_closed(name, kinds, sizes)
    return relax.transform.BindSymbolicVars(dict(sizes), name)(mod) if sizes else mod


def _tensor(kind: Any) -> Any:
    return getattr(kind, "tensor_ty", kind)


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


def _check_closed(name: str, kinds: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for parameter, kind in kinds.items():
        if missing := [n for n in _dims(kind) or () if isinstance(n, str) and n not in sizes]:
            raise ImportModelError(
                f"the dims {', '.join(missing)} of {parameter} are left open: {kind}",
                f"@{name}",
                f'give the shapes of inputs: input_shapes={{"{parameter}": (1, ...)}}',
            )
