"""Entries of the op table: `OpDef` and its facets, each a small dataclass.

===========  ==========================================================================================
`Semantics`  types, reference expression, linearity, partial evaluation, collective semantics
`Split`      parallel execution: factor rule, windows, ops that replace it on devices, attributes of shards
`Cost`       cost of execution: flops, bytes, workspace
`Code`       backend code: Relax, fused forms, layouts in memory
`Gradient`   the ops of its backward step
`IncrementalForm`  its state between calls, where a program continues a sequence
`Kernel`     other code for operands that are packed, overwritten, or of several requests
`Trait`      further properties that passes distinguish ops by
===========  ==========================================================================================

Each facet has one kind of reader; an entry omits the facets that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from distir_relax.ir import Attribute, TensorType, Value
from distir_relax.layout import Collective, generic_value, is_symbolic, typical_value
from distir_relax.ops.table.expansion import Expansion
from distir_relax.ops.table.incremental import IncrementalForm
from distir_relax.ops.table.index_expression import ElementOf
from distir_relax.ops.table.kernel import AnyKernel, Appending, Attrs, Expression, ForRequests, InPlace, K, Types
from distir_relax.ops.table.positions import Moved
from distir_relax.ops.table.quantized import QuantizedForm
from distir_relax.ops.table.ring import Ring
from distir_relax.ops.table.rule import Rule, no_rule, parse_rule
from distir_relax.ops.table.size_array import Sizes
from distir_relax.ops.table.windows import SampledWindow

Infer = Callable[[Types, Attrs], tuple[TensorType, ...]]
Sets = tuple[frozenset[int], ...]
Linear = Sets | Callable[[int, Attrs], Sets]
PartialEval = Callable[[Sequence[Any], Attrs], tuple[Any, ...] | None]
CollectiveSemantics = Callable[[Sequence[Any], Attrs], list[Any]]
RuleOf = Callable[[Types, Attrs, Types], Rule]
Localize = Callable[[Attrs, Types, Types], dict[str, Attribute]]
Windowed = Callable[[Attrs, Mapping[int, tuple[int, ...]]], dict[str, Attribute]]
Expand = Callable[[Expansion], tuple[Value, ...]]
Strides = Callable[[Sequence[int], Sequence[int], Attrs, Sequence[int]], tuple[int, ...] | None]
"""The strides of a view from the shape and strides of the operand, the attributes, and the shape of the result; None
for a copy.
"""
FusedAttrs = Callable[[Sequence[tuple[Any, ...]], Attrs], Attrs | None]
Work = Callable[[Types, Attrs, Types], float]
Product = Callable[[Types, Attrs, Types], tuple[int, int, int, int]]
Pieces = Callable[[Attrs, int], Sequence[int]]
Serialized = Callable[[Any, Sequence[Value], Sequence[Attrs]], list[Value]]


class Trait(Enum):
    """Properties that passes distinguish ops by, besides their facets."""

    ANNOTATION = "annotation"
    """The user's layout annotation of a value."""
    REDISTRIBUTION = "redistribution"
    """Changes the layout of a global tensor."""
    PLACE = "place"
    """Moves a tensor to another device set, which continues with it."""
    SCALAR = "scalar"
    """A scalar constant, in attribute `value`."""
    TRANSFER = "transfer"
    """Sends from each device of the operand's set to the one at the same index in the result's: it communicates too."""
    CALL = "call"
    """Calls a function. In distributed programs only."""
    WAIT = "wait"
    """Waits for a stream. In distributed programs only."""
    KEEPS = "keeps"
    """The result is operand 1. Operand 0 is the state with its value in the first call, the same in each call."""
    REPLACES = "replaces"
    """The result takes the place of operand 0, a parameter: an optimizer updates it, and its gradient is that of it."""
    OWN_GRADIENT = "own gradient"
    """Has the ops of its gradient among its operands. In global programs that are not differentiated yet only."""
    PACKS = "packs"
    """Puts weights into the layout of a kernel. In executable programs only."""
    FOR_EACH = "for each"
    """Takes the rows of all requests of a step apart, or joins them. In executable programs only."""
    SHAPE = "shape"
    """Computes with shapes. In distributed programs only."""
    ON_COMMUNICATOR = "on communicator"
    """Executed by the rank's communicator."""
    COMMUNICATES = "communicates"
    """Needs other devices than the one it runs on; the communicator executes it."""
    STARTS = "starts"
    """Asynchronous: the rank continues before the communication has completed."""
    FINISHES = "finishes"
    """Waits for a receive or a collective that was started before."""
    POINTWISE = "pointwise"
    """Each element of the result depends on the elements at the same position; operands broadcast."""
    KEEPS_ORDER = "keeps order"
    """The dims of the result are in memory in the order of those of operand 0, as after an elementwise op."""
    ADDS_IN_ORDER = "adds in order"
    """The sum of its operands from the first to the last: terms cannot be exchanged, or added elsewhere."""
    COMMUTATIVE = "commutative"
    """Its two operands can be swapped, also in a pattern."""
    TRIVIAL = "trivial"
    """The identity if it has one operand and does not change its type."""
    VIEW = "view"
    """The result shares the storage of operand 0: no copy, no memory."""
    MAY_SHARE = "may share"
    """The result may be, or share the storage of, one of its operands."""
    MOVES = "moves"
    """Only moves elements: those of its results are elements of its operands, some repeated or left out."""
    FOREIGN = "foreign"
    """Runs code that the program's text contains or names, not the compiler's."""
    NATIVE = "native"
    """A recorded step (`kernels.recording`) runs it by a native kernel, where its operands are small."""
    ZERO_IF_EMPTY = "zero if empty"
    """Its result is zero if an operand has no elements, a case that its implementations may reject."""

    # Traits are looked up for every simulated op, and `Enum` hashes by name in Python.
    __hash__ = object.__hash__


