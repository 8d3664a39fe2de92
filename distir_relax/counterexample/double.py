"""Programs in float64, in which integers are exact and rounding is far smaller than a mistake."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from distir_relax.ir import DTensorType, Function, Module, PlacedType, TensorType, Type, Value

_DOUBLE = {"float32": "float64", "float16": "float64", "bfloat16": "float64", "complex64": "complex128"}


def in_float64(module: Module) -> Module:
    """Return a program with float64 in place of the other floating-point dtypes, in types and in attributes."""
    return replace(module, functions=tuple(map(_function, module.functions)))


def _function(function: Function) -> Function:
    values: dict[Value, Value] = {}

    def converted(value: Value) -> Value:
        if value not in values:
            values[value] = Value(value.name, _type(value.type))
        return values[value]

    ops = tuple(
        replace(
            op,
            operands=tuple(map(converted, op.operands)),
            results=tuple(map(converted, op.results)),
            attrs={key: _attribute(value) for key, value in op.attrs.items()},
        )
        for op in function.ops
    )
    inputs = tuple(replace(i, value=converted(i.value), layout=_layout(i.layout)) for i in function.inputs)
    outputs = tuple(replace(o, value=converted(o.value), layout=_layout(o.layout)) for o in function.outputs)
    return replace(function, inputs=inputs, ops=ops, outputs=outputs)


@lru_cache(maxsize=4096)
def _type(kind: Type) -> Type:
    if isinstance(kind, (TensorType, DTensorType, PlacedType)):
        return replace(kind, dtype=_DOUBLE.get(kind.dtype, kind.dtype))
    return kind


def _layout(layout: DTensorType | None) -> DTensorType | None:
    return None if layout is None else replace(layout, dtype=_DOUBLE.get(layout.dtype, layout.dtype))


def _attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_attribute, value))
    return _DOUBLE.get(value, value) if isinstance(value, str) else value
