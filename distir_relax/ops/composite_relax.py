"""Relax ops that are ATen ops by another name, or with their arguments elsewhere."""

from __future__ import annotations

from typing import Any

from distir_relax.ops.pointwise import cast
from distir_relax.ops.registry import lookup_aten, relax_spelling


def _aten(g: Any, spelling: str, *args: Any, **kwargs: Any) -> Any:
    convert = lookup_aten(spelling)
    assert convert is not None, spelling
    return convert(g, *args, **kwargs)


# Picking and ordering


def _arg_reduce(name: str) -> None:
    def convert(g: Any, args: Any, attrs: Any) -> Any:
        return _aten(g, f"{name}.default", args[0], attrs["axis"], attrs["keepdims"])

    relax_spelling(f"relax.{name}")(convert)


_arg_reduce("argmax")
_arg_reduce("argmin")


@relax_spelling("relax.topk")
def _topk(g: Any, args: Any, attrs: Any) -> Any:
    values, indices = _aten(g, "topk.default", args[0], attrs["k"], attrs["axis"], attrs["largest"])
    indices = cast(g, indices, attrs["dtype"])
    return {"both": [values, indices], "values": values, "indices": indices}[attrs["ret_type"]]


@relax_spelling("relax.argsort")
def _argsort(g: Any, args: Any, attrs: Any) -> Any:
    order = _aten(g, "argsort.default", args[0], attrs["axis"], attrs["descending"])
    return cast(g, order, attrs["dtype"])


@relax_spelling("relax.sort")
def _sort(g: Any, args: Any, attrs: Any) -> Any:
    return _aten(g, "sort.default", args[0], attrs["axis"], attrs["descending"])[0]


@relax_spelling("relax.gather_elements")
def _gather_elements(g: Any, args: Any, attrs: Any) -> Any:
    return _aten(g, "gather.default", args[0], attrs["axis"], args[1])


@relax_spelling("relax.flip")
def _flip(g: Any, args: Any, attrs: Any) -> Any:
    return _aten(g, "flip.default", args[0], [attrs["axis"]])


@relax_spelling("relax.tril", "relax.triu")
def _triangle(g: Any, args: Any, attrs: Any) -> Any:
    name = attrs["op"].removeprefix("relax.")
    return _aten(g, f"{name}.default", args[0], args[1] if len(args) > 1 else attrs["k"])


# Shapes


@relax_spelling("relax.stack")
def _stack(g: Any, args: Any, attrs: Any) -> Any:
    return _aten(g, "stack.default", args[0], attrs["axis"] or 0)


@relax_spelling("relax.tile")
def _tile(g: Any, args: Any, attrs: Any) -> Any:
    return _aten(g, "tile.default", args[0], attrs["repeats"])


@relax_spelling("relax.repeat")
def _repeat(g: Any, args: Any, attrs: Any) -> Any:
    return _aten(g, "repeat_interleave.self_int", args[0], attrs["repeats"], attrs["axis"])


@relax_spelling("relax.meshgrid")
def _meshgrid(g: Any, args: Any, attrs: Any) -> Any:
    return list(_aten(g, "meshgrid.indexing", args[0], indexing=attrs["indexing"] or "ij"))


@relax_spelling("relax.zeros_like", "relax.ones_like")
def _filled_like(g: Any, args: Any, attrs: Any) -> Any:
    name = attrs["op"].removeprefix("relax.")
    dtype = attrs["dtype"]
    return _aten(g, f"{name}.default", args[0], dtype=None if dtype in (None, "", "void") else dtype)


@relax_spelling("relax.full_like")
def _full_like(g: Any, args: Any, attrs: Any) -> Any:
    dtype = attrs["dtype"]
    return _aten(g, "full_like.default", *args, dtype=None if dtype in (None, "", "void") else dtype)


# Arithmetic


@relax_spelling("relax.einsum")
def _einsum(g: Any, args: Any, attrs: Any) -> Any:
    return _aten(g, "einsum.default", attrs["subscripts"], args[0])


@relax_spelling("relax.variance", "relax.std")
def _spread(g: Any, args: Any, attrs: Any) -> Any:
    name = {"relax.variance": "var", "relax.std": "std"}[attrs["op"]]
    return _aten(g, f"{name}.correction", args[0], attrs["axis"], correction=0, keepdim=attrs["keepdims"])


@relax_spelling("relax.nn.leakyrelu")
def _leaky_relu(g: Any, args: Any, attrs: Any) -> Any:
    return _aten(g, "leaky_relu.default", args[0], attrs["alpha"])