# Before Python 3.12, enum members are looked up by a Python property; plain attributes are faster.
for _trait in Trait:
    type.__setattr__(Trait, _trait.name, _trait)


class Routing(Enum):
    """Role of an op on rows that are placed with their groups (`Routed`), on the devices along an axis that own them.

    Its last two operands are the group ids of the rows, and those of the groups that a device owns.
    """

    DISPATCH = "dispatch"
    """Sends the rows of operand 0 to the devices of their groups."""
    WITHIN = "within"
    """Computes on routed rows in place: factor ``row`` of its rule is the rows, ``group`` the groups."""
    COMBINE = "combine"
    """Sends the rows back to the devices they came from."""


@dataclass(frozen=True)
class Order:
    """Role of an op in sorting rows: sorts that only group rows can be removed (`frontends.moe_sort_elimination`)."""

    sorts: Callable[[Attrs], bool] | None = None
    """Whether result 0 is the argsort of operand 0, ascending along `axis`."""
    positions: int | None = None
    """The result that contains positions along dim `axis` of operand 0."""
    looks_up: bool = False
    """The result contains the elements of operand 0 at the positions of operand 1 along `axis`."""
    writes: Callable[[Attrs], bool] | None = None
    """Whether operand 2 replaces the elements at the positions of operand 1 along `axis`."""
    by_number: str = ""
    """The equivalent op for unsorted rows: instead of the bounds of groups, the last two operands, it takes the group
    id of each row, and those of the groups."""


OF_PROGRAMS = frozenset({Trait.CALL, Trait.WAIT, Trait.SHAPE, Trait.OWN_GRADIENT, Trait.PACKS, Trait.FOR_EACH})
"""Traits of ops that occur in programs of devices only."""
NO_COMPUTATION = OF_PROGRAMS | {Trait.ANNOTATION, Trait.REDISTRIBUTION, Trait.TRANSFER, Trait.ON_COMMUNICATOR}
"""Traits of ops that compute nothing of a model: layouts, communication, program structure."""


