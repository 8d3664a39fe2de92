"""Differences between two bundles of one model: times, memory, communication, and layouts of values."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from distir_relax.bundle import Bundle, local_bytes
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.cost.profile import Profile
from distir_relax.ir import DTensorType, Function, Module
from distir_relax.ir.symbols import at_sizes, check_symbols, module_symbols
from distir_relax.ops import Trait, lookup
from distir_relax.report.explain import read_alternatives
from distir_relax.report.layout_text import by_pattern, short_layout, summarize_names
from distir_relax.report.text_table import align_columns
from distir_relax.runtime.verification import read_stage
from distir_relax.sharding import call_counts, list_reshards
from distir_relax.simulation.simulator import simulate_module
from distir_relax.support.units import change, count, seconds, size

_MOST_GROUPS, _MOST_NAMES = 10, 12
"""Number of groups of changed layouts that are printed, and names per group."""


@dataclass(frozen=True)
class Predicted:
    """Results of a simulation: seconds of a step, and the peak memory of a device in bytes.

    Devices compute, communicate and wait for these times on average, which add up to a step.
    """

    seconds: float
    computing: float
    communicating: float
    waiting: float
    memory: float


@dataclass(frozen=True)
class Figures:
    """Costs of a bundle. `sent` are the bytes that each device sends in a step, with ring algorithms and shards of
    equal size, `weights` the weight bytes of each rank; `collectives` are counted by name and mesh axis.

    `predicted` is None without a machine.
    """

    sent: float
    weights: tuple[int, ...]
    collectives: Mapping[str, int]
    predicted: Predicted | None


@dataclass(frozen=True)
class LayoutChange:
    """Values with the layout `first` in one bundle and `second` in the other, of `bytes` bytes in total.

    If `given`, they are inputs, weights and state, otherwise results of ops.
    """

    first: str
    second: str
    given: bool
    values: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Difference:
    """Comparison of two bundles: `titles` are their names, `remarks` other differences, `machine` that of the times.

    `moved` has the values with different layouts, grouped by change, largest first.
    """

    titles: tuple[str, str]
    figures: tuple[Figures, Figures]
    machine: str
    moved: tuple[LayoutChange, ...]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.remarks, *_table(self), "", *_values(self)])

    def as_json(self) -> str:
        """Return all of it as JSON text, values by their names."""
        return json.dumps(asdict(self))


def diff(
    first: Bundle, second: Bundle, profile: Profile | None = None, dims: Mapping[str, int] | None = None
) -> Difference:
    """Compare two bundles; values are matched by name. `dims` are values of symbolic sizes, others are typical.

    Times and memory are predicted for the machine of `profile`, by default the one that placements of `first`, or of
    `second`, were searched for; without any they are omitted. Raises `BundleError` if a bundle lacks the text of its
    sharded or its distributed stage.
    """
    bundles = (first, second)
    stages = [read_stage(bundle, "sharded") for bundle in bundles]
    symbols = {name: symbol for module in stages for name, symbol in module_symbols(module).items()}
    check_symbols(dims or {}, symbols)
    sizes = [{n: size for n, size in (dims or {}).items() if n in module_symbols(module)} for module in stages]
    old, new = (at_sizes(module, values) for module, values in zip(stages, sizes, strict=True))
    searches = (read_alternatives(bundle, module) for bundle, module in zip(bundles, (old, new), strict=True))
    machine = profile or next((s.search.profile for s in searches if s is not None), None)
    names = [bundle.path.name if bundle.path else bundle.manifest.name for bundle in bundles]
    titles = ("first", "second") if names[0] == names[1] else (names[0], names[1])
    remarks = []
    if old.meshes != new.meshes:
        remarks.append(f"mesh: {old.meshes[0]} -> {new.meshes[0]}")
    if first.manifest.tail != second.manifest.tail:
        remarks.append(f"tail: {first.manifest.tail} -> {second.manifest.tail}")
    before, after = _layouts(old), _layouts(new)
    for title, only in ((titles[0], before.keys() - after.keys()), (titles[1], after.keys() - before.keys())):
        if only:
            remarks.append(
                f"{summarize_names(sorted(only)) if len(only) == 1 else f'{len(only)} values'} in {title} only"
            )
    figures = _figures(first, old, machine, sizes[0]), _figures(second, new, machine, sizes[1])
    return Difference(titles, figures, machine.name if machine else "", _moved(before, after), tuple(remarks))


@dataclass(frozen=True)
class _ValueLayout:
    layout: str
    bytes: int
    given: bool


def _layouts(module: Module) -> dict[str, _ValueLayout]:
    """Return the layout of each value, by name: inputs of the entry, and results of ops with partial sums reduced."""
    times, mesh = call_counts(module), module.meshes[0]
    inputs = ((f"%{i.value.name}", i.value.dtensor, 1, True) for i in module.main.inputs)
    results = (
        (f"%{name}" if function is module.main else f"@{function.name}.{name}", kind, times[function.name], False)
        for function in module.functions
        for name, kind in _op_results(function)
    )
    return {
        name: _ValueLayout(short_layout(kind, mesh), kind.tensor.bytes * count, given)
        for name, kind, count, given in itertools.chain(inputs, results)
    }


def _op_results(function: Function) -> Iterator[tuple[str, DTensorType]]:
    """Return the results of ops, except of in-place updates."""
    for op in function.ops:
        entry = lookup(op.name, op.location)
        is_reshard = Trait.REDISTRIBUTION in entry.traits
        for value in op.results if not entry.updates else ():
            # A reduced partial sum has the value's name; its operand has the suffix ".partial".
            reduced = is_reshard and op.operands[0].name.startswith(f"{value.name}.partial")
            if isinstance(value.type, DTensorType) and (reduced or not (is_reshard or ".partial" in value.name)):
                yield value.name, value.type


def _moved(before: Mapping[str, _ValueLayout], after: Mapping[str, _ValueLayout]) -> tuple[LayoutChange, ...]:
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name, old in before.items():
        if name in after and old.layout != after[name].layout:
            groups.setdefault((old.layout, after[name].layout, old.given), []).append(name)
    changes = [LayoutChange(*key, tuple(names), sum(before[n].bytes for n in names)) for key, names in groups.items()]
    return tuple(sorted(changes, key=lambda change: (not change.given, -change.bytes)))


def _figures(bundle: Bundle, module: Module, machine: Profile | None, sizes: Mapping[str, int]) -> Figures:
    counts: Counter[str] = Counter()
    sent = 0.0
    for reshard in list_reshards(module):
        sent += reshard.bytes * reshard.times
        for name, axis in reshard.collectives:
            counts[f"{name} along {axis}"] += reshard.times
    mesh = bundle.manifest.mesh
    weights = tuple(sum(local_bytes(t, mesh, rank) for t in bundle.manifest.weights) for rank in range(mesh.size))
    return Figures(sent, weights, dict(counts), None if machine is None else _predicted(bundle, machine, sizes))


def _predicted(bundle: Bundle, machine: Profile, sizes: Mapping[str, int]) -> Predicted:
    module = fuse_for_ranks(at_sizes(read_stage(bundle, "distributed"), sizes))
    result = simulate_module(module, machine.with_devices(bundle.manifest.mesh.size))
    computing, communicating, waiting = (float(t.mean()) for t in (result.compute, result.communicate, result.idle))
    return Predicted(result.makespan, computing, communicating, waiting, float(result.peak_memory.max()))


def _table(difference: Difference) -> list[str]:
    """Return a table of the costs of both, and the differences."""
    a, b = difference.figures
    rows = [("", *difference.titles, "")]
    if a.predicted and b.predicted:
        old, new = a.predicted, b.predicted
        rows.append(_row(f"a step on {difference.machine}", old.seconds, new.seconds, seconds))
        rows.append(_row("  computing", old.computing, new.computing, seconds))
        rows.append(_row("  communicating", old.communicating, new.communicating, seconds))
        rows.append(_row("  waiting", old.waiting, new.waiting, seconds))
        rows.append(_row("memory of a device, at most", old.memory, new.memory, size))
    rows.append(_row("weights of a rank, at most", max(a.weights), max(b.weights), size))
    rows.append(_row("sent by a device in a step", a.sent, b.sent, size))
    for name in sorted(a.collectives.keys() | b.collectives.keys()):
        rows.append(_row(name, a.collectives.get(name, 0), b.collectives.get(name, 0), lambda n: f"{n:.0f}"))
    return align_columns(rows)


def _row(title: str, old: float, new: float, unit: Callable[[float], str]) -> tuple[str, str, str, str]:
    more = change(new, old, unit)
    share = f" ({new / old - 1:+.1%})" if old and more != "0" else ""
    return title, unit(old), unit(new), more + share


def _values(difference: Difference) -> list[str]:
    """List the values with different layouts, by change; values of repeated names and blocks once."""
    if not difference.moved:
        return ["all common values have equal layouts"]
    lines = []
    for given, title in ((True, "inputs, weights and state"), (False, "results of ops")):
        if groups := [moved for moved in difference.moved if moved.given == given]:
            lines.append(f"{title}, {difference.titles[0]} -> {difference.titles[1]}:")
            for moved in groups[:_MOST_GROUPS]:
                lines += _group(moved)
            if rest := groups[_MOST_GROUPS:]:
                values = sum(len(moved.values) for moved in rest)
                lines.append(f"  {count(values, 'value')} in {count(len(rest), 'smaller group')}: --json has all")
    return lines


def _group(moved: LayoutChange) -> list[str]:
    names = [summarize_names(names) for names in by_pattern(moved.values).values()]
    more = len(names) - _MOST_NAMES
    text = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more names" if more > 0 else "")
    head = f"  {moved.first} -> {moved.second}  ({count(len(moved.values), 'value')}, {size(moved.bytes)})"
    return [head, *textwrap.wrap(text, 116, initial_indent="    ", subsequent_indent="    ")]
