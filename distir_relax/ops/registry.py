"""The op table: one entry per op holds all that any pass needs to know about it.

Nothing else in the project may switch on an op's name. An entry is made by `define`, in the file of its family;
the spellings of other vocabularies stand beside it (`aten`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from distir_relax.errors import UnsupportedOpError
from distir_relax.ir import Attribute, PerRank, PlacedType, Size, TensorType, Value
from distir_relax.ops.onnx_operands import OnnxOperands
from distir_relax.ops.rule import Rule, parse_rule

Types = Sequence[TensorType]
Attrs = Mapping[str, Any]
Infer = Callable[[Types, Attrs], tuple[TensorType, ...]]
RuleOf = Callable[[Types, Attrs, Types], Rule]
Localize = Callable[[Attrs, Types, Types], dict[str, Attribute]]
Expand = Callable[["Expansion"], "tuple[Value, ...]"]
Expression = str | Callable[[Attrs], str]
Together = Callable[[Sequence[Any], Attrs], list[Any]]
Work = Callable[[Types, Attrs, Types], float]
Windowed = Callable[[Attrs, Mapping[int, tuple[int, ...]]], dict[str, Attribute]]
Mixed = Callable[[Sequence[Any], Attrs], "tuple[Any, ...] | None"]
Product = Callable[[Types, Attrs, Types], "tuple[int, int, int, int]"]


@dataclass(frozen=True)
class Cost:
    """What running an op takes, as far as it depends on the op alone; a device profile makes seconds of it.

    `moved` is the bytes read and written, by default those of all operands and results.
    `product` is (batch, rows, columns, inner) of an op that is a matrix product: devices are slower on small ones.
    `seconds`, where given, is the op's time itself, whatever the device.
    `workspace` is the bytes that the op needs while it runs.
    `view` marks ops whose result shares the storage of operand 0, so that they move nothing and take no memory.
    `in_place` is the torch expression of ops whose result takes over the storage of operand 0, which nothing may use
    afterwards; it writes there and gives it back.
    `gradient` is the operand, if any, that is the gradient of a weight: memory reports tell it from activations.
    `collective` is what a communication is to the network: ``all_reduce``, ``all_gather``, ``reduce_scatter``,
    ``all_to_all`` or ``send``.
    `pieces` tells, for an ``all_to_all``, how the device at a place along the axis divides what it holds among all: a
    number for each, in any unit. By default equally.
    """

    moved: Work | None = None
    product: Product | None = None
    seconds: Work | None = None
    workspace: Work | None = None
    view: bool = False
    in_place: Expression = ""
    gradient: int | None = None
    collective: str = ""
    pieces: Callable[[Attrs, int], Sequence[int]] | None = None

    @property
    def shares(self) -> bool:
        """Whether the result lies in the storage of operand 0."""
        return self.view or bool(self.in_place)


@dataclass(frozen=True)
class Packed:
    """A form of an op for weights that never change.

    `weights` are the operands that must be such; `prepare` is the expression over them, run once; `apply` the expression over ``{0}``, … and ``{packed}``.
    Both see `pack_linear` of `distir_relax.runtime.packing`, and ``{rows}``, the rows of the op's result.
    """

    weights: tuple[int, ...]
    prepare: str
    apply: str


@dataclass(frozen=True)
class OpDef:
    """One op.

    `infer` gives the result types from the operand types and attributes; it raises ValueError on a misuse.
    `rule` is the factor rule, as text or computed from types.
    `torch` is a Python expression over ``{0}``, ``{1}``, … (operands) and ``{attr}`` (attributes as literals;
    ``{attr!s}`` as bare text), evaluated with `torch`, `F` and `resample` (`distir_relax.runtime.resample`) in scope: both the reference semantics and the code of
    the torch backend. An op of several results gives a tuple. It may depend on the attributes: then it is a function.
    `relax` is the same, with `R` (the Relax ops) and `resample` in scope and tuples as results; by default the op of the same name
    called with the operands and the attributes as keywords.
    `linear` lists the sets of operands in which the op is linear jointly, the others held fixed: ``({0}, {1})`` for
    matmul, ``({0, 1},)`` for add; ``ALL`` is all operands jointly; a function of the attributes where they decide. It
    says where a pending sum may pass.
    `localize` gives the attributes of a shard from its local operand and result types.
    `expand` gives, for a factor whose split needs more than the op itself, the ops that the devices run instead.
    `positional` are the factors of which a device must hold one block, because the op tells elements by position.
    `indices` are the operands that say which elements are read or written: what fills their short shards must be valid.
    `numbers` are the operands for which the torch expression takes a Python number as well as a tensor.
    `pattern` says which ops a fused op stands for: ``add(linear(0, 1), 2)``, numbers without a point being operands;
    a rank's program is written with the fused op. `commutative` lets a pattern match both ways round.
    `packed` is how the torch backend may lay out a weight once, when the program is loaded.
    `flops` counts floating-point operations; by default one per element of the result. `cost` is what else decides
    how long the op takes and what memory it needs.
    `mixed` gives the results where only some operands are known numbers: it takes a tensor for each of those and a
    `TensorType` for each other, and gives such a row, or None where it needs to know more. An op that has it may have
    results whose types only numbers decide.
    `role` tells the few ops that passes treat apart: ``annotation`` and ``redistribution`` (layouts, the tensor stays
    the same), ``scalar`` (a number), ``transfer`` (from each device of the operand's set to the device at the same
    place in the result's), ``call`` (runs a function), ``wait`` (joins a stream), ``shape`` (computes with
    shapes); the last three are for distributed programs only. All others are ``compute``.
    `trivial` marks ops that do nothing where they have one operand and leave its type as it is.
    `windowed` gives the attributes of an op with windows whose operands hold just what a device's part of the result
    needs, from what `Window.part` says of each, by the index of the window.
    `zero_if_empty` marks ops whose result is zero where an operand has no elements, and whose implementations may
    refuse that.
    `together` is the reference semantics of an op of the communicator: from the operand of each device along the axis
    (none for an op without operands), and the attributes, the result on each.
    `on_communicator` marks ops that a rank's communicator performs; those marked `communicates` need other devices.
    """

    name: str
    infer: Infer
    rule: str | RuleOf
    torch: Expression
    relax: Expression = ""
    linear: tuple[frozenset[int], ...] | str | Callable[[Attrs], tuple[frozenset[int], ...]] = ()
    localize: Localize | None = None
    expand: Mapping[str, Expand] = field(default_factory=dict)
    positional: frozenset[str] = frozenset()
    indices: Container[int] = ()
    flops: Work | None = None
    cost: Cost = Cost()
    mixed: Mixed | None = None
    numbers: frozenset[int] = frozenset()
    pattern: str = ""
    commutative: bool = False
    packed: Packed | None = None
    role: str = "compute"
    on_communicator: bool = False
    together: Together | None = None
    communicates: bool = False
    pointwise: bool = False
    trivial: bool = False
    windowed: Windowed | None = None
    zero_if_empty: bool = False

    def rule_for(self, operands: Types, attrs: Attrs, results: Types) -> Rule:
        """The factor rule of an instance with these types."""
        if callable(self.rule):
            return self.rule(operands, attrs, results)
        return parse_rule(self.rule, [t.shape for t in operands], [t.shape for t in results])

    def linear_sets(self, count: int, attrs: Attrs) -> tuple[frozenset[int], ...]:
        """The sets of operands in which an instance with `count` operands and these attributes is linear."""
        if callable(self.linear):
            return self.linear(attrs)
        return (frozenset(range(count)),) if isinstance(self.linear, str) else self.linear


class Emitter(Protocol):
    """What an `expand` writes ops with: see `Expansion`."""

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Add an op on all devices of the mesh; its value, or the tuple of its values."""