@dataclass(frozen=True)
class Semantics:
    """Types and values of an op's results."""

    infer: Infer
    """Result types from operand types and attributes; raises ValueError on misuse."""
    torch: Expression
    """A Python expression over ``{0}``, ``{1}``, … (operands) and ``{attr}`` (attributes as literals; ``{attr!s}`` as
    bare text; ``{location}`` is the op's place in the model), with `torch`, `F`, and `attention`,
    `attention_gradients`, `attention_parts`, `convolutions`, `elementwise`, `indices`, `norms`, `positions`,
    `products`, `quantized`, `random`, `recurrent`, `resample`, `routing`, `sequence`, `tvm_extern` of
    `distir_relax.kernels` in scope: reference semantics and code of the torch backend. An op of several results returns
    a tuple. If it depends on attributes, it is a function of them."""
    linear: Linear = ()
    """The sets of operands in which the op is jointly linear, the others held fixed: ``({0}, {1})`` for matmul,
    ``({0, 1},)`` for add; `all_operands` for concat; a function of the number of operands and the attributes if it
    depends on them. It determines which ops a partial sum may pass through."""
    partial_eval: PartialEval | None = None
    """Partial evaluation, if only some operands are constant: from a tensor for each of those and a `TensorType` for
    each other, the results in the same form; None if it needs more values. The result types of an op with this field
    may depend on values."""
    sizes: Sizes | None = None
    """The elements of its result where those of its operands are sizes, some of them symbolic; None if it does not
    compute sizes. An op with trait MOVES needs none."""
    element: ElementOf | None = None
    """An element of its result where those of its operands are functions of their indices; None if it is none, but for
    a pointwise op that computes `sizes`."""
    running_sum: str = ""
    """For a running sum of its operand along a dim, the attribute that has the dim."""
    array: Callable[[Attrs], Any] | None = None
    """The result of an op without operands, whose attributes have no symbolic sizes, as a numpy array."""
    collective_semantics: CollectiveSemantics | None = None
    """Collective semantics, for an op of the communicator: from the operand of each device along the axis (none for an
    op without operands) and the attributes, the result on each."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """For an op that users may write: its required attributes, with a description of each."""
    serialized: Serialized | None = None
    """Serialized form of an op of distributed programs, if one device computes all parts along the axis in turn: from a
    builder, the operand of each part (none for an op without operands) and its attributes, the result of each."""
    moved: Moved | None = None
    """For an op that moves elements along dims: the positions of its results (`distir_relax.ops.table.positions`). For
    a collective, those on all devices along the axis; an attribute `op` is a reduction besides."""
    per_device_attrs: frozenset[str] = frozenset()
    """The attributes of a communicator op that differ by device; all others agree on all participants."""
    started: str = ""
    """For a collective, the op of a rank's program that starts it where it is on a stream; without one it runs in
    program order."""


@dataclass(frozen=True)
class Split:
    """How an op is partitioned."""

    rule: str | RuleOf
    """The factor rule, as text or computed from types (`distir_relax.ops.table.rule`)."""
    localize: Localize | None = None
    """The attributes of a shard, from its local operand and result types."""
    windowed: Windowed | None = None
    """The attributes of an op with windows on operands with halos, from `Window.part` by the window's index."""
    expand: Mapping[str, Expand] = field(default_factory=dict)
    """For a factor whose split needs other ops, the ops that devices run instead; ``"*"`` is any reduced factor."""
    ring: Mapping[str, Ring] = field(default_factory=dict)
    """For a factor, another one that may be split along the same axis."""
    positional: frozenset[str] = frozenset()
    """The factors of which a device must hold one contiguous block, because the op identifies elements by position."""
    work: Mapping[str, float] = field(default_factory=dict)
    """For factors whose split computes something again, the work of all devices relative to that of the op."""
    exact: frozenset[str] = frozenset()
    """The factors whose split takes short shards as they are, without padding."""
    algorithms: Mapping[str, str] = field(default_factory=dict)
    """For an op whose splits are different distributed algorithms, the name of each for reports, by the factors that
    are split along one mesh axis, in the order of the rule: ``"s"``, ``"s t"``."""
    indices: Container[int] = ()
    """The operands that contain indices: the padding of their short shards must be valid indices."""
    routing: Routing | None = None
    """Role on rows that are placed with their groups."""
    order: Order | None = None
    """Role in sorting rows."""
    divisors: Container[int] = ()
    """The divisor operands. For integers, the padding of their short shards must not be zero; if they may be zero, a
    partial sum cannot pass."""


NO_SPLIT = Split(no_rule)
"""For ops of programs that are partitioned already: they have no rule."""


@dataclass(frozen=True)
class Cost:
    """Cost of an op, independent of the device; a device profile converts it to seconds.

    Its functions see numbers only: of symbolic sizes the typical values (`typical_costs`).
    """

    flops: Work | None = None
    """Floating-point operations; by default one per element of the result."""
    moved: Work | None = None
    """Bytes read and written; by default those of all operands and results."""
    product: Product | None = None
    """(batch, rows, columns, inner) of a matrix product: devices are less efficient on small ones."""
    cpu_product: Product | None = None
    """The part of `product` that kernels of CPUs compute, such as that below the diagonal of a causal mask; by default
    all of it."""
    kernels_of: str = ""
    """The op whose kernels compute its product, so that it has the rates that were measured for that one."""
    seconds: Work | None = None
    """The op's time itself, independent of the device."""
    workspace: Work | None = None
    """Workspace in bytes: memory during execution besides operands and results."""
    cpu_workspace: Work | None = None
    """Workspace of CPU kernels instead, in bytes; by default `workspace`."""
    contiguous: tuple[int, ...] = ()
    """The operands that torch's kernel copies if they are not contiguous."""
    collective: Collective | None = None
    """The collective that the network model sees."""
    pieces: Pieces | None = None
    """The shares of all devices in what a device sends in an ``all_to_all``, in any unit; equal by default."""
    brings_as_gets: bool = False
    """Whether a device sends as many bytes to a collective as it receives, from an operand with larger capacity."""
    shape_ops: Work | None = None
    """The ops on shapes that the model's own program runs on its host at this place."""
    weight_gradient: int | None = None
    """The operand, if any, that is a weight gradient: memory reports separate it from activations."""


