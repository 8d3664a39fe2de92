"""Op expressions: one text that is both the reference semantics of an op and its backend code."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.ir import PACKED, Attribute, Op, PlacedType, TensorType, Value
from distir_relax.layout import is_always, is_symbolic
from distir_relax.ops.table.builder import infer
from distir_relax.ops.table.entry import Trait
from distir_relax.ops.table.kernel import (
    AnyKernel,
    Appending,
    Expression,
    ForRequests,
    InPlace,
    Kernel,
    Overwriting,
    Packed,
    Types,
)
from distir_relax.ops.table.table import lookup
from distir_relax.support import shown

if TYPE_CHECKING:
    import torch


def torch_expression(op: Op, operands: Sequence[str]) -> str:
    """Return the torch code of `op` applied to the given operand expressions."""
    entry = lookup(op.name, op.location)
    if not (empty := _emptiness(op)):
        return _fill(entry.semantics.torch, op.attrs, operands, op.location)
    (result,) = infer(op.name, [v.tensor for v in op.operands], op.attrs, op.location)
    kind = "" if result.dtype == op.operands[0].tensor.dtype else f", dtype=torch.{result.dtype}"
    zeros = f"{operands[0]}.new_zeros({_literal(result.shape)}{kind})"
    if empty == "True":
        return zeros
    return f"({zeros} if {empty} else {_fill(entry.semantics.torch, op.attrs, operands, op.location)})"


def select_kernel(op: Op) -> AnyKernel | None:
    """Return the kernel that runs an op of the executable stage; None for its reference expression."""
    return next((kernel for kernel in lookup(op.name, op.location).kernels if kernel.runs(op)), None)


def torch_kernel(op: Op, operands: Sequence[str]) -> str:
    """Return the torch code of an op of the executable stage, for the kernel that it names (`ir.EXECUTION`)."""
    name, into = op.attrs.get("by"), op.attrs.get("into")
    kernel = next((kernel for kernel in lookup(op.name, op.location).kernels if kernel.name == name), None)
    plain = replace(op, attrs=op.own_attrs) if op.execution else op
    match kernel:
        case None:
            return torch_expression(plain, operands)
        case Packed():
            packed, others = kernel.weights(op), [*operands]
            del others[packed.start : packed.stop]
            return f"{operands[packed.start]}({', '.join(others)})"
        case Overwriting():
            assert isinstance(into, int)
            form = _template(kernel.torch, plain.attrs).replace("{out}", operands[into])
            return _fill(form, plain.attrs, operands, op.location)
        case Appending():
            axis = op.attrs["axis"]
            assert isinstance(axis, int)
            attrs = {**plain.attrs, "length": op.operands[0].tensor.shape[axis]}
            return _fill(kernel.torch, attrs, operands, op.location)
        case _:
            return _fill(kernel.torch, plain.attrs, operands, op.location)


def torch_packing(op: Op, weights: Sequence[str]) -> str:
    """Return the torch code of an op ``pack``: that of the op whose weights it packs (`Packed`)."""
    name, rows, dtype = (op.attrs[key] for key in ("of", "rows", "dtype"))
    form = _packing(str(name), [v.tensor for v in op.operands], op.location)
    return form.format("", *weights, weights=", ".join(weights), rows=rows, dtype=dtype)


def packing_of(op: Op, names: Sequence[str]) -> Op:
    """Return the op ``pack`` of the weights of a local op (`Packed`), whose results have these `names`."""
    weights = tuple(op.operands[number] for number in packed_operands(op))
    result = op.results[0].local.typical
    rows = result.elements // result.shape[-1] if result.elements else 0
    attrs: dict[str, Attribute] = {"of": op.name, "rows": rows, "dtype": result.dtype}
    return Op("pack", weights, tuple(map(_packed, names, weights)), attrs, op.location)


def _packed(name: str, weight: Value) -> Value:
    kind = weight.type
    assert isinstance(kind, (TensorType, PlacedType))
    return Value(name, replace(kind, form=PACKED))


def packed_operands(op: Op) -> range:
    """Return the operands that the packed form of an op (`Packed`) has, by number; none if it has no such form."""
    kernel = lookup(op.name, op.location).kernel(Packed)
    return range(0) if kernel is None else kernel.weights(op)


def is_packable(op: Op) -> bool:
    """Return whether an op has a form with packed weights, if those are constant."""
    return bool(_packing(op.name, [op.operands[number].local for number in packed_operands(op)], op.location))


def _packing(name: str, weights: Types, location: str) -> str:
    kernel = lookup(name, location).kernel(Packed)
    return "" if kernel is None else kernel.packing(weights)


def growing_states(op: Op) -> tuple[int, ...]:
    """Return the operands of an op that are growing states, which it extends, by number (`ForRequests`)."""
    kernel = None if op.callee else lookup(op.name, op.location).kernel(ForRequests)
    return () if kernel is None else kernel.states


def torch_for_requests(op: Op, operands: Sequence[str]) -> str:
    """Return the torch code of `op`, which has the kernel `ForRequests`, for all requests of a step."""
    kernel = lookup(op.name, op.location).kernel(ForRequests)
    assert kernel is not None
    states = [op.operands[number].name for number in kernel.states]
    views: Any = op.attrs["views"]
    caches = tuple((state, *view) for state, view in zip(states, views, strict=True))
    return _fill(kernel.torch, {**op.attrs, "caches": caches}, operands, op.location)


def is_zero(op: Op) -> bool:
    """Return whether the result of a local op is zero since an operand is empty, or is empty itself."""
    return _emptiness(op) == "True"


def _emptiness(op: Op) -> str:
    """Return the condition, over sizes, that the result is zero (`is_zero`): ``True``, or "" if it never is."""
    if Trait.ZERO_IF_EMPTY not in lookup(op.name, op.location).traits:
        return ""
    types = [v.tensor for v in op.operands]
    elements = {t.elements for t in (*types, *infer(op.name, types, op.attrs, op.location))}
    if 0 in elements:
        return "True"
    return " or ".join(sorted(f"{n} == 0" for n in elements if is_symbolic(n) and is_always(0, "<", n) is not True))


def relax_expression(op: Op, operands: Sequence[str]) -> str:
    """Return the Relax code of `op`, with the namespace of Relax ops as `R`."""
    entry = lookup(op.name, op.location)
    if entry.code.relax:
        return _fill(entry.code.relax, op.attrs, operands, op.location)
    arguments = [*operands, *(f"{key}={_literal(value)}" for key, value in op.attrs.items())]
    return f"R.{op.name}({', '.join(arguments)})"


def operand_count(name: str, attrs: Mapping[str, Any]) -> int | None:
    """Return the number of operands of op `name` by its torch expression; None if it is variadic."""
    template = _template(lookup(name).semantics.torch, attrs)
    if "{*}" in template:
        return None
    return 1 + max(map(int, _PLACE.findall(template)), default=-1)


def check_expression(name: str, attrs: Mapping[str, Any], operands: int) -> None:
    """Raise ValueError, KeyError or an error of the entry unless op `name` has an expression for these attributes."""
    entry = lookup(name)
    # A rank's program also sets the schedule step and the distance to another rank.
    _fill(entry.semantics.torch, {"step": 0, "distance": 0, **attrs}, ["x"] * operands)
    for kernel in entry.kernels:
        if isinstance(kernel, InPlace):
            _fill(kernel.torch, {"step": 0, "distance": 0, **attrs}, ["x"] * operands)
        elif isinstance(kernel, Kernel):
            _template(kernel.torch, attrs)


def torch_scope() -> dict[str, Any]:
    """Return what the names in torch expressions stand for, besides operands and the communicator."""
    import torch
    import torch.nn.functional as F

    from distir_relax.kernels import (
        attention,
        attention_gradients,
        attention_parts,
        convolutions,
        elementwise,
        indices,
        norms,
        positions,
        products,
        quantized,
        random,
        recurrent,
        resample,
        routing,
        scans,
        sequence,
        sums,
        tvm_extern,
        updates,
    )

    return {
        **{"torch": torch, "F": F, "attention": attention, "attention_gradients": attention_gradients},
        **{"attention_parts": attention_parts, "convolutions": convolutions},
        **{"elementwise": elementwise, "indices": indices, "norms": norms, "positions": positions},
        **{"products": products, "quantized": quantized, "random": random, "recurrent": recurrent},
        **{"resample": resample, "routing": routing, "scans": scans, "sequence": sequence, "tvm_extern": tvm_extern},
        **{"sums": sums, "updates": updates},
    }


def evaluate(op: Op, operands: Sequence[torch.Tensor], comm: Any = None) -> tuple[torch.Tensor, ...]:
    """Run `op` on tensors by its reference semantics. An op of the communicator runs on `comm`, a rank's own.

    Without one, results without operands are on the CPU.

    Raises `RunError` with the op's location if torch rejects the operands.
    """
    names = [f"a{i}" for i in range(len(operands))]
    scope = {**torch_scope(), "comm": comm or _ON_CPU, **dict(zip(names, operands, strict=True))}
    try:
        result = eval(_compiled(torch_expression(op, names)), scope)
    except _EXPRESSION_ERRORS as error:
        kinds = ", ".join(f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.") for x in operands)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(f"{op.name} cannot run on ({kinds}): {reason}", op.location) from error
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


_ON_CPU = SimpleNamespace(device="cpu")
_EXPRESSION_ERRORS = (
    *(RuntimeError, ValueError, IndexError, TypeError, ArithmeticError, MemoryError),
    *(KeyError, AttributeError, NameError, SyntaxError),
)
"""The errors of torch for invalid operands and attributes, and of Python for invalid expressions."""


@lru_cache(maxsize=65536)
def _compiled(text: str) -> CodeType:
    return compile(text, text, "eval")


_PLACE = re.compile(r"\{(\d+)\}")
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLAIN = re.compile(r"[\w .,;:+\-<>|/=*\[\]]*")


class _Attribute:
    """An attribute in a template: ``{shape}`` formats as a literal, ``{dtype!s}`` as bare text."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __str__(self) -> str:
        if not _WORD.fullmatch(str(self.value)):
            raise ValueError(f"expected a word such as float32, found {shown(self.value)}")
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return _literal(self.value)


def _fill(template: Expression, attrs: Mapping[str, Any], operands: Sequence[str], location: str = "") -> str:
    text = _template(template, attrs)
    if "{*}" in text:
        text = text.replace("{*}", ", ".join(operands))
    named = {"location": location, **attrs}
    return text.format(*operands, **{key: _Attribute(value) for key, value in named.items()})


def _template(template: Expression, attrs: Mapping[str, Any]) -> str:
    if isinstance(template, str):
        return template
    # Such a function may insert an attribute as bare text, so reject text that could be code.
    for key, value in attrs.items():
        _check_plain(key, value)
    return template(attrs)


def _check_plain(key: str, value: object) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check_plain(key, item)
    elif isinstance(value, str) and not _PLAIN.fullmatch(value):
        raise ValueError(f"the attribute {key} may not be {shown(value)}")


def _literal(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return repr(value)