@dataclass(frozen=True)
class Expansion:
    """An op whose factor is split along one or several mesh axes.

    `parts` says how, axis by axis: the name of the axis, and how many elements each index along it holds of what the
    axes before it leave; `held` is what a device works on of the split dim: its size, and what fills it up to the
    largest shard. `operands` are the op's local operands; `types` and `result_types` the global types; `emitter.emit`
    adds a local op. An entry's `expand` names the factor; ``"*"`` stands for any that is reduced.
    """

    emitter: Emitter
    operands: tuple[Value, ...]
    attrs: Attrs
    parts: tuple[tuple[str, tuple[Size, ...]], ...]
    held: Size
    types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]

    def emit(self, name: str, *operands: Value, **attrs: Attribute) -> Any:
        """Add a local op."""
        return self.emitter.emit(name, *operands, **attrs)

    def start(self, dtype: str) -> Value:
        """The position in the whole dim of the first element that a device holds, a scalar of `dtype`."""
        starts = [self.emit("shard_start", axis=axis, sizes=sizes, dtype=dtype) for axis, sizes in self.parts]
        total: Value = starts[0]
        for start in starts[1:]:
            total = self.emit("add", total, start)
        return total

    def local_rows(self, ids: Value, dtype: str) -> tuple[Value, Value]:
        """Numbers of elements of the split dim, counted from the first that a device holds; and which it holds."""
        row = self.emit("subtract", ids, self.start(dtype))
        zero = self.emit("constant", value=0, dtype=dtype)
        end = self.emit("constant", value=self.held, dtype=dtype)
        return row, self.emit("logical_and", self.emit("greater_equal", row, zero), self.emit("less", row, end))

    @staticmethod
    def shape(value: Value) -> tuple[Size, ...]:
        """The local shape of a value, device by device where it differs."""
        assert isinstance(value.type, PlacedType)
        return value.type.shape

    def may_be_empty(self, value: Value, dim: int) -> bool:
        """Whether some device holds nothing of `value` along `dim`."""
        size = self.shape(value)[dim]
        return 0 in size.values if isinstance(size, PerRank) else size == 0


