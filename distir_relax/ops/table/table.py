"""The op table: one entry per op with everything that passes need to know about it.

Nothing else in the project may switch on an op's name. `define` adds an entry, in the folder of its family; its
spellings in other vocabularies are next to it (`aten`, `relax`, `onnx`). A user's module may extend the table at any
time; results that are derived from all entries are then recomputed (`Table.derived`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from distir_relax.errors import UnsupportedOpError
from distir_relax.ops.table.entry import (
    NO_SPLIT,
    PLAIN_CODE,
    PLAIN_COST,
    Code,
    Cost,
    Gradient,
    OpDef,
    Semantics,
    Split,
    Trait,
)
from distir_relax.ops.table.incremental import IncrementalForm
from distir_relax.ops.table.kernel import AnyKernel
from distir_relax.ops.table.onnx_operands import OnnxOperands
from distir_relax.ops.table.quantized import QuantizedForm

AtenConverter = Callable[..., Any]
RelaxConverter = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
OnnxConverter = Callable[[Any, OnnxOperands, Mapping[str, Any]], Any]

_Converter = TypeVar("_Converter", bound=Callable[..., Any])
_Derived = TypeVar("_Derived")


class Table:
    """Entries by name, and the conversions from other vocabularies."""

    def __init__(self) -> None:
        self._ops: dict[str, OpDef] = {}
        self._aten: dict[str, AtenConverter] = {}
        self._relax: dict[str, RelaxConverter] = {}
        self._onnx: dict[str, OnnxConverter] = {}
        # Incremented by each change of the entries.
        self._revision = 0
        self._derived: dict[Callable[[Table], Any], tuple[int, Any]] = {}

    # Entries

    def define(
        self,
        name: str,
        semantics: Semantics,
        split: Split = NO_SPLIT,
        *,
        cost: Cost = PLAIN_COST,
        code: Code = PLAIN_CODE,
        gradient: Gradient | None = None,
        incremental: IncrementalForm | None = None,
        quantized: QuantizedForm | None = None,
        traits: Collection[Trait] = (),
        kernels: Sequence[AnyKernel] = (),
    ) -> OpDef:
        """Define an op: its result types and torch code, its factor rule, and further facets of `OpDef` if needed.

        For example, the outer product of two vectors, and its spelling in torch's exported programs::

            define_op(
                "outer",
                Semantics(
                    infer=lambda types, attrs: (TensorType((*types[0].shape, *types[1].shape), types[0].dtype),),
                    torch="torch.outer({0}, {1})",
                ),
                Split("m, n -> m n"),
            )

            @aten("outer.default")
            def outer(g, a, b):
                return g.emit("outer", a, b)

        The names are those of `distir_relax.ops` and `distir_relax.ir`. An op of programs that are sharded already,
        such as a collective, has no rule. Raises ValueError if the name is taken.
        """
        if name in self._ops:
            raise ValueError(f"op {name!r} is defined twice")
        facets = (semantics, split, cost, code, gradient, incremental, quantized)
        entry = OpDef(name, *facets, frozenset(traits), tuple(kernels))
        return self._enter(entry)

    def replace(self, entry: OpDef) -> OpDef:
        """Replace the entry of the same name. Raises `UnsupportedOpError` if there is none."""
        self.lookup(entry.name)
        return self._enter(entry)

    def _enter(self, entry: OpDef) -> OpDef:
        self._ops[entry.name] = entry
        self._revision += 1
        return entry

    def lookup(self, name: str, where: str = "") -> OpDef:
        """Return the entry of op `name`. Raises `UnsupportedOpError` with similar names."""
        entry = self._ops.get(name)
        if entry is not None:
            return entry
        near = difflib.get_close_matches(name, self._ops, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UnsupportedOpError(
            f"there is no op {name!r} in the op table",
            where,
            hint + "help(distir_relax.define_op) shows how to add an entry",
        )

    def entries(self) -> tuple[OpDef, ...]:
        """Return all entries, in the order of definition."""
        return tuple(self._ops.values())

    def derived(self, compute: Callable[[Table], _Derived]) -> _Derived:
        """Return `compute` of the table, cached until the entries change."""
        revision, result = self._derived.get(compute, (-1, None))
        if revision != self._revision:
            result = compute(self)
            self._derived[compute] = self._revision, result
        return cast(_Derived, result)

    @contextmanager
    def extended(self) -> Iterator[Table]:
        """Yield the table; on exit, undo all additions and replacements made since entry."""
        before = dict(self._ops), dict(self._aten), dict(self._relax), dict(self._onnx)
        try:
            yield self
        finally:
            self._ops, self._aten, self._relax, self._onnx = before
            self._revision += 1

    # Spellings

    def aten(self, *spellings: str) -> Callable[[_Converter], _Converter]:
        """Register the conversion of ATen ops to entries of the table.

        The decorated function takes the `Builder` and the ATen op's own arguments, tensors as values, and returns a
        value or a tuple of values: ``@aten("relu.default")``.
        """
        return _declare(self._aten, spellings, "aten.{}")

    def relax(self, *names: str) -> Callable[[_Converter], _Converter]:
        """Register the conversion of Relax ops that differ from their entry.

        The decorated function takes the `Builder`, the call's arguments (tensors as values, tuples as lists, shapes as
        tuples of numbers) and its attributes by name, and returns a value or a tuple of values:
        ``@relax("relax.take")``. A pointwise op of the same name and operands needs none.
        """
        return _declare(self._relax, names, "{}")

    def onnx(self, *op_types: str) -> Callable[[_Converter], _Converter]:
        """Register the conversion of ONNX ops to entries of the table.

        The decorated function takes the `Builder`, the node's `OnnxOperands` and its attributes by name (with
        ``opset``, the version of the operator set), and returns a value, a numpy array that is constant at import, or a
        tuple of those: ``@onnx("Gemm")``. An op of another domain than ONNX's own is named ``domain::Op``. Unsupported
        cases raise NotImplementedError with the reason.
        """
        return _declare(self._onnx, op_types, "the ONNX op {}")

    def lookup_aten(self, spelling: str) -> AtenConverter | None:
        """Return the conversion of an ATen op such as ``relu.default``, or None."""
        return self._aten.get(spelling)

    def lookup_relax(self, name: str) -> RelaxConverter | None:
        """Return the conversion of a Relax op such as ``relax.take``, or None if it has or needs none."""
        return self._relax.get(name)

    def lookup_onnx(self, op_type: str) -> OnnxConverter | None:
        """Return the conversion of an ONNX op such as ``Gemm`` or ``domain::Op``, or None."""
        return self._onnx.get(op_type)

    def aten_spellings(self) -> tuple[str, ...]:
        """Return all ATen ops that have a conversion."""
        return tuple(self._aten)

    def relax_spellings(self) -> tuple[str, ...]:
        """Return all Relax ops that have a conversion."""
        return tuple(self._relax)

    def onnx_spellings(self) -> tuple[str, ...]:
        """Return all ONNX ops that have a conversion."""
        return tuple(self._onnx)


def _declare(
    converters: dict[str, Callable[..., Any]], keys: tuple[str, ...], called: str
) -> Callable[[_Converter], _Converter]:
    """Return a decorator that registers a converter under each of `keys`; it raises ValueError for a duplicate."""

    def declare(convert: _Converter) -> _Converter:
        for key in keys:
            if key in converters:
                raise ValueError(f"{called.format(key)} is converted twice")
            converters[key] = convert
        return convert

    return declare


TABLE = Table()
"""The op table that all passes use."""

# Module-level shorthands for the methods of `TABLE`.
define, lookup, entries = TABLE.define, TABLE.lookup, TABLE.entries
aten, relax, onnx = TABLE.aten, TABLE.relax, TABLE.onnx
lookup_aten, lookup_relax, lookup_onnx = TABLE.lookup_aten, TABLE.lookup_relax, TABLE.lookup_onnx
aten_spellings, relax_spellings, onnx_spellings = TABLE.aten_spellings, TABLE.relax_spellings, TABLE.onnx_spellings
