"""Constants, filled tensors, ranges, and coordinate grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.layout import floor_divide, is_always, is_symbolic, maximum
from distir_relax.ops.table import (
    FREE,
    Attrs,
    Builder,
    Code,
    IncrementalForm,
    IncrementalStep,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    broadcast_to,
    define,
    dtype_name,
    filled,
    index_of,
    onnx,
    relax,
    reshape_to,
)


def _infer_constant(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if not isinstance(attrs["value"], (bool, int, float)) and not is_symbolic(attrs["value"]):
        raise ValueError("expected a number as the value of a constant")
    return (TensorType((), attrs["dtype"]),)


define(
    "constant",
    Semantics(
        infer=_infer_constant,
        torch="torch.tensor({value}, dtype=torch.{dtype!s}, device=comm.device)",
        sizes=lambda operands, attrs: attrs["value"],
    ),
    Split(lambda types, attrs, results: Rule((), (), ((),))),
    cost=FREE,
    code=Code(relax="R.const({value}, {dtype})"),
    traits={Trait.POINTWISE, Trait.SCALAR},
)


_MAX_DENOMINATOR = 1 << 20


def _infer_arange(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if not attrs["stride"]:
        raise ValueError("expected a stride other than 0")
    start, end, step = attrs["start"], attrs["end"], attrs["stride"]
    if is_symbolic((start, end, step)):
        # The numerators of all three over one denominator: sizes are whole.
        unit = math.lcm(*(Fraction(n).denominator for n in (start, end, step) if isinstance(n, float)))
        if unit > _MAX_DENOMINATOR:
            raise ValueError(f"expected whole numbers or binary fractions beside a size, found {start}, {end}, {step}")
        start, end, step = (int(n * unit) if isinstance(n, float) else n * unit for n in (start, end, step))
        sign = 1 if step > 0 else -1
        count = floor_divide(sign * (end - start) + sign * step - 1, sign * step)
    else:
        count = math.ceil((end - start) / step)
    return (TensorType((maximum(0, count),), attrs["dtype"]),)


def _torch_arange(attrs: Attrs) -> str:
    """Return torch's code, which may not have an end before the start: the range is empty then."""
    start, end, stride = attrs["start"], attrs["end"], attrs["stride"]
    first, last = (start, end) if stride > 0 else (end, start)
    has_floats = isinstance(start, float) or isinstance(end, float)
    is_ordered = not is_symbolic((start, end)) and first <= last if has_floats else is_always(first, "<=", last)
    end_text = "{end}" if is_ordered else f"{'max' if stride > 0 else 'min'}({{start}}, {{end}})"
    return f"torch.arange({{start}}, {end_text}, {{stride}}, dtype=torch.{{dtype!s}}, device=comm.device)"


def _later_numbers(step: IncrementalStep) -> Value:
    bounds = step.attrs["start"], step.attrs["stride"]
    start, stride = (int(n) if isinstance(n, float) and n.is_integer() else n for n in bounds)
    first = start + step.past * stride
    numbers: Value = step.emit(
        "arange", start=first, end=first + step.new * stride, stride=stride, dtype=step.attrs["dtype"]
    )
    return numbers


define(
    "arange",
    Semantics(
        infer=_infer_arange,
        torch=_torch_arange,
        element=lambda elements, shapes, attrs, shape: attrs["start"] + attrs["stride"] * index_of(0),
    ),
    # Every device computes all of it: the elements depend on their positions.
    Split(lambda types, attrs, results: Rule((), (), (((),),))),
    cost=FREE,
    code=Code(relax="R.arange({start}, {end}, {stride}, {dtype})"),
    incremental=IncrementalForm(dims=lambda op: (0,), compute=_later_numbers),
)


# ATen spellings


@aten("arange.default", "arange.start", "arange.start_step")
def _arange(g: Builder, *bounds: Any, dtype: Any = None) -> Any:
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    name = dtype_name(dtype) if dtype else g.default_dtype if any(isinstance(n, float) for n in bounds) else "int64"
    return g.emit("arange", start=start, end=end, stride=step, dtype=name)


@aten("full.default")
def _full(g: Builder, shape: Sequence[int], value: Any, *, dtype: Any = None) -> Any:
    kind = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else g.default_dtype
    return filled(g, shape, value, dtype_name(dtype) if dtype else kind)


