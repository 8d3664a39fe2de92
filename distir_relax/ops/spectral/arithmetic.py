"""Complex arithmetic, construction and decomposition."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, Complex, aten, complex_aten, like

# ATen spellings


@aten("view_as_complex.default")
def _view_as_complex(g: Builder, x: Value) -> Complex:
    return Complex(g.aten("select.int", x, -1, 0), g.aten("select.int", x, -1, 1))


@aten("complex.default")
def _complex(g: Builder, real: Value, imaginary: Value) -> Complex:
    return Complex(real, imaginary)


@aten("polar.default")
def _polar(g: Builder, length: Value, angle: Value) -> Complex:
    return Complex(*(g.emit("multiply", length, g.emit(name, angle)) for name in ("cos", "sin")))


@complex_aten("view_as_real.default")
def _view_as_real(g: Builder, x: Complex) -> Any:
    return g.aten("stack.default", [x.real, x.imaginary], -1)


@complex_aten("real.default")
def _real(g: Builder, x: Complex) -> Value:
    return x.real


@complex_aten("imag.default")
def _imaginary(g: Builder, x: Complex) -> Value:
    return x.imaginary


@complex_aten("conj.default", "_conj.default", "_conj_physical.default", "conj_physical.default")
def _conjugate(g: Builder, x: Complex) -> Complex:
    return Complex(x.real, g.emit("negative", x.imaginary))


@complex_aten("abs.default")
def _length(g: Builder, x: Complex) -> Any:
    return g.aten("hypot.default", x.real, x.imaginary)


@complex_aten("angle.default")
def _angle(g: Builder, x: Complex) -> Any:
    return g.emit("atan2", x.imaginary, x.real)


@complex_aten("exp.default")
def _exp(g: Builder, x: Complex) -> Complex:
    return _polar(g, g.emit("exp", x.real), x.imaginary)


def _bilinear(spelling: str) -> Any:
    """Register the conversion of an op that is linear in each of two operands, of which one may be real."""

    def convert(g: Builder, a: Any, b: Any) -> Complex:
        if not isinstance(a, Complex):
            return Complex(g.aten(spelling, a, b.real), g.aten(spelling, a, b.imaginary))
        if not isinstance(b, Complex):
            return Complex(g.aten(spelling, a.real, b), g.aten(spelling, a.imaginary, b))
        real = g.emit("subtract", g.aten(spelling, a.real, b.real), g.aten(spelling, a.imaginary, b.imaginary))
        imaginary = g.emit("add", g.aten(spelling, a.real, b.imaginary), g.aten(spelling, a.imaginary, b.real))
        return Complex(real, imaginary)

    return convert


@complex_aten("div.Tensor")
def _divide(g: Builder, a: Any, b: Any) -> Complex:
    if not isinstance(b, Complex):
        return Complex(g.aten("div.Tensor", a.real, b), g.aten("div.Tensor", a.imaginary, b))
    size = g.emit("add", g.emit("square", b.real), g.emit("square", b.imaginary))
    product = g.aten("complex.mul.Tensor", a, _conjugate(g, b))
    return Complex(g.emit("divide", product.real, size), g.emit("divide", product.imaginary, size))


def _register_sum(name: str, *spellings: str) -> None:
    def convert(g: Builder, a: Any, b: Any, *, alpha: float = 1) -> Complex:
        first, second = _as_complex(g, a, b), _as_complex(g, b, a)
        parts = ((first.real, second.real), (first.imaginary, second.imaginary))
        return Complex(*(g.aten(f"{name}.Tensor", x, y, alpha=alpha) for x, y in parts))

    complex_aten(*spellings)(convert)


def _as_complex(g: Builder, x: Any, other: Any) -> Complex:
    if isinstance(x, Complex):
        return x
    real = x if isinstance(x, Value) else like(g, other.real, x)
    return Complex(real, like(g, real, 0))


def _register_per_part(*spellings: str) -> None:
    """Register ops that apply to real and imaginary parts separately, such as data movement and sums."""

    def converter(spelling: str) -> Any:
        def convert(g: Builder, *args: Any, **kwargs: Any) -> Any:
            sides = [g.aten(spelling, *_part(args, name), **kwargs) for name in ("real", "imaginary")]
            if isinstance(sides[0], tuple):
                return tuple(Complex(*pair) for pair in zip(*sides, strict=True))
            return Complex(*sides)

        return convert

    for spelling in spellings:
        complex_aten(spelling)(converter(spelling))


def _part(item: Any, name: str) -> Any:
    if isinstance(item, Complex):
        return getattr(item, name)
    return type(item)(_part(x, name) for x in item) if isinstance(item, (tuple, list)) else item


for _spelling in ("mul.Tensor", "matmul.default", "bmm.default", "mm.default"):
    complex_aten(_spelling)(_bilinear(_spelling))
_register_sum("add", "add.Tensor", "add.Scalar")
_register_sum("sub", "sub.Tensor", "sub.Scalar")
_register_per_part(
    *("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int"),
    *("unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "permute.default", "transpose.int"),
    *("expand.default", "slice.Tensor", "select.int", "index.Tensor", "index_select.default", "roll.default"),
    *("cat.default", "stack.default", "split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int"),
    *("clone.default", "contiguous.default", "alias.default", "detach.default", "neg.default", "flip.default"),
    *("sum.dim_IntList", "mean.dim", "mul.Scalar", "div.Scalar", "repeat.default", "movedim.int"),
    *("resolve_conj.default", "resolve_neg.default"),
)
