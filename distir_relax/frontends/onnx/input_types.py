"""Types that an ONNX graph declares: those of its inputs, whose open dims are symbols, and of other values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.frontends.dynamic_shapes import bounds_of, find_symbols
from distir_relax.frontends.onnx.tensors import dtype_name
from distir_relax.ir import TensorType
from distir_relax.layout import Symbol, is_always, parse_size

if TYPE_CHECKING:
    import onnx


def input_types(
    inputs: Sequence[onnx.ValueInfoProto],
    shapes: Mapping[str, Sequence[int]],
    dims: Mapping[str, Any],
    where: str,
) -> dict[str, TensorType]:
    """Return the types of a graph's inputs by name: of the shapes in `shapes`, else with a symbol for each open dim.

    A named dim of an input in `shapes` has this size in all inputs, except for placeholders (``?``, ``unk``), and for a
    name that is twice in one shape. Elsewhere it is a symbol of this name, or of a similar identifier; a name such as
    ``past + sequence`` is an expression if its parts are names of dims; a dim without a name is called after its input
    (``x_dim0``). `dims` has bounds of symbols, fixed sizes, or expressions over other symbols, by name; an expression
    may contain a symbol of its own, with bounds in `dims`: ``{"width": "32*columns", "columns": (1, 20)}``.

    Raises `ImportModelError` for an input of unknown rank, for a shape that differs from the model's, and for a name in
    `dims` that the model does not have.
    """
    if unknown := set(shapes) - {item.name for item in inputs}:
        names = ", ".join(item.name for item in inputs)
        raise ImportModelError(f"there is no input {', '.join(sorted(unknown))}", where, f"the inputs are {names}")
    sizes: dict[str, int] = {}
    declared: dict[str, list[int | str]] = {}
    for item in inputs:
        if not item.type.HasField("tensor_type"):
            raise ImportModelError(f"the input {item.name!r} is not a tensor", where)
        if item.name in shapes:
            _bind(item, tuple(shapes[item.name]), sizes, where)
    for item in inputs:
        if item.name in shapes:
            declared[item.name] = list(shapes[item.name])
        elif item.type.tensor_type.HasField("shape"):
            declared[item.name] = _declared_dims(item, sizes)
        else:
            raise ImportModelError(
                f"the model leaves the number of dims of its input {item.name!r} open",
                where,
                f'give its shape: input_shapes={{"{item.name}": (1, ...)}} or --input-shape {item.name}=1,...',
            )
    symbols = _Symbols.of(declared, sizes, dims, where)
    return {
        item.name: TensorType(
            tuple(map(symbols.size, declared[item.name])),
            dtype_name(item.type.tensor_type.elem_type, f"{where}, input {item.name}"),
        )
        for item in inputs
    }


@dataclass(frozen=True)
class _Symbols:
    """The symbols of a graph's inputs, and the texts of their dims by the dim's name in the graph, if they differ."""

    by_name: Mapping[str, Symbol]
    texts: Mapping[str, str]

    @classmethod
    def of(
        cls,
        declared: Mapping[str, Sequence[int | str]],
        sizes: Mapping[str, int],
        dims: Mapping[str, Any],
        where: str,
    ) -> _Symbols:
        """Return the symbols of inputs with these dims, which are sizes or names; names in `sizes` are bound."""
        names = list(dict.fromkeys(n for shape in declared.values() for n in shape if isinstance(n, str)))
        if dims and not names:
            raise ImportModelError(f"the model has no dim {sorted(dims)[0]!r}", where, "its inputs have fixed shapes")
        known = {name: Symbol(name, size, size) for name, size in sizes.items() if _is_identifier(name)}
        texts = _identifiers(names, known)
        given = {texts.get(name, name): item for name, item in dims.items()}
        expressions = {name: given.pop(text) for name, text in texts.items() if isinstance(given.get(text), str)}
        spec = {
            name: {dim: texts[n] for dim, n in enumerate(shape) if n in texts and n not in expressions}
            for name, shape in declared.items()
        }
        # Other names are symbols that only expressions contain.
        of_expressions = {name for text in expressions.values() for name in _NAME.findall(text)} - set(texts.values())
        for name in of_expressions & given.keys():
            known[name] = Symbol(name, *bounds_of(given.pop(name), name))
        bounds = {name: (item, item) if isinstance(item, int) else item for name, item in given.items()}
        for symbols in find_symbols(spec, bounds, declared).values():
            known.update({symbol.name: symbol for symbol in symbols.values()})
        for name, text in expressions.items():
            if not _is_expression(text, known.values()):
                raise ImportModelError(
                    f"expected an expression over other dims for {texts[name]}, found {text!r}",
                    where,
                    f"these dims are {', '.join(known)}",
                )
        return cls(known, {**texts, **expressions})

    def size(self, declared: int | str) -> int:
        """Return the size of a dim by its size or name."""
        if isinstance(declared, int):
            return declared
        return parse_size(self.texts.get(declared, declared), self.by_name)


_NAME = re.compile(r"[^\W\d]\w*")


def _identifiers(names: Sequence[str], bound: Collection[str]) -> dict[str, str]:
    """Return the identifiers of dims by their names, without those of expressions over others and `bound` names."""
    identifiers = {name: name for name in names if _is_identifier(name)}
    symbols = [Symbol(name, 1) for name in {*identifiers, *bound}]
    for name in names:
        if name not in identifiers and not _is_expression(name, symbols):
            identifiers[name] = _fresh(name, identifiers.values())
    return identifiers


def _is_identifier(text: str) -> bool:
    return text.isidentifier() and not iskeyword(text) and text not in ("min", "max")


def _is_expression(text: str, symbols: Iterable[Symbol]) -> bool:
    """Return whether a text is an expression over these symbols, nonnegative for all sizes."""
    try:
        size = parse_size(text, {symbol.name: symbol for symbol in symbols})
    except DistIRError:
        return False
    return is_always(0, "<=", size) is True


def _fresh(text: str, used: Any) -> str:
    """Return an identifier like `text` that is not used."""
    name = re.sub(r"\W+", "_", text).strip("_") or "dim"
    name = name if _is_identifier(name) else f"dim_{name}"
    taken, number, result = set(used), 1, name
    while result in taken:
        number += 1
        result = f"{name}_{number}"
    return result


def _declared_dims(item: Any, sizes: Mapping[str, int]) -> list[int | str]:
    """Return the dims of an input: sizes, also those that `sizes` has by name, and names of open dims."""
    dims = list(item.type.tensor_type.shape.dim)
    result: list[int | str] = []
    for number, dim in enumerate(dims):
        if _has_size(dim):
            result.append(int(dim.dim_value))
        elif _is_placeholder(dim):
            result.append(f"{item.name}_dim{number}")
        else:
            result.append(sizes.get(dim.dim_param, dim.dim_param) if _is_symbol(dim, dims) else str(dim.dim_param))
    return result


def declared_type(info: onnx.ValueInfoProto) -> TensorType | None:
    """Return the type that a graph declares for a value; None for an open dim, or without a declaration.

    Raises `UnsupportedOpError` for a dtype that programs do not have.
    """
    tensor = info.type.tensor_type
    if not tensor.HasField("shape") or not all(map(_has_size, tensor.shape.dim)):
        return None
    return TensorType(tuple(d.dim_value for d in tensor.shape.dim), dtype_name(tensor.elem_type, info.name))


def _bind(item: Any, shape: tuple[int, ...], symbols: dict[str, int], where: str) -> None:
    tensor = item.type.tensor_type
    dims = list(tensor.shape.dim) if tensor.HasField("shape") else [None] * len(shape)
    fits = len(dims) == len(shape) and all(isinstance(n, int) and n >= 0 for n in shape)
    for dim, size in zip(dims, shape, strict=False):
        if dim is not None and _has_size(dim):
            fits = fits and dim.dim_value == size
        elif dim is not None and _is_symbol(dim, dims) and symbols.setdefault(dim.dim_param, size) != size:
            raise ImportModelError(
                f"the dim {dim.dim_param!r} of input {item.name!r} is {size}, and {symbols[dim.dim_param]} elsewhere",
                where,
            )
    if not fits:
        raise ImportModelError(f"the input {item.name!r} is {_print_shape(tensor)}, found the shape {shape}", where)


def _has_size(dim: Any) -> bool:
    """Return whether a dim has a size. Some exporters write a negative one for an open dim."""
    return bool(dim.HasField("dim_value") and dim.dim_value >= 0)


_NAMELESS = {"", "?", "unk", "unknown", "none"}


def _is_symbol(dim: Any, dims: Sequence[Any]) -> bool:
    """Return whether the symbol of an open dim is unique; `dims` are those of its shape.

    Exporters use one placeholder for all unknown dims.
    """
    same = [other for other in dims if other.dim_param == dim.dim_param]
    return not _is_placeholder(dim) and len(same) == 1


def _is_placeholder(dim: Any) -> bool:
    return dim.dim_param.strip().lower() in _NAMELESS


def _print_shape(tensor: Any) -> str:
    if not tensor.HasField("shape"):
        return "of any rank"
    sizes = [str(d.dim_value) if _has_size(d) else d.dim_param or "?" for d in tensor.shape.dim]
    return f"({', '.join(sizes)})"
