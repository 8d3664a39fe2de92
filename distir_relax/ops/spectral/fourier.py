"""Discrete Fourier transforms, as products with the DFT matrix.

This takes n^2 operations instead of n log n, but it splits like any product: over batch dims at no cost, over the dim
itself as a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, Complex, aten, axis_of, complex_aten

_Signal = Value | Complex


def _dft(g: Builder, x: _Signal, axis: int, size: int | None, norm: str | None, inverse: bool) -> Complex:
    """Return the transform of `x` along `axis`, cropped or zero-padded to `size`."""
    import torch

    real = x.real if isinstance(x, Complex) else x
    n = size or real.tensor.shape[axis]
    at = torch.arange(n, dtype=torch.float64)
    angles = torch.outer(at, at) % n * (2 * torch.pi / n)
    scale = _scale(n, norm, inverse)
    cosines, sines = angles.cos() * scale, angles.sin() * (scale if inverse else -scale)
    parts = [_fit_length(g, part, axis, n) for part in ((x.real, x.imaginary) if isinstance(x, Complex) else (x,))]
    of_real = [_product(g, parts[0], axis, matrix) for matrix in (cosines, sines)]
    if len(parts) == 1:
        return Complex(*of_real)
    of_imaginary = [_product(g, parts[1], axis, matrix) for matrix in (sines, cosines)]
    return Complex(g.emit("subtract", of_real[0], of_imaginary[0]), g.emit("add", of_real[1], of_imaginary[1]))


def _inverse_real_dft(g: Builder, x: Complex, axis: int, size: int | None, norm: str | None) -> Any:
    """Return the real signal of `size` elements with transform `x`, which is its first half."""
    import torch

    n = size or 2 * (x.real.tensor.shape[axis] - 1)
    half = n // 2 + 1
    angles = torch.outer(torch.arange(half, dtype=torch.float64), torch.arange(n, dtype=torch.float64))
    angles = angles % n * (2 * torch.pi / n)
    # By symmetry, each element counts twice, except the first, and the middle one of an even number.
    weights = torch.full((half, 1), 2.0, dtype=torch.float64)
    weights[0] = 1
    if n % 2 == 0:
        weights[-1] = 1
    weights = weights * _scale(n, norm, True)
    real, imaginary = (_fit_length(g, part, axis, half) for part in (x.real, x.imaginary))
    first = _product(g, real, axis, angles.cos() * weights)
    return g.emit("subtract", first, _product(g, imaginary, axis, angles.sin() * weights))


def _scale(n: int, norm: str | None, inverse: bool) -> float:
    if norm == "ortho":
        return float(n**-0.5)
    return 1 / n if (norm == "forward") != inverse else 1.0


def _fit_length(g: Builder, x: Value, axis: int, size: int) -> Any:
    have = x.tensor.shape[axis]
    if have >= size:
        return g.aten("slice.Tensor", x, axis, 0, size)
    high = [0] * len(x.tensor.shape)
    high[axis] = size - have
    return g.emit("pad", x, low=(0,) * len(high), high=tuple(high), value=0.0)


def _product(g: Builder, x: Value, axis: int, matrix: Any) -> Any:
    import torch

    last = len(x.tensor.shape) - 1
    y = g.aten("movedim.int", x, axis, last)
    y = g.emit("matmul", y, g.array(matrix.to(getattr(torch, x.tensor.dtype)), "fourier"))
    return g.aten("movedim.int", y, last, axis)


def _axes(x: _Signal, sizes: Any, dims: Any) -> list[tuple[int, int | None]]:
    rank = len((x.real if isinstance(x, Complex) else x).tensor.shape)
    if dims is None:
        dims = range(rank) if sizes is None else range(rank - len(sizes), rank)
    axes = [axis_of(d, rank) for d in dims]
    return [(d, None if sizes is None or sizes[i] == -1 else sizes[i]) for i, d in enumerate(axes)]


def _multi_dft(g: Builder, x: _Signal, axes: Sequence[tuple[int, int | None]], norm: str | None, inverse: bool) -> Any:
    for axis, size in axes:
        x = _dft(g, x, axis, size, norm, inverse)
    return x


def _real_dft(g: Builder, x: Value, axes: Sequence[tuple[int, int | None]], norm: str | None) -> Any:
    """Return the transform of a real signal; along the last of the axes, only the first half."""
    axis = axes[-1][0]
    y = _dft(g, x, *axes[-1], norm, False)
    half = (y.real.tensor.shape[axis]) // 2 + 1
    parts = [g.aten("slice.Tensor", part, axis, 0, half) for part in (y.real, y.imaginary)]
    return _multi_dft(g, Complex(*parts), axes[:-1], norm, False)


def _inverse_multi_real_dft(g: Builder, x: Complex, axes: Sequence[tuple[int, int | None]], norm: str | None) -> Any:
    """Return the real signal whose transform has `x` as its first half along the last of the axes."""
    return _inverse_real_dft(g, _multi_dft(g, x, axes[:-1], norm, True), *axes[-1], norm)


# ATen spellings


def _register(name: str, transform: Any, *declare: Any) -> None:
    """Register a transform of one dim, of the last two by default, and of any number."""

    def one(g: Builder, x: _Signal, n: int | None = None, dim: int = -1, norm: str | None = None) -> Any:
        return transform(g, x, _axes(x, None if n is None else [n], [dim]), norm)

    def two(g: Builder, x: _Signal, s: Any = None, dim: Any = (-2, -1), norm: str | None = None) -> Any:
        return transform(g, x, _axes(x, s, dim), norm)

    def many(g: Builder, x: _Signal, s: Any = None, dim: Any = None, norm: str | None = None) -> Any:
        return transform(g, x, _axes(x, s, dim), norm)

    for suffix, convert in (("", one), ("2", two), ("n", many)):
        for register in declare:
            register(f"fft_{name}{suffix}.default")(convert)


_register("fft", partial(_multi_dft, inverse=False), aten, complex_aten)
_register("ifft", partial(_multi_dft, inverse=True), aten, complex_aten)
_register("rfft", _real_dft, aten)
_register("irfft", _inverse_multi_real_dft, complex_aten)
