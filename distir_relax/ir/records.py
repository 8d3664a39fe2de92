"""What passes find out about a program: records that travel with its module.

A record is data, never prose that is parsed again; `str` says it to a person. A bundle keeps records as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields

from distir_relax.errors import ParseError
from distir_relax.reading import Fields, parse_json, shown


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
class Repeated:
    """Of `count` microbatches only some are written out, for a simulation: each stands for those that do as it does.

    `firsts` are their numbers; each stands for all up to the next. `roots` are the values that belong to one of them
    though nothing that they are made of does, each as ``name:part``.
    """

    count: int
    firsts: str
    roots: str = ""

    @property
    def parts(self) -> tuple[range, ...]:
        """The microbatches that each of those written out stands for."""
        firsts = [int(number) for number in self.firsts.split()]
        return tuple(range(a, b) for a, b in zip(firsts, (*firsts[1:], self.count), strict=True))

    @property
    def part_of(self) -> dict[str, int]:
        """To which of those written out each root belongs."""
        pairs = (root.rpartition(":") for root in self.roots.split())
        return {name: int(part) for name, _, part in pairs}

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


Record = Reason | Gather | BatchDim | Divided | Repeated | Scheduled

_KINDS: dict[str, type[Record]] = {
    "reason": Reason,
    "gather": Gather,
    "batch dim": BatchDim,
    "divided": Divided,
    "repeated": Repeated,
    "scheduled": Scheduled,
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
