"""Overview of a bundle: programs, layouts of weights with their causes, communication, and memory of each rank."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distir_relax.bundle import RECORDS_FILE, STAGE_FILES, Bundle, Tensor, local_bytes
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.cost.profile import Profile
from distir_relax.ir import Autosharding, DTensorType, Function, Gather, Module, Reason, parse_records
from distir_relax.ir.symbols import at_sizes, check_symbols, module_symbols
from distir_relax.layout import DTYPES, R, evaluate_size
from distir_relax.ops import Trait, lookup
from distir_relax.report.layout_text import by_pattern, pattern, short_layout, summarize_names
from distir_relax.report.sensitivity import bound_text
from distir_relax.report.split_algorithms import AlgorithmRow, algorithm_rows
from distir_relax.report.text_table import align_columns
from distir_relax.runtime.verification import read_stage
from distir_relax.simulation.communication_matrix import Traffic, traffic_by_kind
from distir_relax.simulation.footprint import footprint
from distir_relax.simulation.sensitivity import Sensitivity, sensitivity
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from distir_relax.support.units import consecutive, count, listed, size

_MOST_CLASSES, _MOST_ROWS, _MOST_GROUPS, _MOST_NAMES = 14, 8, 4, 6
_CAUSE_WIDTH = 44
_WIDTH = 116
_SCALARS = ("name", "model", "kind", "tail", "microbatches", "searched", "results")


@dataclass(frozen=True)
class ProgramRow:
    """Ranks that run one program, with the bytes of weights of each, and those it sends in a run (None: unknown)."""

    program: str
    ranks: tuple[int, ...]
    ops: int
    weight_bytes: int
    sent_bytes: int | None


@dataclass(frozen=True)
class WeightClass:
    """Weights whose names differ in numbers alone, with one type, layout and cause.

    `bytes` are those of all of them, `rank_bytes` the most that a rank holds. `cause` is empty if they are replicated.
    """

    name: str
    values: tuple[str, ...]
    role: str
    type: str
    placements: str
    bytes: int
    rank_bytes: int
    cause: str
    is_replicated: bool


@dataclass(frozen=True)
class Cause:
    """An annotation or a strategy, and the values that are split along a mesh axis because of it."""

    annotation: str
    axis: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class GatherRow:
    """A tensor that is gathered without a request: see `Gather`."""

    value: str
    placements: str
    bytes: int
    op: str
    location: str


@dataclass(frozen=True)
class Prediction:
    """The predicted run on a machine."""

    simulation: Simulation
    limits: Sensitivity


@dataclass(frozen=True)
class Overview:
    """The whole picture of a bundle. `replicated` are results of ops of which each device has all, of `results`.

    Bytes are those of typical sizes, or those given for symbolic ones, `sizes`.
    """

    name: str
    model: str | None
    kind: str
    mesh: Mapping[str, int]
    tail: str
    microbatches: int
    sizes: Mapping[str, int]
    searched: str | None
    programs: tuple[ProgramRow, ...]
    weights: tuple[WeightClass, ...]
    causes: tuple[Cause, ...]
    algorithms: tuple[AlgorithmRow, ...]
    traffic: tuple[Traffic, ...]
    gathers: tuple[GatherRow, ...]
    replicated: Mapping[str, int]
    results: int
    rank_bytes: tuple[int, ...]
    prediction: Prediction | None = field(default=None, repr=False)

    def __str__(self) -> str:
        parts = [self._head(), self._programs(), self._weights(), self._causes(), self._algorithms()]
        parts += [self._replicated(), self._traffic(), self._gathers(), self._prediction()]
        return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))

    def as_json(self) -> dict[str, Any]:
        """Return the overview as plain values."""
        plain = {name: getattr(self, name) for name in _SCALARS}
        plain |= {"mesh": dict(self.mesh), "sizes": dict(self.sizes), "replicated": dict(self.replicated)}
        for name in ("programs", "weights", "causes", "algorithms", "traffic", "gathers"):
            plain[name] = [asdict(row) for row in getattr(self, name)]
        plain["rank_bytes"] = list(self.rank_bytes)
        if self.prediction is not None:
            found = self.prediction.simulation
            plain["prediction"] = {**found.as_json(), "sensitivity": self.prediction.limits.as_json()}
        return plain

    def _head(self) -> Iterator[str]:
        axes = " x ".join(f"{axis} {extent}" for axis, extent in self.mesh.items())
        ranks = len(self.rank_bytes)
        model = f" of {self.model}" if self.model else ""
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        yield f"{self.name}: {self.kind}{model}, {count(ranks, 'rank')}, mesh {axes}{parts}, tail {self.tail}"
        if self.sizes:
            yield f"bytes and times are those of {', '.join(f'{name} = {n}' for name, n in self.sizes.items())}"
        if self.searched:
            yield self.searched

    def _programs(self) -> Iterator[str]:
        head = ("program", "ranks", "ops", "weights of each", "sent by each")
        rows = [
            (
                row.program, _ranges(row.ranks), f"{row.ops:,}", size(row.weight_bytes),
                "unknown" if row.sent_bytes is None else size(row.sent_bytes),
            )
            for row in self.programs[:_MOST_ROWS]
        ]  # fmt: skip
        yield from align_columns([head, *rows], left=(0, 1))
        if rest := self.programs[_MOST_ROWS:]:
            yield f"and {count(len(rest), 'more row')}: --json has all"

    def _weights(self) -> Iterator[str]:
        if not self.weights:
            return
        head = ("weights", "number", "type", "placements", "bytes", "on a rank", "cause")
        state = [row for row in self.weights if row.role == "state"]
        others = [row for row in self.weights if row.role != "state"]
        rows = [
            (
                row.name, str(len(row.values)), row.type, row.placements, size(row.bytes), size(row.rank_bytes),
                textwrap.shorten(row.cause, _CAUSE_WIDTH, placeholder="..."),
            )
            for row in others[:_MOST_CLASSES]
        ]  # fmt: skip
        smaller = others[_MOST_CLASSES:]
        for title, rest in ((f"{len(smaller)} smaller classes", smaller), ("state", state)):
            if rest:
                number, total, held = (
                    sum(column) for column in zip(*((len(r.values), r.bytes, r.rank_bytes) for r in rest), strict=True)
                )
                layouts: Counter[str] = Counter()
                for row in rest:
                    layouts[row.placements] += row.bytes
                layout = listed([layout for layout, _ in layouts.most_common()], 1)
                rows.append((title, str(number), "", layout, size(total), f"<= {size(held)}", ""))
        yield from align_columns([head, *rows], left=(0, 2, 3, 6))

    def _causes(self) -> Iterator[str]:
        if not self.causes:
            return
        yield "splits, by what causes them:"
        for cause in self.causes[:_MOST_GROUPS]:
            names = [summarize_names(names) for names in by_pattern(cause.values).values()]
            text = f"{cause.annotation} splits {count(len(cause.values), 'value')} along {cause.axis}: "
            yield from _wrapped(text + listed(names, _MOST_NAMES))
        if rest := self.causes[_MOST_GROUPS:]:
            yield f"  and {count(len(rest), 'more cause')}: --json has all"

    def _algorithms(self) -> Iterator[str]:
        rows = [("split op", "in", "number", "along", "algorithm", "sent by each, for one op")]
        for row in self.algorithms[:_MOST_ROWS]:
            sent = ", ".join(f"{name} {size(n)}" for name, n in row.collectives.items())
            rows.append((row.op, pattern(row.places[0]), str(len(row.places)), row.axis, row.algorithm, sent))
        if self.algorithms:
            yield from align_columns(rows, left=(0, 1, 3, 4, 5))
        if rest := self.algorithms[_MOST_ROWS:]:
            yield f"and {count(len(rest), 'more row')}: --json has all"

    def _replicated(self) -> Iterator[str]:
        weights = [row for row in self.weights if row.is_replicated]
        if len(self.rank_bytes) == 1 or not (weights or self.replicated):
            return
        yield "not sharded:"
        if weights:
            number, total = sum(len(row.values) for row in weights), sum(row.bytes for row in weights)
            title = f"{count(number, 'weight')}{' and states' if any(row.role == 'state' for row in weights) else ''}"
            text = f"{title}, {size(total)}: {listed([row.name for row in weights], _MOST_NAMES)}"
            yield from _wrapped(text)
        if self.replicated:
            patterns = by_pattern(self.replicated)
            totals = {name: sum(self.replicated[value] for value in values) for name, values in patterns.items()}
            largest = sorted(patterns, key=lambda name: -totals[name])
            names = [f"{summarize_names(patterns[name])} ({size(totals[name])})" for name in largest]
            text = f"{len(self.replicated)} of {count(self.results, 'result')} of ops: {listed(names, _MOST_NAMES)}"
            yield from _wrapped(text)

    def _traffic(self) -> Iterator[str]:
        if not self.traffic:
            yield "no communication between ranks"
            return
        head = ("communication", "along", "times", "sent in all", "by a rank")
        rows = [
            (
                row.name, row.axis, f"{row.times:,}",
                *(
                    ("unknown", "unknown") if row.bytes is None
                    else (size(row.bytes), size(row.bytes / len(self.rank_bytes)))
                ),
            )
            for row in self.traffic
        ]  # fmt: skip
        yield from align_columns([head, *rows], left=(0, 1))

    def _gathers(self) -> Iterator[str]:
        groups: dict[tuple[str, str, str, str], list[GatherRow]] = {}
        for row in self.gathers:
            groups.setdefault((pattern(row.value), row.placements, row.op, row.location), []).append(row)
        if groups:
            yield "gathered without a request:"
        for (_, placements, op, location), rows in list(groups.items())[:_MOST_GROUPS]:
            names = summarize_names([f"%{row.value}" for row in rows])
            total = sum(row.bytes for row in rows)
            yield from _wrapped(f"{names} ({placements}), {size(total)}, for {op}  # {location}")
        if len(groups) > _MOST_GROUPS:
            yield f"  and {len(groups) - _MOST_GROUPS} more: --json has all"

    def _prediction(self) -> Iterator[str]:
        low, high = size(min(self.rank_bytes)), size(max(self.rank_bytes))
        held = low if low == high else f"{low} to {high}"
        if self.prediction is None:
            yield f"memory: a rank holds {held} of weights and state; --profile predicts its peak, and the time"
            return
        found = self.prediction.simulation
        yield from str(found).splitlines()
        if len(found.members) > 1:
            peaks = [size(float(n)) for n in (found.peak_memory.min(), found.peak_memory.max())]
            yield f"          peaks of ranks from {peaks[0]} to {peaks[1]}, weights and state {held}"
        yield bound_text(self.prediction.limits)


def overview(bundle: Bundle, profile: Profile | None = None, dims: Mapping[str, int] | None = None) -> Overview:
    """Return the overview of a bundle, with a prediction if there is a machine.

    `dims` are values of symbolic sizes by name; others have their typical values. Raises `DistIRError` for a name that
    the program does not have, `BundleError` if the text of a stage is missing or damaged, `ProfileError` if the machine
    has too few devices.
    """
    manifest = bundle.manifest
    distributed, ranked = (read_stage(bundle, stage) for stage in ("distributed", "ranked"))
    symbols = module_symbols(distributed)
    check_symbols(dims or {}, symbols)
    at = {name: (dims or {}).get(name, symbol.typical) for name, symbol in symbols.items()}
    distributed, ranked = _at(distributed, at), _at(ranked, at)
    # A program that was written at the distributed stage has no layouts of whole tensors.
    sharded = _at(read_stage(bundle, "sharded"), at) if STAGE_FILES["sharded"] in bundle.texts else None
    known = {symbol.name: symbol for symbol in manifest.symbols}
    records = parse_records(bundle.records, RECORDS_FILE, known) if RECORDS_FILE in bundle.texts else ()
    reasons = [record for record in records if isinstance(record, Reason)]
    replicated, results = _replicated_results(sharded)
    return Overview(
        name=manifest.name,
        model=manifest.provenance.model,
        kind=_kind(bundle),
        mesh=dict(zip(manifest.mesh.axes, manifest.mesh.shape, strict=True)),
        tail=manifest.tail,
        microbatches=max([len(d.parts) for d in (*manifest.divided_inputs, *manifest.divided_outputs)], default=1),
        sizes=at,
        searched=next((str(record) for record in records if isinstance(record, Autosharding)), None),
        programs=_program_rows(distributed, ranked),
        weights=_weight_classes(bundle, sharded, reasons),
        causes=_causes(sharded, reasons),
        algorithms=() if sharded is None else algorithm_rows(sharded),
        traffic=tuple(traffic_by_kind(distributed)),
        gathers=tuple(_gather_row(record, at) for record in records if isinstance(record, Gather)),
        replicated=replicated,
        results=results,
        rank_bytes=tuple(
            sum(local_bytes(tensor, manifest.mesh, rank) for tensor in manifest.weights)
            for rank in range(manifest.mesh.size)
        ),
        prediction=None if profile is None else _predict(distributed, profile),
    )


def _kind(bundle: Bundle) -> str:
    manifest = bundle.manifest
    if manifest.training is not None:
        return "training step"
    if manifest.encoder is not None:
        return "encoder and decoder"
    if manifest.states:
        return "program that continues sequences"
    return "program that updates its weights" if manifest.updates else "program"


def _predict(distributed: Module, profile: Profile) -> Prediction:
    simulation = simulate_module(fuse_for_ranks(distributed), profile)
    return Prediction(simulation, sensitivity(simulation))


def _program_rows(distributed: Module, ranked: Module) -> tuple[ProgramRow, ...]:
    usage = footprint(distributed, ranked)
    groups: dict[tuple[str, int, int | None], list[int]] = {}
    for rank, program in enumerate(ranked.ranks):
        sent = None if usage.sent is None else usage.sent[rank]
        groups.setdefault((program, usage.weights[rank], sent), []).append(rank)
    ops = {name: _op_count(ranked, ranked.function(name)) for name in set(ranked.ranks)}
    return tuple(
        ProgramRow(program, tuple(ranks), ops[program], weights, sent)
        for (program, weights, sent), ranks in groups.items()
    )


def _op_count(module: Module, function: Function) -> int:
    """Count the ops of a program, those of its callees for each call."""
    return sum(_op_count(module, module.function(op.callee)) if op.callee else 1 for op in function.ops)


def _weight_classes(bundle: Bundle, sharded: Module | None, reasons: Sequence[Reason]) -> tuple[WeightClass, ...]:
    manifest = bundle.manifest
    items = {} if sharded is None else {item.value.name: item for item in sharded.main.inputs}
    by_value: dict[str, list[Reason]] = {}
    for name, reason in _reasons_of_inputs(sharded, reasons):
        by_value.setdefault(name, []).append(reason)
    size_of_mesh = manifest.mesh.size
    groups: dict[tuple[str, str, str, str, str], list[str]] = {}
    replicated: dict[tuple[str, str, str, str, str], bool] = {}
    for tensor in manifest.weights:
        item = items.get(tensor.name)
        layout, is_replicated = tensor.placement, not tensor.shards
        if item is not None and sharded is not None and isinstance(item.value.type, DTensorType):
            layout = short_layout(item.value.type, sharded.meshes[0])
        holders = size_of_mesh if tensor.ranks is None else len(tensor.ranks)
        if holders < size_of_mesh:
            layout += f", on {count(holders, 'rank')}"
        is_replicated = is_replicated and holders > 1
        cause = "; ".join(dict.fromkeys(_cause_text(reason) for reason in by_value.get(tensor.name, ())))
        role = "parameter" if item is None else item.role
        type_ = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
        key = (pattern(tensor.name), role, type_, layout, cause)
        groups.setdefault(key, []).append(tensor.name)
        replicated[key] = is_replicated
    tensors = {tensor.name: tensor for tensor in manifest.weights}
    rows = []
    for key, values in groups.items():
        held = [
            sum(local_bytes(tensors[value], manifest.mesh, rank) for value in values) for rank in range(size_of_mesh)
        ]
        total = sum(_global_bytes(tensors[value]) for value in values)
        name, role, type_, layout, cause = key
        rows.append(WeightClass(name, tuple(values), role, type_, layout, total, max(held), cause, replicated[key]))
    return tuple(sorted(rows, key=lambda row: (row.role == "state", -row.bytes)))


def _reasons_of_inputs(sharded: Module | None, reasons: Sequence[Reason]) -> Iterator[tuple[str, Reason]]:
    """Yield the reasons of inputs of the entry, with their names: its own, else those of functions that take them."""
    if sharded is None:
        return
    by_value: dict[tuple[str, str], list[Reason]] = {}
    for reason in reasons:
        by_value.setdefault((reason.function, reason.value), []).append(reason)
    of_callees: dict[str, list[Reason]] = {}
    for op in sharded.main.ops:
        if op.callee:
            callee = sharded.function(op.callee)
            for operand, item in zip(op.operands, callee.inputs, strict=True):
                of_callees.setdefault(operand.name, []).extend(by_value.get((callee.name, item.value.name), ()))
    for item in sharded.main.inputs:
        name = item.value.name
        own = by_value.get((sharded.main.name, name)) or of_callees.get(name, [])
        yield from ((name, reason) for reason in own)


def _cause_text(reason: Reason) -> str:
    if reason.source:
        return f"{reason.op} {reason.factor} of %{pattern(reason.source)}"
    return "strategy" if reason.annotation.startswith("strategy ") else "annotated"


def _causes(sharded: Module | None, reasons: Sequence[Reason]) -> tuple[Cause, ...]:
    if sharded is None:
        return ()
    groups: dict[tuple[str, str], list[str]] = {}
    for reason in reasons:
        value = f"%{reason.value}" if reason.function == sharded.main.name else f"@{reason.function}.{reason.value}"
        key = (reason.annotation or "an annotation at an unknown place", sharded.meshes[0].axes[reason.axis])
        groups.setdefault(key, []).append(value)
    rows = [Cause(*key, tuple(dict.fromkeys(values))) for key, values in groups.items()]
    return tuple(sorted(rows, key=lambda row: -len(row.values)))


def _replicated_results(sharded: Module | None) -> tuple[dict[str, int], int]:
    """Return the bytes of the results of ops that every device has all of, by name, and the number of all results.

    Those of ops that only change layouts are left out.
    """
    if sharded is None:
        return {}, 0
    types = {
        f"%{value.name}" if function is sharded.main else f"@{function.name}.{value.name}": value.type
        for function in sharded.functions
        for op in function.ops
        if not op.callee and Trait.REDISTRIBUTION not in lookup(op.name, op.location).traits
        for value in op.results
    }
    layouts = {name: type_ for name, type_ in types.items() if isinstance(type_, DTensorType)}
    whole = {n: type_.tensor.bytes for n, type_ in layouts.items() if all(p == R for p in type_.placements)}
    return whole, len(layouts)


def _gather_row(record: Gather, sizes: Mapping[str, int]) -> GatherRow:
    size_of = evaluate_size(record.bytes, sizes)
    value = record.value if record.function == "main" else f"@{record.function}.{record.value}"
    return GatherRow(value, record.placements, int(size_of), record.op, record.location)


def _global_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype][1]


def _at(module: Module, sizes: Mapping[str, int]) -> Module:
    """Return a module at those of the sizes that it has."""
    names = module_symbols(module)
    return at_sizes(module, {name: n for name, n in sizes.items() if name in names})


def _ranges(ranks: Sequence[int]) -> str:
    """Format ascending ranks: ``ranks 0-3, 7``."""
    texts = [f"{first}-{last}" if last > first else str(first) for first, last in consecutive(ranks)]
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(texts, _MOST_ROWS)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
