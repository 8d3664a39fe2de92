"""Builder of global-stage programs; result types come from the op table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from distir_relax.errors import DistIRError, VerificationError
from distir_relax.ir import PLACEMENTS, Attribute, Function, Input, Op, Output, TensorType, Value, value_names
from distir_relax.layout import DTYPES, is_always, is_symbolic, locate_guards
from distir_relax.layout.placement import parse_placements
from distir_relax.ops.table.table import lookup, lookup_aten
from distir_relax.support import MOST, shown

_NOT_OF_A_NAME = re.compile(r"[^\w.]")


class Builder:
    """Builds one function of the global stage.

    Set `location` before emitting, to record the place in the user's model that the next ops come from.
    """

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.ops: list[Op] = []
        self.location = ""
        self.hint = ""
        # Whether the program is for training: dropout and its like are then random.
        self.training = False
        # The dtype of floats to which the model gives none.
        self.default_dtype = "float32"
        # Whether a slice of a symbolic dim is guarded to be as for its typical size, as torch.export does.
        self.guards_slices = False
        # The seed of the last random op, from which the next one derives its own.
        self.seed: Value | None = None
        # Data of parameters and constants by value name.
        self.tensors: dict[str, Any] = {}
        # Of these, the ones that never change, as the frontend guarantees: a conversion may rely on their values.
        self.constants: dict[str, Any] = {}
        self._arrays: list[tuple[Value, Any]] = []
        self._names: set[str] = set()
        self._counts: dict[str, int] = {}

    @classmethod
    def of(cls, function: Function) -> Builder:
        """Return a builder that continues a function."""
        builder = cls()
        builder.inputs, builder.ops = list(function.inputs), list(function.ops)
        builder._names = value_names(function)
        return builder

    def input(self, name: str, kind: TensorType, role: str = "input", location: str = "") -> Value:
        """Declare an input of the function."""
        value = Value(self.fresh(name), kind)
        self.inputs.append(Input(value, role, location))
        return value

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Add an op and return its value, or the tuple of its values if it has several results.

        Placements may be text. Raises `VerificationError` if the operands do not fit the op, `UnsupportedOpError` if
        there is no such op.
        """
        if isinstance(text := attrs.get(PLACEMENTS), str):
            attrs[PLACEMENTS] = parse_placements(text)
        types = infer(name, [v.tensor for v in operands], attrs, self.location)
        hint = self.hint or name.rsplit(".", 1)[-1]
        results = tuple(Value(self.fresh(hint), kind) for kind in types)
        self.ops.append(Op(name, operands, results, attrs, self.location))
        return results[0] if len(results) == 1 else results

    def again(self, op: Op, *operands: Value) -> Value:
        """Emit a copy of an existing op of one result on other operands of the same types."""
        result = Value(self.fresh(self.hint or op.name.rsplit(".", 1)[-1]), op.results[0].type)
        self.ops.append(Op(op.name, operands, (result,), op.attrs, self.location))
        return result

    def aten(self, spelling: str, *args: Any, **kwargs: Any) -> Any:
        """Emit an ATen op by its conversion: ``g.aten("relu.default", x)``. Return its results."""
        convert = lookup_aten(spelling)
        assert convert is not None, spelling
        return convert(self, *args, **kwargs)

    def constant(self, value: float | int | bool, dtype: str) -> Value:
        """Add a scalar constant, which may be a symbolic size."""
        number = value
        if not is_symbolic(value):
            number = (
                bool(value) if dtype == "bool" else float(value) if "float" in dtype else _wrapped(int(value), dtype)
            )
        hint, self.hint = self.hint, ""
        result: Value = self.emit("constant", value=number, dtype=dtype)
        self.hint = hint
        return result

    def array(self, data: Any, hint: str) -> Value:
        """Add a constant with the data of a torch tensor. Equal constants are deduplicated."""
        kind = TensorType(tuple(data.shape), str(data.dtype).removeprefix("torch."))
        for value, other in self._arrays:
            if value.type == kind and bool((other == data).all()):
                return value
        value = self.input(hint, kind, "constant", self.location)
        self.tensors[value.name] = self.constants[value.name] = data
        self._arrays.append((value, data))
        return value

    def function(self, name: str, outputs: Sequence[Output | tuple[str, Value]]) -> Function:
        """Return the function built so far, with these outputs; those without a role are names and values."""
        found = (item if isinstance(item, Output) else Output(*item) for item in outputs)
        return Function(name, tuple(self.inputs), tuple(self.ops), tuple(found))

    def reserve(self, names: Iterable[str]) -> None:
        """Reserve names: no value is given one of them."""
        self._names.update(names)

    def fresh(self, hint: str) -> str:
        """Return an unused value name made from `hint`."""
        name = _NOT_OF_A_NAME.sub("_", hint) or "v"
        # An unrolled loop requests one name thousands of times, so counting resumes from the last number.
        count = self._counts.get(name, 0)
        while (candidate := f"{name}_{count}" if count else name) in self._names:
            count += 1
        self._counts[name] = count
        self._names.add(candidate)
        return candidate


def _wrapped(value: int, dtype: str) -> int:
    """Return an integer wrapped to the bits of a dtype that cannot hold it, as torch does."""
    bits = 8 * DTYPES[dtype][1]
    least = 0 if dtype == "uint8" else -(1 << (bits - 1))
    return (value - least) % (1 << bits) + least


def infer(name: str, types: Sequence[TensorType], attrs: Any, location: str = "") -> tuple[TensorType, ...]:
    """Return the result types of op `name`; raise `VerificationError` if operands or attributes do not fit it."""
    semantics = lookup(name, location).semantics
    locate_guards(location)
    for attribute, meaning in semantics.attributes.items():
        if attribute not in attrs:
            raise VerificationError(
                f"{name} needs the attribute {attribute}: {meaning}", location, f"distir rules {name} lists all of them"
            )
    try:
        results = semantics.infer(types, attrs)
    except DistIRError:
        raise
    # The only place where an entry meets unchecked operands and attributes of a user or a file.
    except Exception as error:
        raise operand_error(name, types, attrs, f"{type(error).__name__}: {error}", location) from None
    for kind in results:
        is_shape = isinstance(kind.shape, tuple) and all(map(_is_size, kind.shape))
        if kind.dtype not in DTYPES or not is_shape:
            raise operand_error(name, types, attrs, f"it would give {kind.dtype} {shown(kind.shape)}", location)
        if is_always(kind.bytes, "<=", MOST) is False:
            raise operand_error(name, types, attrs, f"no machine holds {kind}", location)
    return results


def _is_size(size: object) -> bool:
    return (type(size) is int or is_symbolic(size)) and size >= 0  # type: ignore[operator]


def operand_error(name: str, types: Sequence[TensorType], attrs: Any, reason: str, location: str) -> VerificationError:
    """Return the error for operands and attributes that op `name` does not accept."""
    operands = ", ".join(map(str, types))
    reason = reason.removeprefix("ValueError: ")
    return VerificationError(f"{name} cannot take ({operands}) with {shown(dict(attrs))}: {reason}", location)
