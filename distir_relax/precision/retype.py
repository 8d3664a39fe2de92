"""Construction of a program with other dtypes, in which values keep their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distir_relax.ir import Attribute, Function, Op, TensorType, Value, live_ops
from distir_relax.ops import Builder, infer


class Retyper:
    """Copies a function op by op, with values of other dtypes.

    `values` maps names to the new values of those that differ; inputs that differ are entered by `replace_input`.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._builder = Builder.of(function)
        self._builder.ops = []
        self._casts: dict[tuple[str, str], Value] = {}
        self.values: dict[str, Value] = {}

    def replace_input(self, value: Value, dtype: str) -> None:
        """Give an input of the function another dtype."""
        self.values[value.name] = new = Value(value.name, TensorType(value.tensor.shape, dtype))
        inputs = self._builder.inputs
        self._builder.inputs = [replace(item, value=new) if item.value == value else item for item in inputs]

    def value(self, value: Value) -> Value:
        """Return the new value of an old one."""
        return self.values.get(value.name, value)

    def cast(self, value: Value, dtype: str) -> Value:
        """Return a new value in a dtype; the cast is emitted once."""
        if value.tensor.dtype == dtype:
            return value
        key = value.name, dtype
        if key not in self._casts:
            self._builder.hint = f"{value.name}.{dtype}"
            self._casts[key] = self._builder.emit("astype", value, dtype=dtype)
            self._builder.hint = ""
        return self._casts[key]

    def copy(self, op: Op) -> None:
        """Emit an op whose results keep their types."""
        self._builder.ops.append(replace(op, operands=tuple(map(self.value, op.operands))))

    def emit(
        self,
        op: Op,
        operands: Sequence[Value],
        attrs: Mapping[str, Attribute] | None = None,
        dtypes: Sequence[str] = (),
    ) -> None:
        """Emit an op on new operands; its results are cast to `dtypes`, if given.

        Raises `VerificationError` if the op does not take these operands.
        """
        attrs = {**op.attrs, **(attrs or {})}
        self._builder.location = op.location
        kinds = infer(op.name, [operand.tensor for operand in operands], attrs, op.location)
        results, casts = [], []
        for old, kind, dtype in zip(op.results, kinds, dtypes or [k.dtype for k in kinds], strict=True):
            new = Value(old.name, replace(kind, dtype=dtype))
            self.values[old.name] = new
            if kind.dtype != dtype:
                computed = Value(self._builder.fresh(f"{old.name}.{kind.dtype}"), kind)
                casts.append(Op("astype", (computed,), (new,), {"dtype": dtype}, op.location))
                new = computed
            results.append(new)
        self._builder.ops += [replace(op, operands=tuple(operands), results=tuple(results), attrs=attrs), *casts]

    def function(self, outputs: Sequence[str] = ()) -> Function:
        """Return the new function, with its outputs cast to dtypes, if given."""
        self._builder.location = ""
        values = [self.value(output.value) for output in self._function.outputs]
        dtypes = outputs or [value.tensor.dtype for value in values]
        cast = [self.cast(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]
        new = replace(
            self._function,
            inputs=tuple(self._builder.inputs),
            ops=tuple(self._builder.ops),
            outputs=tuple(replace(o, value=value) for o, value in zip(self._function.outputs, cast, strict=True)),
        )
        return replace(new, ops=live_ops(new))
