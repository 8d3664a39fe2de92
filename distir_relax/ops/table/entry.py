"""What an entry of the op table says: `OpDef`, and its facets, each a small dataclass.

===========  ==========================================================================================
`Semantics`  what the op gives: types, the reference expression, where it is linear, what else is known
`Split`      how it runs in parts: the factor rule, windows, what devices run instead, shards' attributes
`Cost`       what running it takes
`Code`       how backends run it: Relax, packed weights, fused and in-place forms
`Gradient`   how it is differentiated: the ops of its backward step
`Trait`      what passes tell apart besides
===========  ==========================================================================================

Each facet belongs to one kind of reader, and an entry leaves out those it has no need of.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from distir_relax.ir import Attribute, TensorType, Value
from distir_relax.layout import Collective
from distir_relax.ops.table.expansion import Expansion
from distir_relax.ops.table.rule import Rule, no_rule, parse_rule

Types = Sequence[TensorType]
Attrs = Mapping[str, Any]

Infer = Callable[[Types, Attrs], tuple[TensorType, ...]]
Sets = tuple[frozenset[int], ...]
Linear = Sets | Callable[[int, Attrs], Sets]
Expression = str | Callable[[Attrs], str]
Mixed = Callable[[Sequence[Any], Attrs], tuple[Any, ...] | None]
Together = Callable[[Sequence[Any], Attrs], list[Any]]
RuleOf = Callable[[Types, Attrs, Types], Rule]
Localize = Callable[[Attrs, Types, Types], dict[str, Attribute]]
Windowed = Callable[[Attrs, Mapping[int, tuple[int, ...]]], dict[str, Attribute]]
Expand = Callable[[Expansion], tuple[Value, ...]]
Strides = Callable[[Sequence[int], Sequence[int], Attrs, Sequence[int]], tuple[int, ...] | None]
"""The strides of a view from the shape and strides of the operand, the attributes, and the shape of the result."""
Work = Callable[[Types, Attrs, Types], float]
Product = Callable[[Types, Attrs, Types], tuple[int, int, int, int]]
Pieces = Callable[[Attrs, int], Sequence[int]]
InTurn = Callable[[Any, Sequence[Value], Sequence[Attrs]], list[Value]]


class Trait(Enum):
    """What passes tell ops apart by, besides their facets."""

    ANNOTATION = "annotation"
    """The user's mark of a layout on a value."""
    REDISTRIBUTION = "redistribution"
    """The same global tensor in another layout."""
    PLACE = "place"
    """The same tensor at another place, where other devices go on with it."""
    SCALAR = "scalar"
    """A number that the program names, in attribute `value`."""
    TRANSFER = "transfer"
    """From each device of the operand's set to the device at the same place in the result's. It communicates, too."""
    CALL = "call"
    """Runs a function. In distributed programs only."""
    WAIT = "wait"
    """Joins a stream. In distributed programs only."""
    SHAPE = "shape"
    """Computes with shapes. In distributed programs only."""
    ON_COMMUNICATOR = "on communicator"
    """A rank's communicator performs it."""
    COMMUNICATES = "communicates"
    """It needs other devices than the one it runs on; the communicator performs it."""
    STARTS = "starts"
    """A rank goes on before what it communicates has come, or gone."""
    FINISHES = "finishes"
    """A rank waits for what it has started to receive."""
    POINTWISE = "pointwise"
    """Each element of the result is made from the elements at its place; operands broadcast."""
    COMMUTATIVE = "commutative"
    """Its two operands may change places, also in a pattern."""
    TRIVIAL = "trivial"
    """It does nothing where it has one operand and leaves its type as it is."""
    VIEW = "view"
    """The result shares the storage of operand 0: nothing is moved, and no memory taken."""
    ZERO_IF_EMPTY = "zero if empty"
    """Its result is zero where an operand has no elements, and its implementations may refuse that."""

    # Traits are read for every op that is simulated, and `Enum` hashes by name.
    __hash__ = object.__hash__


# Before Python 3.12 a member is found by a property that runs Python code; so it is an attribute like others.
for _trait in Trait:
    type.__setattr__(Trait, _trait.name, _trait)


class Routing(Enum):
    """Handling of rows that are placed with their groups (`Routed`), on the devices along an axis that have them.

    Its last two operands are the numbers of the rows' groups, and those of the groups that a device has.
    """

    DISPATCH = "dispatch"
    """It sends them there: row by row of operand 0."""
    WITHIN = "within"
    """It works on them where they are: factor ``row`` of its rule is the rows, ``group`` the groups."""
    COMBINE = "combine"
    """It brings them back to where they came from."""


