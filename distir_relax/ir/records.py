"""Records: findings of passes, attached to the module.

Records are structured data; `str` formats one for people. A bundle stores records as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, get_args

from distir_relax.errors import DistIRError, ParseError
from distir_relax.layout import Guard, Relation, Symbol, parse_size
from distir_relax.layout.symbolic_size import Size
from distir_relax.support import Fields, parse_json, shown
from distir_relax.support.units import seconds, size


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why `value` of a function is split along mesh axis number `axis`.

    `annotation` is the location of the user's annotation that decides it. If that is on another value, the split was
    propagated from `source` through `factor` of the op `op`.
    """

    value: str
    axis: int
    annotation: str
    op: str = ""
    factor: str = ""
    source: str = ""
    function: str = "main"

    @property
    def root(self) -> str:
        """Describe the annotation."""
        return f"from the annotation at {self.annotation or 'an unknown place'}"

    def __str__(self) -> str:
        return f"{self.root}, through {self.op} {self.factor} of %{self.source}" if self.source else self.root


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather of a split tensor that no annotation requests.

    `value` is the result of the `redistribute`, `source` its operand, with layout `placements`; `bytes` is the size of
    the global tensor; `op`, at `location` of the user's model, needs a split dim unsplit, along the mesh `axes`.
    """

    value: str
    source: str
    placements: str
    bytes: Size
    op: str
    location: str = ""
    function: str = "main"
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.location or 'the program'}: %{self.source} ({self.placements}) is gathered, {self.bytes:,} bytes, "
            f"because {self.op} needs the whole of a split dim"
        )


@dataclass(frozen=True, slots=True)
class BatchDim:
    """The batch dim of an input: its `size`, and `dim`; the size at run time may be a multiple."""

    value: str
    dim: int
    size: Size

    def __str__(self) -> str:
        return f"%{self.value} has {self.size} samples along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class MicrobatchParts:
    """An input or output (`role`) that the program has in several parts along a dim: `parts` are their names."""

    role: str
    value: str
    dim: int
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"the {self.role} {self.value} is {len(self.parts)} parts along dim {self.dim}: {' '.join(self.parts)}"


@dataclass(frozen=True, slots=True)
class OutputAssembly:
    """Assembly of an `output` of `bytes` bytes on rank 0, with the size in bytes of the receive `buffer`.

    The buffer is 0 if parts are received in place.
    """

    output: str
    bytes: Size
    buffer: Size

    def __str__(self) -> str:
        return f"rank 0 assembles the output {self.output}, {size(self.bytes)}"


@dataclass(frozen=True, slots=True)
class RepeatedMicrobatches:
    """The microbatches that a simulation expands, of `count` in all; each represents a range of equal microbatches.

    `firsts` are the numbers of the expanded ones; each represents those from it up to the next. The first represents
    only itself, and so does the last if there are sums over microbatches (`summed`). `part_of` maps values to expanded
    microbatches, numbered from 0; `totals` are values of the last one that depend on all of them.
    """

    count: int
    firsts: tuple[int, ...]
    part_of: Mapping[str, int] = field(default_factory=dict)
    totals: tuple[str, ...] = ()
    summed: bool = True

    @property
    def ranges(self) -> tuple[range, ...]:
        """The range of microbatches that each expanded one represents."""
        return tuple(range(a, b) for a, b in zip(self.firsts, (*self.firsts[1:], self.count), strict=True))

    def renamed(self, names: Mapping[str, str]) -> RepeatedMicrobatches:
        """Add values to the parts of existing ones; `names` maps new names to old ones."""
        parts = {new: self.part_of[old] for new, old in names.items() if old in self.part_of}
        totals = set(self.totals)
        more = (new for new, old in names.items() if old in totals)
        return replace(self, part_of={**self.part_of, **parts}, totals=(*self.totals, *more))

    def replaced(self, names: Mapping[str, str]) -> RepeatedMicrobatches:
        """Return the record of the values that take the place of others; `names` maps old names to new ones.

        Others are dropped: a later value of that name may be of another part.
        """
        parts = {new: self.part_of[old] for old, new in names.items() if old in self.part_of}
        totals = dict.fromkeys(names[old] for old in self.totals if old in names)
        return replace(self, part_of=parts, totals=tuple(totals))

    def __str__(self) -> str:
        return f"microbatches {' '.join(map(str, self.firsts))} stand for {self.count}"


@dataclass(frozen=True, slots=True)
class MicrobatchProgram:
    """The program of the whole batch along an axis in time, of which the parts are the microbatches, as texts.

    `sharded` has the layout of every value along this axis, `placed` the ops that each microbatch does.
    """

    sharded: str
    placed: str

    def __str__(self) -> str:
        return "the program of the whole batch, along an axis in time"


@dataclass(frozen=True, slots=True)
class UpdateProgram:
    """The program of the optimizer's step, as text: new values from weights, gradients (``NAME.grad``) and states.

    A step of several updates has one for each, in order, with the name of its `loss`.
    """

    text: str
    loss: str = ""

    def __str__(self) -> str:
        return "the program of the optimizer's step"


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """The tasks of a pipeline in scheduled order, as ``1F0`` and so on."""

    tasks: tuple[str, ...]

    def __str__(self) -> str:
        return f"the tasks in order: {' '.join(self.tasks)}"


@dataclass(frozen=True, slots=True)
class Autosharding:
    """Result of autosharding for the machine `profile`: the `time` of a step and the lower `bound` of any placements,
    both in picoseconds, and the `bytes` that a device needs."""

    profile: str
    time: int
    bound: int
    bytes: int

    @property
    def gap(self) -> float:
        """The relative gap between the time and its lower bound."""
        return max(0.0, 1.0 - self.bound / self.time) if self.time else 0.0

    def __str__(self) -> str:
        return (
            f"placements found for {self.profile}: {seconds(self.time * 1e-12)} a step, at most {self.gap:.2%} from "
            f"the best there are, {size(self.bytes)} on a device"
        )


@dataclass(frozen=True, slots=True)
class CachedState:
    """An input of an incremental program with what earlier calls have left, and the output with its next value.

    If it `grows`, dim `dim` has one element per earlier position. Before the first call it is empty, or zero.
    """

    input: str
    output: str
    dim: int = 0
    grows: bool = True

    def __str__(self) -> str:
        grown = f", which grows along dim {self.dim}" if self.grows else ""
        return f"the state {self.input} becomes the output {self.output}{grown}"


@dataclass(frozen=True, slots=True)
class HeadPartition:
    """Partition of the heads along dim `dim` of a weight: `parts` are their numbers on each index of the tensor axis.

    If a rank has `copies` of key/value heads that others have too, they are the heads in the order of ranks, of `count`
    in the weight as it is stored.
    """

    value: str
    dim: int
    parts: tuple[int, ...]
    copies: tuple[int, ...] = ()
    count: int = 0

    @property
    def heads(self) -> tuple[Sequence[int], ...]:
        """The heads of each index of the tensor axis."""
        numbers: Sequence[int] = self.copies or range(sum(self.parts))
        return tuple(numbers[start:end] for start, end in pairwise(accumulate(self.parts, initial=0)))

    @property
    def description(self) -> str:
        """The heads of each index of the tensor axis, as text."""
        ranks = (f"{part[0]} to {part[-1]}" if len(part) > 1 else "".join(map(str, part)) for part in self.heads)
        return f"{'key/value' if self.copies else 'query'} heads {' | '.join(text or 'none' for text in ranks)}"

    def __str__(self) -> str:
        return f"the tensor ranks have {self.description} of %{self.value}"


Record = (
    Reason
    | Gather
    | BatchDim
    | MicrobatchParts
    | OutputAssembly
    | RepeatedMicrobatches
    | MicrobatchProgram
    | UpdateProgram
    | TaskOrder
    | Autosharding
    | Guard
    | CachedState
    | HeadPartition
)

_KINDS: dict[str, type[Record]] = {
    "reason": Reason,
    "gather": Gather,
    "batch dim": BatchDim,
    "divided": MicrobatchParts,
    "collected": OutputAssembly,
    "repeated": RepeatedMicrobatches,
    "in time": MicrobatchProgram,
    "update": UpdateProgram,
    "scheduled": TaskOrder,
    "searched": Autosharding,
    "guard": Guard,
    "state": CachedState,
    "heads": HeadPartition,
}


def print_records(records: Sequence[Record]) -> str:
    """Print records as JSON, one per line; the inverse of `parse_records`."""
    names = {kind: name for name, kind in _KINDS.items()}
    lines = [json.dumps({"record": names[type(r)], **_row(r)}, default=str) for r in records]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def parse_records(text: str, where: str = "", symbols: Mapping[str, Symbol] | None = None) -> tuple[Record, ...]:
    """Parse the output of `print_records` for a program with `symbols`. Raises `ParseError` that names the record."""
    rows = parse_json(text, ParseError, where)
    if not isinstance(rows, list):
        raise ParseError(f"expected a list of records, found {shown(rows)}", where)
    return tuple(_record(Fields.of(row, ParseError, where, f"[{i}]"), symbols or {}) for i, row in enumerate(rows))


def _row(record: Record) -> dict[str, Any]:
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _record(row: Fields, symbols: Mapping[str, Symbol]) -> Record:
    name = row.text("record")
    if name not in _KINDS:
        raise row.refuse(f"one of {', '.join(_KINDS)}", "record", name)
    kind = _KINDS[name]
    kind_fields = {item.name: item for item in fields(kind)}
    if unknown := sorted(row.table.keys() - kind_fields.keys() - {"record"}):
        raise row.refuse(f"a field of a {name}", unknown[0], row.table[unknown[0]])
    values: dict[str, Any] = {
        key: _size(row, key, symbols) if item.type == "Size" else _READERS[str(item.type)](row, key)
        for key, item in kind_fields.items()
        if key in row or (item.default is MISSING and item.default_factory is MISSING)
    }
    return kind(**values)


def _size(row: Fields, key: str, symbols: Mapping[str, Symbol]) -> Size:
    if not isinstance(row.table.get(key), str):
        return row.whole(key)
    try:
        return parse_size(row.text(key), symbols)
    except DistIRError as error:
        raise row.refuse(error.message, key, row.table[key]) from None


def _relation(row: Fields, key: str) -> str:
    relation = row.text(key)
    if relation not in get_args(Relation):
        raise row.refuse(f"one of {', '.join(get_args(Relation))}", key, relation)
    return relation


_READERS: Mapping[str, Callable[[Fields, str], Any]] = {
    "int": lambda row, key: row.whole(key),
    "bool": lambda row, key: row.flag(key),
    "str": lambda row, key: row.text(key),
    "Relation": _relation,
    "tuple[int, ...]": lambda row, key: row.wholes(key),
    "tuple[str, ...]": lambda row, key: row.texts(key),
    "Mapping[str, int]": lambda row, key: row.wholes_by_name(key),
}
"""Readers of a record's fields, by their types."""
