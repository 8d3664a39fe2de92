"""Permutation of dims."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.movement import view_strides
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Backward,
    Builder,
    Code,
    OnnxOperands,
    QuantizedForm,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    axis_of,
    define,
    dim_names,
    gradient_of,
    index_of,
    onnx,
    operands,
    parse_rule,
    reindexed,
    relax,
)


def _infer_permute(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if sorted(attrs["axes"]) != list(range(len(types[0].shape))):
        raise ValueError(f"axes {attrs['axes']} do not permute {len(types[0].shape)} dims")
    return (TensorType(tuple(types[0].shape[a] for a in attrs["axes"]), types[0].dtype),)


def _permute_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = dim_names(len(types[0].shape))
    text = f"{' '.join(names)} -> {' '.join(names[a] for a in attrs['axes'])}"
    return parse_rule(text, [types[0].shape], [results[0].shape])


def _permute_gradient(b: Backward) -> Value:
    axes = b.attrs["axes"]
    back: Value = b.emit("permute_dims", b.grad, axes=tuple(axes.index(d) for d in range(len(axes))))
    return back


define(
    "permute_dims",
    Semantics(
        infer=_infer_permute,
        torch="{0}.permute({axes})",
        linear=(operands(0),),
        element=lambda elements, shapes, attrs, shape: reindexed(
            elements[0], [index_of(attrs["axes"].index(dim)) for dim in range(len(shape))]
        ),
    ),
    Split(_permute_rule),
    cost=FREE,
    code=Code(relax="R.permute_dims({0}, {axes})", strides=view_strides.permuted),
    gradient=gradient_of(_permute_gradient),
    quantized=QuantizedForm(0, None, is_product=False, applies=lambda op: op.attrs["axes"] in ((1, 0), (0, 2, 1))),
    traits={Trait.VIEW, Trait.MOVES},
)


# ATen spellings


@aten("permute.default")
def _permute(g: Builder, x: Value, dims: list[int]) -> Any:
    axes = tuple(axis_of(d, len(x.tensor.shape)) for d in dims)
    return x if axes == tuple(range(len(axes))) else g.emit("permute_dims", x, axes=axes)


@aten("transpose.int", "swapaxes.default", "swapdims.default")
def _transpose(g: Builder, x: Value, a: int, b: int) -> Any:
    axes = list(range(len(x.tensor.shape)))
    if axes:
        axes[a], axes[b] = axes[b], axes[a]
    return _permute(g, x, axes)


@aten("t.default", "numpy_T.default")
def _t(g: Builder, x: Value) -> Any:
    return _permute(g, x, list(reversed(range(len(x.tensor.shape)))))


@aten("mT.default", "adjoint.default")
def _matrix_transpose(g: Builder, x: Value) -> Any:
    return _transpose(g, x, -1, -2)


@aten("movedim.int", "movedim.intlist")
def _movedim(g: Builder, x: Value, source: Any, destination: Any) -> Any:
    rank = len(x.tensor.shape)
    sources, destinations = ([dim] if isinstance(dim, int) else dim for dim in (source, destination))
    home = {axis_of(d, max(1, rank)): axis_of(s, max(1, rank)) for s, d in zip(sources, destinations, strict=True)}
    rest = iter([i for i in range(rank) if i not in home.values()])
    return g.aten("permute.default", x, [home[i] if i in home else next(rest) for i in range(rank)])


# Relax spellings


@relax("relax.permute_dims")
def _relax_permute(g: Builder, args: Any, attrs: Attrs) -> Any:
    return _t(g, args[0]) if attrs["axes"] is None else _permute(g, args[0], attrs["axes"])


# ONNX spellings


@onnx("Transpose")
def _onnx_transpose(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _permute(g, x[0], attrs["perm"]) if "perm" in attrs else _t(g, x[0])
