"""Weights of 8 or 4 bits in place of a model's: its program, and its data.

A weight is quantized if it is the matrix of products, and perhaps a table of embeddings as well, and nothing else:

    %w: f32[n, k]                      %w.values: i8[n, k], %w.scales: f32[n, 1]
    %y = linear(%x, %w)           =>   %y = quantized_linear(%x, %w.values, %w.scales)
    %e = take(%w, %ids) {axis=0}       %e = dequantize(take(%w.values, %ids), take(%w.scales, %ids))

Of a product ``matmul(%x, %w)`` the transposed weight is quantized, whose rows are outputs as well. An op that
transposes a weight disappears. A stack of weights, those of experts, is quantized weight by weight: its tensors have
another leading dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from distir_relax.errors import DistIRError
from distir_relax.frontends.imported_model import Imported, match_parameters
from distir_relax.ir import Function, TensorType, Value
from distir_relax.kernels.quantized import GROUP, quantize_int4, quantize_int8, quantize_int8_groups
from distir_relax.layout import assuming
from distir_relax.ops import Builder, QuantizedForm, lookup
from distir_relax.precision.quantized_tensors import Quantize, group_tensors, quantized_tensors, stored_groups

_PARTS = ("values", "scales", "minimums")
_Kinds: TypeAlias = "Callable[[int, int], Sequence[TensorType]]"


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights: its bits, the function that quantizes, and the types of the tensors of a weight (n, k).

    With `is_grouped` it is that of files with groups of so many bits.
    """

    bits: int
    quantize: Quantize
    kinds: _Kinds
    is_grouped: bool = True


def _eight_bits(n: int, k: int) -> Sequence[TensorType]:
    return TensorType((n, k), "int8"), TensorType((n, 1), "float32")