def typical_costs(types: Types, attrs: Attrs, results: Types) -> tuple[Types, Attrs, Types]:
    """Return the arguments of the functions of a `Cost` with typical values of symbolic sizes."""
    if not _is_symbolic(types, attrs, results):
        return types, attrs, results
    return [t.typical for t in types], _mapped(attrs, typical_value), [t.typical for t in results]


def _is_symbolic(types: Types, attrs: Attrs, results: Types) -> bool:
    return any(is_symbolic(t.shape) for t in (*types, *results)) or is_symbolic(tuple(attrs.values()))


def _mapped(attrs: Attrs, change: Callable[[Any], Any]) -> Attrs:
    def item(value: Any) -> Any:
        return tuple(map(item, value)) if isinstance(value, tuple) else change(value)

    return {key: item(value) for key, value in attrs.items()}


def no_flops(types: Types, attrs: Attrs, results: Types) -> float:
    """Return 0: the work of ops that compute nothing."""
    return 0.0


def flops_per_result(count: float) -> Work:
    """Return the flops of ops that take `count` operations per element of the first result."""
    return lambda types, attrs, results: count * results[0].elements


def flops_per_operand(count: float = 1.0) -> Work:
    """Return the flops of ops that take `count` operations per element of the first operand."""
    return lambda types, attrs, results: count * types[0].elements


PLAIN_COST = Cost()
"""Cost of ops with one operation per element of the result."""
FREE = Cost(flops=no_flops)
"""Cost of ops that only move elements."""


def _looked_up(types: Types, attrs: Attrs, results: Types) -> float:
    return 2.0 * results[0].bytes + sum(t.bytes for t in types[1:])


LOOK_UP = Cost(flops=no_flops, moved=_looked_up)
"""Cost of ops that read the elements of operand 0 that the other operands choose, such as rows of embeddings."""


@dataclass(frozen=True)
class Code:
    """Backend code of an op, besides its reference semantics."""

    relax: Expression = ""
    """As `Semantics.torch`, with `R` (the Relax ops) instead of `torch` and `F`, and tuples as results; by default the
    op of the same name called with the operands, and the attributes as keywords."""
    numbers: frozenset[int] = frozenset()
    """The operands for which the torch expression accepts a Python number as well as a tensor."""
    patterns: tuple[str, ...] = ()
    """The ops that a fused op replaces in a rank's program: ``add(linear(0, 1), 2)``, where integers are operands, or
    one of several spellings (`distir_relax.ops.table.patterns`)."""
    fused_attrs: FusedAttrs | None = None
    """The attributes of the fused op, from the shapes of its operands and the values that a pattern captures; None if
    it cannot replace the ops. By default they are these values."""
    joined: str = ""
    """The op that computes several instances with the same operand 0 at once: its operands are those of all of them,
    operand 0 once, and its results theirs."""
    strides: Strides | None = None
    """For a view, the strides of a result, or None for a copy."""
    unrepeated: tuple[int, ...] = ()
    """The operands that the torch expression takes before each element of dim 1 is repeated, with attribute `grouped`;
    with `repeats` too, if not all elements are repeated equally often."""
    repeats: Callable[[Attrs], tuple[int, tuple[int, ...]]] | None = None
    """For an op that repeats each element of a dim: the dim, and how often it repeats each."""
    mask: int | None = None
    """The operand that is a mask of keys by rows. For a boolean one, the torch expression takes None as well if all
    elements are true, or bounds of each row, int64, with the attribute `bounded` (`lowering.BoundAttention`)."""


PLAIN_CODE = Code()
"""Code of ops that Relax has by the same name, without other forms."""


OperandGradient = str | Callable[[Any], Value] | None
AllGradients = Callable[[Any], Sequence[Value | None]]


@dataclass(frozen=True)
class Gradient:
    """Differentiation of an op (`distir_relax.ops.table.gradient`)."""

    operands: tuple[OperandGradient, ...] = ()
    """The gradient of each operand in order: a text, or a function of the `Backward` step. None, or omitted, for an
    operand without gradient. If the operand was broadcast, the gradient may be larger and is summed."""
    all: AllGradients | None = None
    """Instead: a function that returns the gradients of all operands."""
    accumulates: bool = False
    """Whether the gradient of operand 0 includes `Backward.so_far`, to which it may be cheaper to add a few elements
    than to add a tensor that has them."""


