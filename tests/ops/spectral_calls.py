"""Calls of ATen ops on complex tensors, and of those that give some, for `aten_calls`.

A complex argument is written as the type of its real and imaginary parts, with a last dim of 2: ``c[3,4]``.
"""

from __future__ import annotations

from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


X, C, R = "f32[3,4]", "c32[3,4]", "f32[3,5,4]"
_ALIKE = [
    *("_conj", "_conj_physical", "conj", "conj_physical", "abs", "angle", "real", "imag", "exp", "view_as_real"),
    *("alias", "clone", "contiguous", "detach", "neg", "resolve_conj", "resolve_neg", "squeeze"),
]
_SIGNALS = [(name, signal) for name in ("fft", "ifft") for signal in (X, C)]

CALLS: dict[str, list[Call]] = {
    "view_as_complex.default": [call("f32[3,4,2]")],
    "complex.default": [call(X, X)],
    "polar.default": [call("f32[3,4] > 0", X)],
    **{f"complex.{name}.default": [call(C)] for name in _ALIKE},
    **{f"complex.{name}.Tensor": [call(C, C), call(C, X), call(X, C)] for name in ("mul", "add", "sub")},
    "complex.div.Tensor": [call(C, C), call(C, "f32[3,4] > 0")],
    **{f"complex.{name}.Scalar": [call(C, 2.5)] for name in ("mul", "add", "sub", "div")},
    "complex.matmul.default": [call(C, "c32[4,2]")],
    "complex.mm.default": [call(C, "c32[4,2]")],
    "complex.bmm.default": [call("c32[2,3,4]", "c32[2,4,5]")],
    **{f"complex.{name}.default": [call(C, [2, -1])] for name in ("view", "reshape", "_unsafe_view")},
    "complex.flatten.using_ints": [call("c32[2,3,4]", 1)],
    "complex.unflatten.int": [call(C, 1, [2, 2])],
    "complex.unsqueeze.default": [call(C, 1)],
    "complex.squeeze.dim": [call("c32[3,1,4]", 1)],
    "complex.squeeze.dims": [call("c32[3,1,4]", [1])],
    "complex.permute.default": [call("c32[2,3,4]", [2, 0, 1])],
    "complex.transpose.int": [call(C, 0, 1)],
    "complex.movedim.int": [call("c32[2,3,4]", 0, 2)],
    "complex.expand.default": [call("c32[3,1]", [2, 3, 4])],
    "complex.slice.Tensor": [call(C, 1, 1, 3)],
    "complex.select.int": [call(C, 1, 2)],
    "complex.index.Tensor": [call(C, [torch.tensor([2, 0])])],
    "complex.index_select.default": [call(C, 1, torch.tensor([2, 0]))],
    "complex.roll.default": [call(C, [1], [1])],
    "complex.flip.default": [call(C, [1])],
    "complex.repeat.default": [call(C, [2, 1])],
    "complex.cat.default": [call([C, C], 1)],
    "complex.stack.default": [call([C, C])],
    "complex.split.Tensor": [call(C, 3, 1)],
    "complex.split_with_sizes.default": [call(C, [1, 3], 1)],
    "complex.chunk.default": [call(C, 2, 1)],
    "complex.unbind.int": [call(C, 1)],
    "complex.sum.dim_IntList": [call(C, [1], True)],
    "complex.mean.dim": [call(C, [1])],
    **{
        f"{'complex.' if signal == C else ''}fft_{name}.default": [
            call(signal),
            call(signal, 7, 0, "ortho"),
            call(signal, 3, -1, "forward"),
        ]
        for name, signal in _SIGNALS
    },
    **{
        f"{'complex.' if signal == C else ''}fft_{name}{kind}.default": [
            call(signal),
            call(signal, [5, 3], [0, 1], "ortho"),
        ]
        for name, signal in _SIGNALS
        for kind in ("2", "n")
    },
    "fft_rfft.default": [call(X), call(X, 5, 0, "ortho")],
    "fft_rfft2.default": [call(R), call(R, [4, 7], [0, 2], "ortho")],
    "fft_rfftn.default": [call(R), call(R, [4, 7], None, "forward")],
    "complex.fft_irfft.default": [call(C), call(C, 5), call(C, 4, 0, "ortho")],
    "complex.fft_irfft2.default": [call("c32[2,3,4]"), call("c32[2,3,4]", [5, 7], [1, 2], "ortho")],
    "complex.fft_irfftn.default": [call("c32[2,3,4]")],
}