@aten("zeros.default", "empty.memory_format")
def _zeros(g: Builder, shape: Sequence[int], *, dtype: Any = None) -> Any:
    return filled(g, shape, 0, dtype_name(dtype) if dtype else g.default_dtype)


@aten("ones.default")
def _ones(g: Builder, shape: Sequence[int], *, dtype: Any = None) -> Any:
    return filled(g, shape, 1, dtype_name(dtype) if dtype else g.default_dtype)


@aten("scalar_tensor.default")
def _scalar_tensor(g: Builder, value: Any, *, dtype: Any = None) -> Any:
    return g.constant(value, dtype_name(dtype) if dtype else g.default_dtype)


@aten("full_like.default")
def _full_like(g: Builder, x: Value, value: Any, *, dtype: Any = None) -> Any:
    return filled(g, x.tensor.shape, value, dtype_name(dtype or x.tensor.dtype))


@aten("new_full.default")
def _new_full(g: Builder, x: Value, shape: Sequence[int], value: Any, *, dtype: Any = None) -> Any:
    return filled(g, shape, value, dtype_name(dtype or x.tensor.dtype))


def _aten_filled(name: str, value: int) -> None:
    @aten(f"{name}_like.default")
    def of_operand(g: Builder, x: Value, *, dtype: Any = None) -> Any:
        return _full_like(g, x, value, dtype=dtype)

    @aten(f"new_{name}.default")
    def of_shape(g: Builder, x: Value, shape: Sequence[int], *, dtype: Any = None) -> Any:
        return _new_full(g, x, shape, value, dtype=dtype)


# The contents of an empty tensor are undefined.
for _name, _value in (("zeros", 0), ("empty", 0), ("ones", 1)):
    _aten_filled(_name, _value)


@aten(
    *(f"{name}.{kind}" for name in ("fill", "fill_") for kind in ("Scalar", "Tensor")),
    *("copy.default", "copy_.default", "zero.default", "zero_.default"),
)
def _fill(g: Builder, x: Value, value: Any = 0, non_blocking: bool = False) -> Any:
    return filled(g, x.tensor.shape, value, x.tensor.dtype)


@aten("meshgrid.default", "meshgrid.indexing")
def _meshgrid(g: Builder, tensors: list[Any], *, indexing: str = "ij") -> Any:
    """With ``xy`` the first two dims of the results are swapped."""
    count = len(tensors)
    homes = list(range(count))
    if indexing == "xy" and count > 1:
        homes[:2] = [1, 0]
    shape = tuple(tensors[homes.index(d)].tensor.elements for d in range(count))
    return tuple(
        broadcast_to(g, reshape_to(g, x, tuple(n if d == home else 1 for d, n in enumerate(shape))), shape)
        for x, home in zip(tensors, homes, strict=True)
    )


# Relax spellings


@relax("relax.arange")
def _relax_arange(g: Builder, args: Any, attrs: Attrs) -> Any:
    start, end, step = args
    return g.emit("arange", start=start, end=end, stride=step, dtype=attrs["dtype"])


@relax("relax.full")
def _relax_full(g: Builder, args: Any, attrs: Attrs) -> Any:
    return g.emit("broadcast_to", args[1], shape=args[0])


@relax("relax.zeros", "relax.ones")
def _relax_filled(g: Builder, args: Any, attrs: Attrs) -> Any:
    value = g.constant(int(attrs["op"] == "relax.ones"), attrs["dtype"])
    return g.emit("broadcast_to", value, shape=args[0])


@relax("relax.zeros_like", "relax.ones_like", "relax.full_like")
def _relax_filled_like(g: Builder, args: Any, attrs: Attrs) -> Any:
    name = attrs["op"].removeprefix("relax.")
    return g.aten(f"{name}.default", *args, dtype=None if attrs["dtype"] in ("", "void") else attrs["dtype"])


@relax("relax.meshgrid")
def _relax_meshgrid(g: Builder, args: Any, attrs: Attrs) -> Any:
    return list(_meshgrid(g, args[0], indexing=attrs["indexing"] or "ij"))


# ONNX spellings


@onnx("ConstantOfShape")
def _onnx_filled(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    value = attrs.get("value")
    kind, number = ("float32", 0.0) if value is None else (value.dtype.name, value.reshape(-1)[0].item())
    return filled(g, x.numbers(0), number, kind)


@onnx("Range")
def _onnx_range(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    start, end, step = (x.number(i) for i in range(3))
    return g.emit("arange", start=start, end=end, stride=step, dtype=x.dtype(0))