NO_GRADIENT = Gradient()
"""For piecewise constant ops: comparisons, rounding, indices."""


def gradient_of(*operands: OperandGradient) -> Gradient:
    """Return the facet with the gradient of each operand, in order; further operands have none."""
    return Gradient(operands)


@dataclass(frozen=True)
class OpDef:
    """The entry of one op."""

    name: str
    """Relax's name, without ``relax.``, if Relax has the op."""
    semantics: Semantics
    """Types and values of its results."""
    split: Split = NO_SPLIT
    """How it is partitioned."""
    cost: Cost = PLAIN_COST
    """Cost of running it."""
    code: Code = PLAIN_CODE
    """Backend code."""
    gradient: Gradient | None = None
    """Differentiation; None if the table does not define it."""
    incremental: IncrementalForm | None = None
    """How it continues a sequence; None for an op that is parallel along one, or cannot."""
    quantized: QuantizedForm | None = None
    """How it takes a quantized weight, if it can."""
    traits: frozenset[Trait] = frozenset()
    """Further properties."""
    kernels: tuple[AnyKernel, ...] = ()
    """The ways to run it besides the reference expression."""

    def kernel(self, kind: type[K]) -> K | None:
        """Return its kernel of a kind; None without one."""
        return next((kernel for kernel in self.kernels if isinstance(kernel, kind)), None)

    @property
    def computes(self) -> bool:
        """Whether it may be an op of a model: not a layout, a communication, or an op of programs."""
        return self.traits.isdisjoint(NO_COMPUTATION)

    @cached_property
    def shares_storage(self) -> bool:
        """Whether the result shares the storage of operand 0."""
        return Trait.VIEW in self.traits or self.updates

    @cached_property
    def is_native(self) -> bool:
        """Whether a recorded step runs it by a native kernel, where its operands are small (`Trait.NATIVE`)."""
        of_states = (ForRequests, Appending)
        return Trait.NATIVE in self.traits or any(isinstance(kernel, of_states) for kernel in self.kernels)

    @cached_property
    def updates(self) -> bool:
        """Whether the result takes the place of operand 0, in whose memory it is."""
        return self.kernel(InPlace) is not None

    @cached_property
    def keeps_order(self) -> bool:
        """Whether the dims of the result are in memory in the order of those of operand 0, if it is no view."""
        return not self.traits.isdisjoint({Trait.POINTWISE, Trait.KEEPS_ORDER})

    @property
    def keeps_value(self) -> bool:
        """Whether the result is the operand, placed otherwise."""
        return not self.traits.isdisjoint({Trait.ANNOTATION, Trait.REDISTRIBUTION, Trait.PLACE})

    def is_identity(self, operands: Sequence[Value], results: Sequence[Value]) -> bool:
        """Return whether an instance with these values returns its operand as it is (`Trait.TRIVIAL`)."""
        return Trait.TRIVIAL in self.traits and len(operands) == 1 and operands[0].type == results[0].type

    def rule_for(self, operands: Types, attrs: Attrs, results: Types) -> Rule:
        """Return the factor rule of an instance with these types; of symbolic ones, for their generic values.

        Windows that follow a formula are those of given sizes: a dim of a symbolic size has none, and is not split.
        """
        if not _is_symbolic(operands, attrs, results):
            return self._rule(operands, attrs, results)
        generic = [t.generic for t in operands], [t.generic for t in results]
        rule = self._rule(generic[0], _mapped(attrs, generic_value), generic[1])
        windows = [
            w
            for w in rule.windows
            if not isinstance(w, SampledWindow)
            or not is_symbolic((operands[w.operand].shape[w.operand_dim], results[0].shape[w.result_dim]))
        ]
        return replace(rule, windows=tuple(windows))

    def _rule(self, operands: Types, attrs: Attrs, results: Types) -> Rule:
        rule = self.split.rule
        if callable(rule):
            return rule(operands, attrs, results)
        return parse_rule(rule, [t.shape for t in operands], [t.shape for t in results])

    def linear_sets(self, count: int, attrs: Attrs) -> Sets:
        """Return the operand sets in which an instance with `count` operands and these attributes is linear."""
        linear = self.semantics.linear
        return linear(count, attrs) if callable(linear) else linear


def operands(*indices: int) -> frozenset[int]:
    """Return a set of operand positions."""
    return frozenset(indices)


def all_operands(count: int, attrs: Attrs) -> Sets:
    """The `Semantics.linear` of ops that are jointly linear in all operands."""
    return (frozenset(range(count)),)