@dataclass(frozen=True)
class Order:
    """What an op has to do with the order of rows: which sorts are a means, and not a meaning (`frontends.unsort`)."""

    sorts: Callable[[Attrs], bool] | None = None
    """Whether result 0 says where the elements of operand 0 stand in ascending order along `axis`."""
    positions: int | None = None
    """The result whose numbers are positions along dim `axis` of operand 0."""
    looks_up: bool = False
    """The result holds what operand 0 has at the positions of operand 1 along `axis`."""
    writes: Callable[[Attrs], bool] | None = None
    """Whether operand 2 stands in the result at the positions of operand 1 along `axis`, whatever was there."""
    by_number: str = ""
    """The op that does the same for rows in any order: for bounds of groups, the last two operands, it takes the number
    of each row's group, and those of the groups."""


OF_PROGRAMS = frozenset({Trait.CALL, Trait.WAIT, Trait.SHAPE})
"""The traits of ops that stand in distributed programs only."""
NO_COMPUTATION = OF_PROGRAMS | {Trait.ANNOTATION, Trait.REDISTRIBUTION, Trait.TRANSFER, Trait.ON_COMMUNICATOR}
"""The traits of ops that compute nothing of a model: layouts, communication, programs."""


@dataclass(frozen=True)
class Semantics:
    """What an op gives."""

    infer: Infer
    """The result types from the operand types and attributes; ValueError on a misuse."""
    torch: Expression
    """A Python expression over ``{0}``, ``{1}``, … (operands) and ``{attr}`` (attributes as literals; ``{attr!s}`` as
    bare text; ``{location}`` is the op's place in the model), with `torch`, `F`, and `tvm_extern`, `indices`, `random`,
    `recurrent`, `resample`, `routing` of `distir_relax.kernels`: the reference semantics, and the code of the torch
    backend. An op of several results gives a tuple. Where the attributes decide, it is a function of them."""
    linear: Linear = ()
    """The sets of operands in which the op is linear jointly, the others held fixed: ``({0}, {1})`` for matmul,
    ``({0, 1},)`` for add; `all_operands` for concat; a function of the number of operands and the attributes where they
    decide. It says where a pending sum may pass."""
    mixed: Mixed | None = None
    """The results where only some operands are known numbers: from a tensor for each of those and a `TensorType` for
    each other, such a row; None where it needs to know more. An op that has it may have results whose types only
    numbers decide."""
    together: Together | None = None
    """Of an op of the communicator: from the operand of each device along the axis (none for an op without operands),
    and the attributes, the result on each."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Of an op that a person may write: the attributes that it must have, and what each of them says."""
    in_turn: InTurn | None = None
    """Of an op of distributed programs, where all devices along its axis are one, which does their parts in turn: from
    a builder, the operand of each (none for an op without operands) and the attributes of each, the result of each."""
    own: frozenset[str] = frozenset()
    """Of an op of the communicator: the attributes that are each device's own; the others are the same on all that take
    part."""


@dataclass(frozen=True)
class Split:
    """How an op runs in parts."""

    rule: str | RuleOf
    """The factor rule, as text or computed from types (`distir_relax.ops.table.rule`)."""
    localize: Localize | None = None
    """The attributes of a shard, from its local operand and result types."""
    windowed: Windowed | None = None
    """The attributes of an op with windows whose operands hold just what a device's part of the result needs, from what
    `Window.part` says of each, by the index of the window."""
    expand: Mapping[str, Expand] = field(default_factory=dict)
    """For a factor whose split needs more than the op itself, the ops that the devices run instead; ``"*"`` is any
    factor that is reduced."""
    positional: frozenset[str] = frozenset()
    """The factors of which a device must hold one block, because the op tells elements by position."""
    indices: Container[int] = ()
    """The operands that say which elements are read or written: what fills their short shards must be valid."""
    routing: Routing | None = None
    """Handling of rows that are placed with their groups."""
    order: Order | None = None
    """What it has to do with the order of rows."""
    divisors: Container[int] = ()
    """The operands that are divided by. Of integers, what fills their short shards must not be zero; where they may be
    zero, no pending sum is divided."""


NO_SPLIT = Split(no_rule)
"""Of ops that stand in programs which are split already: they have no rule."""


@dataclass(frozen=True)
class Cost:
    """What running an op takes, as far as it depends on the op alone; a device profile makes seconds of it."""

    flops: Work | None = None
    """Floating-point operations; by default one for each element of the result."""
    moved: Work | None = None
    """The bytes read and written, by default those of all operands and results."""
    product: Product | None = None
    """(batch, rows, columns, inner) of an op that is a matrix product: devices are slower on small ones."""
    seconds: Work | None = None
    """The op's time itself, whatever the device."""
    workspace: Work | None = None
    """The bytes that the op needs while it runs, besides its operands and results."""
    cpu_workspace: Work | None = None
    """The bytes that torch's CPU kernel of the op needs besides."""
    contiguous: tuple[int, ...] = ()
    """The operands that torch's kernel copies where they are not contiguous."""
    collective: Collective | None = None
    """What a communication is to the network."""
    pieces: Pieces | None = None
    """How, in an ``all_to_all``, the device at a place along the axis divides what it holds among all: a number for
    each, in any unit. By default equally."""
    brings_as_gets: bool = False
    """Whether a device brings to a collective as many bytes as it gets, of an operand that has room for more."""
    weight_gradient: int | None = None
    """The operand, if any, that is the gradient of a weight: memory reports tell it from activations."""


