"""The interface of `Split.expand`: an op with a split factor, to be replaced by other ops on each device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from distir_relax.ir import Attribute, PerRank, Size, TensorType, Value
from distir_relax.layout import is_always


class Emitter(Protocol):
    """Interface for emitting ops in a `Split.expand`: see `Expansion`."""

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Add an op on all devices of the mesh; return its value, or the tuple of its values."""


class RememberingEmitter(Emitter, Protocol):
    """An `Emitter` that knows the ops of earlier expansions."""

    def earlier(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Return what an equal op of an earlier expansion gives. Raises `NotEarlier` if there is none."""


class NotEarlier(Exception):
    """No earlier expansion has an op."""


@dataclass(frozen=True)
class _Again:
    """Emits what an earlier expansion has."""

    emitter: RememberingEmitter

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        return self.emitter.earlier(name, *operands, **attrs)

    earlier = emit


@dataclass(frozen=True)
class Expansion:
    """An op whose factor is split along one or several mesh axes; `Split.expand` names the factor."""

    emitter: RememberingEmitter
    """Adds local ops."""
    operands: tuple[Value, ...]
    """The op's local operands."""
    attrs: Mapping[str, Any]
    """The op's attributes."""
    parts: tuple[tuple[str, tuple[Size, ...]], ...]
    """How the dim is split, axis by axis: the name of the axis, and the number of elements that each index along it
    holds of the parts of the preceding axes."""
    local_size: Size
    """The device's local size of the split dim, including padding to the largest shard."""
    types: tuple[TensorType, ...]
    """The global types of the operands."""
    result_types: tuple[TensorType, ...]
    """The global types of the results."""

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Add a local op."""
        return self.emitter.emit(name, *operands, **attrs)

    def again(self, build: Callable[[Self], tuple[Value, ...]]) -> tuple[Value, ...]:
        """Return what an earlier expansion has computed by the ops that `build` emits, or else emit them.

        The gradient of an op takes results of its forward so, which are kept until then.
        """
        try:
            return build(replace(self, emitter=_Again(self.emitter)))
        except NotEarlier:
            return build(self)

    def start(self, dtype: str) -> Value:
        """Return the position in the whole dim of a device's first element, a scalar of `dtype`."""
        starts = [self.emit("shard_start", axis=axis, sizes=sizes, dtype=dtype) for axis, sizes in self.parts]
        total: Value = starts[0]
        for start in starts[1:]:
            total = self.emit("add", total, start)
        return total

    def reduced(self, value: Value, op: str) -> Value:
        """Return a value reduced over all parts of the split dim: all devices have it."""
        for axis, sizes in self.parts:
            if len(sizes) > 1:
                value = self.emit("all_reduce", value, axis=axis, op=op)
        return value

    def local_rows(self, ids: Value, dtype: str) -> tuple[Value, Value]:
        """Return indices into the split dim, relative to the device's first element, and a mask of local ones."""
        row = self.emit("subtract", ids, self.start(dtype))
        zero = self.emit("constant", value=0, dtype=dtype)
        end = self.emit("constant", value=self.local_size, dtype=dtype)
        return row, self.emit("logical_and", self.emit("greater_equal", row, zero), self.emit("less", row, end))

    @staticmethod
    def shape(value: Value) -> tuple[Size, ...]:
        """Return the local shape of a value, per device where it differs."""
        return value.placed.shape

    def may_be_empty(self, value: Value, dim: int) -> bool:
        """Return whether some device has no elements of `value` along `dim`."""
        size = self.shape(value)[dim]
        sizes = size.values if isinstance(size, PerRank) else (size,)
        return any(is_always(0, "<", n) is not True for n in sizes)