def _eight_bits_in_groups(n: int, k: int) -> Sequence[TensorType]:
    return TensorType((n, k // GROUP, GROUP), "int8"), TensorType((n, k // GROUP, 1), "float16")


def _four_bits(n: int, k: int) -> Sequence[TensorType]:
    numbers = TensorType((n, k // GROUP, 1), "float16")
    return TensorType((n, k // GROUP, GROUP // 2), "uint8"), numbers, numbers


WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "int8": WeightFormat(8, quantize_int8_groups, _eight_bits_in_groups),
        "int8-channel": WeightFormat(8, quantize_int8, _eight_bits, is_grouped=False),
        "int4": WeightFormat(4, quantize_int4, _four_bits),
    }
)
"""The formats of quantized weights by name: 8 and 4 bits in groups of 32, and 8 bits with a scale for each output."""
_FORMAT_OF_TABLES = WEIGHT_FORMATS["int8"]
"""Instead of 4 bits: an error of a table of embeddings stays in all that follows, and reaches the logits again."""


def quantize_weights(imported: Imported, precision: str, keep: Sequence[str] = (), name: str = "") -> Imported:
    """Return the model `name` with the weights of its products in the format `precision`, of `WEIGHT_FORMATS`.

    A table of embeddings that is also the matrix of a product has 8 bits, with "int4" too. A weight that its file has
    in groups of as many bits is taken as it is there. Others stay in floating point whose names, those of the model,
    match a pattern of `keep` (`fnmatch`), whose inner size is no multiple of 32, and that other ops than products and
    look-ups use.

    Raises `DistIRError` for a pattern that no parameter matches, for a model of which no weight can be quantized, and
    for a weight without numbers of that format; for one that is read later, when it is.
    """
    chosen = WEIGHT_FORMATS[precision]
    main = imported.module.main
    kept = match_parameters(imported, keep, "keep", name)
    uses = {
        item.value.name: found
        for item in main.inputs
        if item.role == "parameter" and item.value.name not in kept and (found := _uses(main, item.value))
    }
    weights = {weight: found.is_transposed for weight, found in uses.items()}
    if not weights:
        raise DistIRError(
            f"no weight of the model can be stored as {precision}",
            name,
            f"weights of products can whose inner size is a multiple of {GROUP}, unless `keep` has their names",
        )
    formats = {
        weight: _FORMAT_OF_TABLES if found.is_table and chosen.bits < _FORMAT_OF_TABLES.bits else chosen
        for weight, found in uses.items()
    }
    with assuming(imported.module.guards):
        quantizer = _Quantizer(main, weights, {weight: of.kinds for weight, of in formats.items()})
    tensors = dict(imported.tensors)
    names = {value: label for label, value in imported.names.items()}
    for weight, parts in quantizer.parts.items():
        data, kinds, of = tensors.pop(weight), [part.tensor for part in parts], formats[weight]
        groups = stored_groups(data) if of.is_grouped and not weights[weight] else None
        if groups is not None and groups.bits == of.bits:
            made = group_tensors(names[weight], groups, kinds)
        else:
            made = quantized_tensors(names[weight], data, weights[weight], of.quantize, kinds)
        tensors |= {part.name: tensor for part, tensor in zip(parts, made, strict=True)}
    module = replace(imported.module, functions=(quantizer.function(),))
    return replace(imported, module=module, tensors=tensors, names=quantizer.visible(imported.names))


@dataclass(frozen=True)
class _Uses:
    """How ops use a weight: whether as the matrix (k, n) of products, or a stack of these, and whether as a table."""

    is_transposed: bool
    is_table: bool


def _uses(main: Function, weight: Value) -> _Uses | None:
    """Return how ops use a weight; None if it cannot be quantized."""
    shape = weight.tensor.shape
    if len(shape) not in (2, 3) or "float" not in weight.tensor.dtype:
        return None
    found = _forms(main, weight, False)
    if found is None or not any(form.is_product for form, _ in found):
        return None
    ways = {form.is_transposed != is_swapped for form, is_swapped in found}
    inner = shape[-2] if ways == {True} else shape[-1]
    can_be_cut = isinstance(inner, int) and inner > 0 and inner % GROUP == 0
    is_table = any(not form.is_product for form, _ in found)
    return _Uses(ways.pop(), is_table) if len(ways) == 1 and can_be_cut else None


def _forms(main: Function, weight: Value, is_swapped: bool) -> list[tuple[QuantizedForm, bool]] | None:
    """Return the forms of the ops that use a weight, and whether those use the transposed one; None without a form."""
    if any(output.value == weight for output in main.outputs):
        return None
    forms: list[tuple[QuantizedForm, bool]] = []
    for op in main.ops:
        places = [number for number, value in enumerate(op.operands) if value == weight]
        if not places:
            continue
        form = None if op.callee else lookup(op.name, op.location).quantized
        if form is None or places != [form.operand] or not form.applies(op):
            return None
        found = [(form, is_swapped)] if form.emit else _forms(main, op.results[0], not is_swapped)
        if found is None:
            return None
        forms += found
    return forms


class _Quantizer:
    """Builds the program with the quantized `weights`, by name; each tells whether it is transposed.

    `kinds` give the types of the tensors of each.
    """

    def __init__(self, main: Function, weights: Mapping[str, bool], kinds: Mapping[str, _Kinds]) -> None:
        self._main = main
        self._builder = Builder.of(replace(main, ops=()))
        self._builder.inputs = []
        self.parts: dict[str, tuple[Value, ...]] = {}
        """The tensors of each weight."""
        for item in main.inputs:
            name, shape = item.value.name, item.value.tensor.shape
            if name not in weights:
                self._builder.inputs.append(item)
                continue
            *stack, n, k = (*shape[:-2], shape[-1], shape[-2]) if weights[name] else shape
            self.parts[name] = tuple(
                self._builder.input(
                    f"{name}.{part}", TensorType((*stack, *kind.shape), kind.dtype), item.role, item.location
                )
                for part, kind in zip(_PARTS, kinds[name](n, k), strict=False)
            )

    def function(self) -> Function:
        """Return the program."""
        for op in self._main.ops:
            weights = [value.name for value in op.operands if value.name in self.parts]
            if not weights:
                self._builder.ops.append(op)
                continue
            form = lookup(op.name, op.location).quantized
            assert form is not None, op.name
            if form.emit is None:
                self.parts[op.results[0].name] = self.parts[weights[0]]
                continue
            self._builder.location = op.location
            result = form.emit(self._builder, op, self.parts[weights[0]])
            # Under the name that the model's own result has.
            *before, last = self._builder.ops
            assert last.results == (result,), "the result is that of the last op"
            self._builder.ops = [*before, replace(last, results=op.results)]
        return replace(self._main, inputs=tuple(self._builder.inputs), ops=tuple(self._builder.ops))

    def visible(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the names of inputs and parameters that users see, with those of the tensors of weights."""
        found: dict[str, str] = {}
        for name, value in names.items():
            parts = self.parts.get(value)
            found |= (
                {name: value} if parts is None else {f"{name}.{p}": v.name for p, v in zip(_PARTS, parts, strict=False)}
            )
        return found
