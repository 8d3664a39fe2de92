"""How two bundles of one model differ: what takes longer, needs more, is sent; which values lie otherwise."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from distir_relax.analysis.simulator import simulate_module
from distir_relax.bundle import Bundle, local_bytes
from distir_relax.compiler.pass_pipeline import as_ranks_run
from distir_relax.cost.profile import Profile
from distir_relax.ir import DTensorType, Function, Module
from distir_relax.ops import Trait, lookup
from distir_relax.report.explain import search_of
from distir_relax.report.layout_text import by_pattern, named, short
from distir_relax.report.text_table import aligned
from distir_relax.runtime.verification import read_stage
from distir_relax.sharding import call_counts, list_reshards
from distir_relax.support.units import change, count, seconds, size

_MOST_GROUPS, _MOST_NAMES = 10, 12
"""How many ways in which values lie otherwise are told, and how many names of each."""


@dataclass(frozen=True)
class Predicted:
    """What a simulation finds of a bundle: seconds of a step, and the bytes of memory that a device needs at most.

    Devices compute, communicate and wait for so long in the mean, which adds up to a step.
    """

    seconds: float
    computing: float
    communicating: float
    waiting: float
    memory: float


@dataclass(frozen=True)
class Figures:
    """What a bundle takes. `sent` are the bytes that each device sends in a step, with ring algorithms and shards of
    equal size, `weights` the bytes that each rank holds of them; `collectives` are counted by name and mesh axis.

    `predicted` is None where no machine is known.
    """

    sent: float
    weights: tuple[int, ...]
    collectives: Mapping[str, int]
    predicted: Predicted | None


@dataclass(frozen=True)
class Moved:
    """Values that lie as `first` in the one bundle and as `second` in the other, of so many `bytes` in all.

    They are inputs, weights and state, which are `given`, or what ops make.
    """

    first: str
    second: str
    given: bool
    values: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Difference:
    """Two bundles compared: `titles` name them, `remarks` say what else is unlike; `machine` is what times are for.

    `moved` has the values that lie otherwise, by how; the largest first.
    """

    titles: tuple[str, str]
    figures: tuple[Figures, Figures]
    machine: str
    moved: tuple[Moved, ...]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.remarks, *_table(self), "", *_values(self)])

    def as_json(self) -> str:
        """All of it as JSON text, values by their names."""
        return json.dumps(asdict(self))


def diff(first: Bundle, second: Bundle, profile: Profile | None = None) -> Difference:
    """What differs from `first` to `second`; values are matched by name.

    Times and memory are those of the machine of `profile`, without one of that which placements of `first`, or of
    `second`, were looked for on; where there is none they are left out. Raises `BundleError` when a bundle has no text
    of its sharded or its distributed stage.
    """
    bundles = (first, second)
    old, new = (read_stage(bundle, "sharded") for bundle in bundles)
    searches = (search_of(bundle, module) for bundle, module in zip(bundles, (old, new), strict=True))
    machine = profile or next((asked.search.profile for asked in searches if asked is not None), None)
    names = [bundle.path.name if bundle.path else bundle.manifest.name for bundle in bundles]
    titles = ("first", "second") if names[0] == names[1] else (names[0], names[1])
    remarks = []
    if old.meshes != new.meshes:
        remarks.append(f"mesh: {old.meshes[0]} -> {new.meshes[0]}")
    if first.manifest.tail != second.manifest.tail:
        remarks.append(f"tail: {first.manifest.tail} -> {second.manifest.tail}")
    before, after = _layouts(old), _layouts(new)
    for whose, alone in ((titles[0], before.keys() - after.keys()), (titles[1], after.keys() - before.keys())):
        if alone:
            remarks.append(f"{named(sorted(alone)) if len(alone) == 1 else f'{len(alone)} values'} in {whose} alone")
    figures = _figures(first, old, machine), _figures(second, new, machine)
    return Difference(titles, figures, machine.name if machine else "", _moved(before, after), tuple(remarks))


@dataclass(frozen=True)
class _Lies:
    layout: str
    bytes: int
    given: bool


def _layouts(module: Module) -> dict[str, _Lies]:
    """How each value of a program lies, by its name: inputs of the entry, and results of ops with their sums made."""
    times, mesh = call_counts(module), module.meshes[0]
    inputs = ((f"%{i.value.name}", i.value.dtensor, 1, True) for i in module.main.inputs)
    made = (
        (f"%{name}" if function is module.main else f"@{function.name}.{name}", kind, times[function.name], False)
        for function in module.functions
        for name, kind in _made_in(function)
    )
    return {
        name: _Lies(short(kind, mesh), kind.tensor.bytes * count, given)
        for name, kind, count, given in itertools.chain(inputs, made)
    }


def _made_in(function: Function) -> Iterator[tuple[str, DTensorType]]:
    """What ops make, but for what they update where it is."""
    for op in function.ops:
        entry = lookup(op.name, op.location)
        moves = Trait.REDISTRIBUTION in entry.traits
        for value in op.results if not entry.code.in_place else ():
            # A sum that is made has the value's name, and what it is made of a name with an end of its own.
            whole = moves and op.operands[0].name.startswith(f"{value.name}.partial")
            if isinstance(value.type, DTensorType) and (whole or not (moves or ".partial" in value.name)):
                yield value.name, value.type


def _moved(before: Mapping[str, _Lies], after: Mapping[str, _Lies]) -> tuple[Moved, ...]:
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name, old in before.items():
        if name in after and old.layout != after[name].layout:
            groups.setdefault((old.layout, after[name].layout, old.given), []).append(name)
    found = [Moved(*key, tuple(names), sum(before[name].bytes for name in names)) for key, names in groups.items()]
    return tuple(sorted(found, key=lambda moved: (not moved.given, -moved.bytes)))


def _figures(bundle: Bundle, module: Module, machine: Profile | None) -> Figures:
    counts: Counter[str] = Counter()
    sent = 0.0
    for moved in list_reshards(module):
        sent += moved.bytes * moved.times
        for name, axis in moved.collectives:
            counts[f"{name} along {axis}"] += moved.times
    mesh = bundle.manifest.mesh
    held = tuple(sum(local_bytes(t, mesh, rank) for t in bundle.manifest.weights) for rank in range(mesh.size))
    return Figures(sent, held, dict(counts), None if machine is None else _predicted(bundle, machine))


def _predicted(bundle: Bundle, machine: Profile) -> Predicted:
    module = as_ranks_run(read_stage(bundle, "distributed"))
    found = simulate_module(module, machine.with_devices(bundle.manifest.mesh.size))
    computing, communicating, waiting = (float(t.mean()) for t in (found.compute, found.communicate, found.idle))
    return Predicted(found.makespan, computing, communicating, waiting, float(found.peak_memory.max()))


def _table(found: Difference) -> list[str]:
    """The figures of both, and by how much those of the second are more."""
    a, b = found.figures
    rows = [("", *found.titles, "")]
    if a.predicted and b.predicted:
        old, new = a.predicted, b.predicted
        rows.append(_row(f"a step on {found.machine}", old.seconds, new.seconds, seconds))
        rows.append(_row("  computing", old.computing, new.computing, seconds))
        rows.append(_row("  communicating", old.communicating, new.communicating, seconds))
        rows.append(_row("  waiting", old.waiting, new.waiting, seconds))
        rows.append(_row("memory of a device, at most", old.memory, new.memory, size))
    rows.append(_row("weights of a rank, at most", max(a.weights), max(b.weights), size))
    rows.append(_row("sent by a device in a step", a.sent, b.sent, size))
    for name in sorted(a.collectives.keys() | b.collectives.keys()):
        rows.append(_row(name, a.collectives.get(name, 0), b.collectives.get(name, 0), lambda n: f"{n:.0f}"))
    return aligned(rows)


def _row(title: str, old: float, new: float, unit: Callable[[float], str]) -> tuple[str, str, str, str]:
    more = change(new, old, unit)
    share = f" ({new / old - 1:+.1%})" if old and more != "0" else ""
    return title, unit(old), unit(new), more + share


def _values(found: Difference) -> list[str]:
    """What lies otherwise, by how it does; values of repeated names, and of repeated blocks, once."""
    if not found.moved:
        return ["all values that both have lie alike"]
    lines = []
    for given, what in ((True, "inputs, weights and state"), (False, "what ops make")):
        if groups := [moved for moved in found.moved if moved.given == given]:
            lines.append(f"{what}, {found.titles[0]} -> {found.titles[1]}:")
            for moved in groups[:_MOST_GROUPS]:
                lines += _group(moved)
            if rest := groups[_MOST_GROUPS:]:
                values = sum(len(moved.values) for moved in rest)
                lines.append(f"  {count(values, 'value')} in {count(len(rest), 'smaller group')}: --json has all")
    return lines


def _group(moved: Moved) -> list[str]:
    names = [named(names) for names in by_pattern(moved.values).values()]
    more = len(names) - _MOST_NAMES
    told = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more names" if more > 0 else "")
    head = f"  {moved.first} -> {moved.second}  ({count(len(moved.values), 'value')}, {size(moved.bytes)})"
    return [head, *textwrap.wrap(told, 116, initial_indent="    ", subsequent_indent="    ")]