def no_flops(types: Types, attrs: Attrs, results: Types) -> float:
    """The work of ops that compute nothing."""
    return 0.0


PLAIN_COST = Cost()
"""The cost of ops that do one operation for each element of the result."""
FREE = Cost(flops=no_flops)
"""The cost of ops that only move elements."""


@dataclass(frozen=True)
class Packed:
    """A form of an op for weights that never change. Expressions see ``{rows}``, the rows of the op's result."""

    weights: tuple[int, ...]
    """The operands that must be such weights."""
    prepare: str
    """The expression over them, run once, with `pack_linear` of `distir_relax.kernels.packing` in scope."""
    apply: str
    """The expression over ``{0}``, … and ``{packed}``."""


@dataclass(frozen=True)
class Code:
    """How backends run an op, beyond its reference semantics."""

    relax: Expression = ""
    """As `Semantics.torch`, with `R` (the Relax ops) for `torch` and `F`, and tuples as results; by default the op
    of the same name called with the operands, and the attributes as keywords."""
    numbers: frozenset[int] = frozenset()
    """The operands for which the torch expression takes a Python number as well as a tensor."""
    packed: Packed | None = None
    """How the torch backend may lay out a weight once, when the program is loaded."""
    pattern: str = ""
    """Which ops a fused op stands for: ``add(linear(0, 1), 2)``, numbers without a point being operands; a rank's
    program is written with the fused op."""
    in_place: Expression = ""
    """The torch expression of an op whose result takes over the storage of operand 0, which nothing may use afterwards:
    it writes there and gives it back."""
    strides: Strides | None = None
    """Of a view, the strides of a result; None from it says that the result is a copy."""


PLAIN_CODE = Code()
"""The code of ops that Relax has by the same name, and that have no other form."""


OperandGradient = str | Callable[[Any], Value] | None
AllGradients = Callable[[Any], Sequence[Value | None]]


@dataclass(frozen=True)
class Gradient:
    """How an op is differentiated (`distir_relax.ops.table.gradient`)."""

    operands: tuple[OperandGradient, ...] = ()
    """The gradient of each operand in order: a text, or a function of the `Backward` step. None, and what is left out,
    is an operand that no gradient passes to. It may be larger than an operand that was broadcast: it is summed then."""
    all: AllGradients | None = None
    """Instead: a function that gives the gradients of all operands."""


NO_GRADIENT = Gradient()
"""Of ops whose results do not change with small changes of their operands: comparisons, rounding, indices."""


def gradient_of(*operands: OperandGradient) -> Gradient:
    """The facet of an op from the gradient of each operand, in order; further operands have none."""
    return Gradient(operands)


@dataclass(frozen=True)
class OpDef:
    """One op."""

    name: str
    """Relax's name, without ``relax.``, where Relax has the op."""
    semantics: Semantics
    """What the op gives."""
    split: Split = NO_SPLIT
    """How it runs in parts."""
    cost: Cost = PLAIN_COST
    """What running it takes."""
    code: Code = PLAIN_CODE
    """How backends run it."""
    gradient: Gradient | None = None
    """How it is differentiated; None where the table does not say it."""
    traits: frozenset[Trait] = frozenset()
    """What passes tell it apart by."""

    @property
    def computes(self) -> bool:
        """Whether it may be an op of a model: not a layout, a communication, or an op of programs."""
        return self.traits.isdisjoint(NO_COMPUTATION)

    @cached_property
    def shares_storage(self) -> bool:
        """Whether the result lies in the storage of operand 0."""
        return Trait.VIEW in self.traits or bool(self.code.in_place)

    def rule_for(self, operands: Types, attrs: Attrs, results: Types) -> Rule:
        """The factor rule of an instance with these types."""
        rule = self.split.rule
        if callable(rule):
            return rule(operands, attrs, results)
        return parse_rule(rule, [t.shape for t in operands], [t.shape for t in results])

    def linear_sets(self, count: int, attrs: Attrs) -> Sets:
        """The sets of operands in which an instance with `count` operands and these attributes is linear."""
        linear = self.semantics.linear
        return linear(count, attrs) if callable(linear) else linear


def operands(*indices: int) -> frozenset[int]:
    """A set of operand positions."""
    return frozenset(indices)


def all_operands(count: int, attrs: Attrs) -> Sets:
    """The `Semantics.linear` of ops that are linear in all their operands jointly."""
    return (frozenset(range(count)),)
