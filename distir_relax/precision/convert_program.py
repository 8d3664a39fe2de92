"""Conversion of a program's floating-point values to another dtype: of ONNX files, Relax modules and programs.

A torch module is converted before it is exported, and its own code decides what stays in float32. A program has no such
code any more, so that it is decided by where numbers come from. To bfloat16 are converted

- float32 inputs, and weights that are matrices or have more dims than one: they are *narrow*;
- whatever is computed with a narrow value, whose other float32 operands are cast.

Numbers that are made of integers alone stay in float32, since bfloat16 has eight bits for them: positions, and the
angles of positions and frequencies. They are cast where they meet a narrow value. Scalars and vectors are *flexible*:
they are stored in float32 if such numbers need them, and in bfloat16 otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from distir_relax.errors import VerificationError
from distir_relax.frontends.imported_model import Imported
from distir_relax.ir import Attribute, Function, Input, Op, Value
from distir_relax.layout import assuming
from distir_relax.precision.call_dtypes import restore_call_dtypes
from distir_relax.precision.retype import Retyper

if TYPE_CHECKING:
    import torch

_NARROW_MAX = (2 - 2**-7) * 2.0**127
"""The largest number of bfloat16."""


def convert_program(imported: Imported, dtype: str) -> Imported:
    """Return the model with weights and activations of `dtype`, ``bfloat16`` or ``float32``.

    To bfloat16 float32 values are converted; to float32 those of float16 and bfloat16. Inputs and outputs keep their
    dtypes. A number beyond the range of bfloat16, such as that of a mask, becomes the largest one.
    """
    sources = ("float32",) if dtype == "bfloat16" else ("bfloat16", "float16")
    main = imported.module.main
    values = [item.value for item in main.inputs] + [value for op in main.ops for value in op.results]
    if not any(value.tensor.dtype in sources for value in values):
        return imported
    with assuming(imported.module.guards):
        converted = _Narrowing(main).function() if dtype == "bfloat16" else _widened(main, sources)
    kinds = {item.value.name: item.value.tensor.dtype for item in converted.inputs}
    tensors = {name: _converted(tensor, kinds[name]) for name, tensor in imported.tensors.items()}
    result = replace(imported, module=replace(imported.module, functions=(converted,)), tensors=tensors)
    return restore_call_dtypes(result, main)


class _Kind(Enum):
    """How a float32 value is stored."""

    NARROW = 2
    WIDE = 1
    FLEXIBLE = 0


class _Narrowing:
    """Conversion of a function from float32 to bfloat16."""

    def __init__(self, main: Function) -> None:
        self._main = main
        self._kinds: dict[str, _Kind] = {}
        """Those of the float32 values."""
        for item in main.inputs:
            if _is_float32(item.value):
                self._kinds[item.value.name] = _kind_of_input(item)
        for op in main.ops:
            kind = self._join(op)
            self._kinds |= {value.name: kind for value in op.results if _is_float32(value)}
        for op in reversed(main.ops):
            if self._join(op) is _Kind.WIDE or any(self._kinds.get(v.name) is _Kind.WIDE for v in op.results):
                flexible = [v.name for v in op.operands if self._kinds.get(v.name) is _Kind.FLEXIBLE]
                self._kinds |= dict.fromkeys(flexible, _Kind.WIDE)

    def function(self) -> Function:
        """Return the converted function."""
        retyper = Retyper(self._main)
        for item in self._main.inputs:
            if self._is_narrow(item.value):
                retyper.replace_input(item.value, "bfloat16")
        for op in self._main.ops:
            op = replace(op, attrs={name: _within_range(value) for name, value in op.attrs.items()})
            operands = [retyper.value(value) for value in op.operands]
            if not op.operands and any(map(self._is_narrow, op.results)):
                retyper.emit(op, (), {"dtype": "bfloat16"})
            elif any(self._is_narrow(value) for value in (*op.operands, *op.results)):
                self._narrow(retyper, op, operands)
            else:
                retyper.copy(op)
        return retyper.function()

    def _narrow(self, retyper: Retyper, op: Op, operands: Sequence[Value]) -> None:
        """Emit an op in bfloat16, or in float32 with a result of bfloat16 if there is no such op in bfloat16."""
        pairs = list(zip(op.operands, operands, strict=True))
        narrow = [retyper.cast(v, "bfloat16") if _is_float32(old) else v for old, v in pairs]
        try:
            retyper.emit(op, narrow)
        except VerificationError:
            wide = [retyper.cast(v, old.tensor.dtype) for old, v in pairs]
            dtypes = ["bfloat16" if self._is_narrow(value) else value.tensor.dtype for value in op.results]
            retyper.emit(op, wide, dtypes=dtypes)

    def _join(self, op: Op) -> _Kind:
        """Return the kind of an op's float32 results."""
        found = [self._kinds[value.name] for value in op.operands if value.name in self._kinds]
        if found:
            return max(found, key=lambda kind: kind.value)
        is_scalar = not op.operands and not op.results[0].tensor.shape
        return _Kind.FLEXIBLE if is_scalar else _Kind.WIDE

    def _is_narrow(self, value: Value) -> bool:
        return self._kinds.get(value.name, _Kind.WIDE) is not _Kind.WIDE


def _kind_of_input(item: Input) -> _Kind:
    is_weight = item.role in ("parameter", "constant")
    is_vector = sum(size != 1 for size in item.value.tensor.shape) < 2
    return _Kind.FLEXIBLE if is_weight and is_vector else _Kind.NARROW


def _is_float32(value: Value) -> bool:
    return value.tensor.dtype == "float32"


def _widened(main: Function, sources: Collection[str]) -> Function:
    """Return a function with float32 in place of the dtypes `sources`."""
    retyper = Retyper(main)
    for item in main.inputs:
        if item.value.tensor.dtype in sources:
            retyper.replace_input(item.value, "float32")
    for op in main.ops:
        dtypes = {name: "float32" for name, value in op.attrs.items() if value in sources}
        retyper.emit(op, [retyper.value(value) for value in op.operands], dtypes)
    return retyper.function()


def _within_range(value: Attribute) -> Attribute:
    is_beyond = isinstance(value, float) and math.isfinite(value) and abs(value) > _NARROW_MAX
    return math.copysign(_NARROW_MAX, value) if is_beyond else value  # type: ignore[arg-type]


def _converted(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a tensor in a dtype; finite numbers stay finite."""
    import torch

    result = tensor.to(getattr(torch, dtype))
    if result is tensor or tensor.is_meta or not tensor.is_floating_point():
        return result
    limits = torch.finfo(result.dtype)
    is_beyond = result.isinf() & tensor.isfinite()
    return torch.where(is_beyond, result.clamp(limits.min, limits.max), result) if is_beyond.any() else result