ALL = "all"
OF_PROGRAMS = ("call", "wait", "shape")
"""The roles of ops that stand in distributed programs only."""

AtenConverter = Callable[..., Any]
RelaxConverter = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
OnnxConverter = Callable[[Any, OnnxOperands, Mapping[str, Any]], Any]

_OPS: dict[str, OpDef] = {}
_ATEN: dict[str, AtenConverter] = {}
_RELAX: dict[str, RelaxConverter] = {}
_ONNX: dict[str, OnnxConverter] = {}


def define(name: str, **fields: Any) -> OpDef:
    """Add an entry to the table; the fields are those of `OpDef`. Raises ValueError when the name is taken."""
    if name in _OPS:
        raise ValueError(f"op {name!r} is defined twice")
    entry = OpDef(name, **fields)
    _OPS[name] = entry
    return entry


def aten(*spellings: str) -> Callable[[AtenConverter], AtenConverter]:
    """Declare how ATen ops are written with the entries of this file.

    The decorated function takes the `Builder` and the ATen op's own arguments, tensors as values, and returns a
    value or a tuple of values: ``@aten("relu.default")``.
    """

    return _enter(_ATEN, spellings, "aten.{}")


def relax_spelling(*names: str) -> Callable[[RelaxConverter], RelaxConverter]:
    """Declare how Relax ops that differ from their entry are written with the entries of this file.

    The decorated function takes the `Builder`, the call's arguments (tensors as values, tuples as lists, shapes as
    tuples of numbers) and its attributes by name, and returns a value or a tuple of values:
    ``@relax_spelling("relax.take")``. A pointwise op of the same name and operands needs none.
    """

    return _enter(_RELAX, names, "{}")


def onnx_spelling(*op_types: str) -> Callable[[OnnxConverter], OnnxConverter]:
    """Declare how ONNX ops are written with the entries of this file.

    The decorated function takes the `Builder`, the node's `OnnxOperands` and its attributes by name (with ``opset``,
    the version of the operator set), and returns a value, a numpy array that is known at import, or a tuple of those:
    ``@onnx_spelling("Gemm")``. An op of another domain than ONNX's own is named ``domain::Op``. What cannot be
    expressed raises NotImplementedError with the reason.
    """

    return _enter(_ONNX, op_types, "the ONNX op {}")


def _enter(table: dict[str, Callable[..., Any]], keys: tuple[str, ...], called: str) -> Callable[[Any], Any]:
    """A decorator that enters a converter in `table` under each of `keys`; ValueError when one is there already."""

    def register(convert: Callable[..., Any]) -> Callable[..., Any]:
        for key in keys:
            if key in table:
                raise ValueError(f"{called.format(key)} is converted twice")
            table[key] = convert
        return convert

    return register


def lookup(name: str, where: str = "") -> OpDef:
    """The entry of op `name`. Raises `UnsupportedOpError` with near misses."""
    if name in _OPS:
        return _OPS[name]
    near = difflib.get_close_matches(name, _OPS, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UnsupportedOpError(
        f"there is no op {name!r} in the op table", where, hint + "CONTRIBUTING.md shows how to add one entry for it"
    )


def lookup_aten(spelling: str) -> AtenConverter | None:
    """The conversion of an ATen op such as ``relu.default``, or None."""
    return _ATEN.get(spelling)


def lookup_relax(name: str) -> RelaxConverter | None:
    """The conversion of a Relax op such as ``relax.take``, or None where it has none or needs none."""
    return _RELAX.get(name)


def lookup_onnx(op_type: str) -> OnnxConverter | None:
    """The conversion of an ONNX op such as ``Gemm`` or ``domain::Op``, or None."""
    return _ONNX.get(op_type)


def onnx_spellings() -> tuple[str, ...]:
    """All ONNX ops that have a conversion."""
    return tuple(_ONNX)


def entries() -> tuple[OpDef, ...]:
    """All entries, in the order of definition."""
    return tuple(_OPS.values())


def aten_spellings() -> tuple[str, ...]:
    """All ATen ops that have a conversion."""
    return tuple(_ATEN)


def operands(*indices: int) -> frozenset[int]:
    """A set of operand positions, for `OpDef.linear`."""
    return frozenset(indices)
