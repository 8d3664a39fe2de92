"""What passes find out about a program: records that travel with its module.

A record is data, never prose that is parsed again; `str` says it to a person. A bundle keeps records as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace

from distir_relax.errors import ParseError
from distir_relax.support import Fields, parse_json, shown
from distir_relax.support.units import seconds, size


@dataclass(frozen=True, slots=True)
class Reason:
    """Why `value` of a function is split along mesh axis number `axis`.

    `annotation` is the place of the user's mark that decides it. Where the mark is on another value, the split came
    from `source` through `factor` of the op `op`.
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
        """The annotation, in words."""
        return f"from the annotation at {self.annotation or 'an unknown place'}"

    def __str__(self) -> str:
        return f"{self.root}, through {self.op} {self.factor} of %{self.source}" if self.source else self.root


@dataclass(frozen=True, slots=True)
class Gather:
    """A split tensor that is gathered though nobody asked for it.

    `value` is what the `redistribute` gives, `source` what it takes, laid out as `placements`; `bytes` is the size of
    the whole tensor; `op` needs the whole of a split dim, at `location` of the user's model.
    """

    value: str
    source: str
    placements: str
    bytes: int
    op: str
    location: str = ""
    function: str = "main"

    def __str__(self) -> str:
        return (
            f"{self.location or 'the program'}: %{self.source} ({self.placements}) is gathered, {self.bytes:,} bytes, "
            f"because {self.op} needs the whole of a split dim"
        )


@dataclass(frozen=True, slots=True)
class BatchDim:
    """An input has its samples along a dim: `size` of them, or a multiple."""

    value: str
    dim: int
    size: int

    def __str__(self) -> str:
        return f"%{self.value} has {self.size} samples along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class Divided:
    """An input or output (`role`) that the program takes, or gives, in several along a dim: `parts` are their names."""

    role: str
    value: str
    dim: int
    parts: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in order."""
        return tuple(self.parts.split())

    def __str__(self) -> str:
        return f"the {self.role} {self.value} is {len(self.names)} parts along dim {self.dim}: {self.parts}"


@dataclass(frozen=True, slots=True)
class Collected:
    """Rank 0 assembles an `output` of so many `bytes`; a part of another rank comes through a `buffer`, in bytes.

    The buffer is 0 where parts are received straight into their place.
    """

    output: str
    bytes: int
    buffer: int

    def __str__(self) -> str:
        return f"rank 0 assembles the output {self.output}, {size(self.bytes)}"


@dataclass(frozen=True, slots=True)
class Repeated:
    """Of `count` microbatches only some are written out, for a simulation: each stands for those that do as it does.

    `firsts` are their numbers; each stands for all up to the next. The first stands for itself alone, and, where
    something is `summed` over them (0: nothing is), so does the last. `parts` says of which of those a value is, as
    ``name:part``, and `totals` are the values of the last that are made of all of them.
    """

    count: int
    firsts: str
    parts: str = ""
    totals: str = ""
    summed: int = 1

    @property
    def ranges(self) -> tuple[range, ...]:
        """The microbatches that each of those written out stands for."""
        firsts = [int(number) for number in self.firsts.split()]
        return tuple(range(a, b) for a, b in zip(firsts, (*firsts[1:], self.count), strict=True))

    @property
    def part_of(self) -> dict[str, int]:
        """The number of the part, among those written out, that each value belongs to, by name."""
        pairs = (item.rpartition(":") for item in self.parts.split())
        return {name: int(part) for name, _, part in pairs}

    def renamed(self, names: Mapping[str, str]) -> Repeated:
        """With further values, by name, each of the part of another; names lead from the new to the old."""
        part_of, totals = self.part_of, set(self.totals.split())
        parts = [f"{new}:{part_of[old]}" for new, old in names.items() if old in part_of]
        more = [new for new, old in names.items() if old in totals]
        return replace(self, parts=" ".join((self.parts, *parts)), totals=" ".join((self.totals, *more)))

    def __str__(self) -> str:
        return f"microbatches {self.firsts} stand for {self.count}"


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The tasks of a pipeline in the order in which its places are to do them, as ``1F0`` and so on."""

    tasks: str

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks, in order."""
        return tuple(self.tasks.split())

    def __str__(self) -> str:
        return f"the tasks in order: {self.tasks}"


@dataclass(frozen=True, slots=True)
class Searched:
    """Placements that were looked for on the machine `profile`: a step takes `time`, and no less than `bound` in any
    others, both in picoseconds; a device needs `bytes`."""

    profile: str
    time: int
    bound: int
    bytes: int

    @property
    def gap(self) -> float:
        """How much of its time could be saved at most."""
        return max(0.0, 1.0 - self.bound / self.time) if self.time else 0.0

    def __str__(self) -> str:
        return (
            f"placements found for {self.profile}: {seconds(self.time * 1e-12)} a step, at most {self.gap:.2%} from "
            f"the best there are, {size(self.bytes)} on a device"
        )


Record = Reason | Gather | BatchDim | Divided | Collected | Repeated | Scheduled | Searched

_KINDS: dict[str, type[Record]] = {
    "reason": Reason,
    "gather": Gather,
    "batch dim": BatchDim,
    "divided": Divided,
    "collected": Collected,
    "repeated": Repeated,
    "scheduled": Scheduled,
    "searched": Searched,
}


def print_records(records: Sequence[Record]) -> str:
    """Records as JSON, one a line; `parse_records` reads them back."""
    names = {kind: name for name, kind in _KINDS.items()}
    lines = [json.dumps({"record": names[type(record)], **asdict(record)}) for record in records]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def parse_records(text: str, where: str = "") -> tuple[Record, ...]:
    """The inverse of `print_records`. Raises `ParseError` for other texts, with the record."""
    rows = parse_json(text, ParseError, where)
    if not isinstance(rows, list):
        raise ParseError(f"expected a list of records, found {shown(rows)}", where)
    return tuple(_record(Fields.of(row, ParseError, where, f"[{i}]")) for i, row in enumerate(rows))


def _record(row: Fields) -> Record:
    name = row.text("record")
    if name not in _KINDS:
        raise row.refuse(f"one of {', '.join(_KINDS)}", "record", name)
    kind = _KINDS[name]
    known = {item.name: item for item in fields(kind)}
    if unknown := sorted(row.table.keys() - known.keys() - {"record"}):
        raise row.refuse(f"a field of a {name}", unknown[0], row.table[unknown[0]])
    given = {
        key: row.whole(key) if item.type == "int" else row.text(key)
        for key, item in known.items()
        if key in row or item.default is MISSING
    }
    return kind(**given)  # type: ignore[arg-type]
