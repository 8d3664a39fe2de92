"""Summary of a compiled model: the text form of a plan, and its HTML in notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from distir_relax.ir import DTensorType, Function, HeadPartition, MicrobatchParts, Module, TensorType
from distir_relax.layout import DeviceMesh, print_placements
from distir_relax.simulation.footprint import footprint
from distir_relax.support.units import consecutive, count, listed, size

_MOST_TENSORS, _MOST_ROWS = 4, 16

_STYLE = """
<style>
.distir table { border-collapse: collapse; margin: .4em 0 .8em; font-variant-numeric: tabular-nums; }
.distir th, .distir td { border-bottom: 1px solid rgba(128,128,128,.4); padding: .15em .8em; text-align: left; }
.distir .number { text-align: right; }
.distir .scroll { overflow-x: auto; }
</style>
"""


@dataclass(frozen=True)
class TensorRow:
    """An input or output of the model; `placements` are those of each of its `parts` microbatches."""

    role: str
    name: str
    type: str
    placements: str
    parts: int = 1

    def __str__(self) -> str:
        several = f"in {self.parts} microbatches" if self.parts > 1 else ""
        return f"{self.name}: {' '.join(filter(None, (self.type, self.placements, several)))}"


@dataclass(frozen=True)
class RankRow:
    """Ranks that run one program, with the weight bytes of each, and the bytes it sends in a run (None: unknown)."""

    ranks: tuple[int, ...]
    program: str
    weights: int
    sent: int | None


@dataclass(frozen=True)
class Overview:
    """Mesh, tensors and ranks of a compiled model. `seconds` is the time of its passes, `value` one to explain.

    `heads` describes heads that are divided apart from their groups (`HeadPartition`).
    """

    name: str
    mesh: DeviceMesh
    headline: str
    tensors: tuple[TensorRow, ...]
    ranks: tuple[RankRow, ...]
    tail: str
    seconds: float
    value: str
    heads: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, modules: Mapping[str, Module], tail: str, seconds: float) -> Overview:
        """Summarize the programs at the stages ``sharded``, ``distributed`` and ``ranked``."""
        sharded, distributed, ranked = (modules[stage] for stage in ("sharded", "distributed", "ranked"))
        usage = footprint(distributed, ranked)
        groups: dict[tuple[str, int, int | None], list[int]] = {}
        for rank, program in enumerate(ranked.ranks):
            sent = None if usage.sent is None else usage.sent[rank]
            groups.setdefault((program, usage.weights[rank], sent), []).append(rank)
        return cls(
            name, distributed.meshes[0], str(usage), tuple(_tensors(sharded, distributed)),
            tuple(RankRow(tuple(ranks), *key) for key, ranks in groups.items()), tail, seconds,
            sharded.main.outputs[0].value.name,
            tuple(dict.fromkeys(r.description for r in sharded.records if isinstance(r, HeadPartition))),
        )  # fmt: skip

    def __str__(self) -> str:
        def tensors(role: str) -> str:
            return listed([str(row) for row in self.tensors if row.role == role], _MOST_TENSORS) or "none"

        return "\n".join(
            [
                f"{self.name}: {self.headline}",
                f"  mesh     {self.mesh}",
                f"  inputs   {tensors('input')}",
                f"  outputs  {tensors('output')}",
                *([f"  heads    {'; '.join(self.heads)}"] if self.heads else ()),
                f"  passes   {self.seconds * 1e3:.3g} ms, tail {self.tail}",
            ]
        )

    def html(self) -> str:
        """Return the summary as an HTML fragment with tables of tensors and ranks, in the surrounding colours."""
        axes = " x ".join(f"{axis} {extent}" for axis, extent in zip(self.mesh.axes, self.mesh.shape, strict=True))
        tensors = [(row.role, row.name, row.type, row.placements, str(row.parts)) for row in self.tensors]
        ranks = [
            (
                _ranges(row.ranks), row.program, size(row.weights), "unknown" if row.sent is None else size(row.sent),
            )
            for row in self.ranks
        ]  # fmt: skip
        command = escape(f"distir explain {self.name}.dist %{self.value}")
        return (
            f'<div class="distir">{_STYLE}'
            f"<strong>{escape(self.name)}</strong>: {escape(self.headline)}<br>"
            f"mesh: {escape(axes)}; tail: {escape(self.tail)}; passes: {self.seconds * 1e3:.3g} ms"
            + _table(("", "tensor", "type", "placements", "microbatches"), tensors, (4,))
            + _table(("ranks", "program", "weights of each", "sent by each"), ranks, (2, 3))
            + "".join(f"<p>tensor ranks: {escape(text)}</p>" for text in self.heads)
            + f"<code>plan.save({escape(repr(self.name + '.dist'))})</code>, then <code>{command}</code>, explains the "
            'layout of a value; <code>print(plan.text("sharded"))</code> shows all layouts.</div>'
        )


def _tensors(sharded: Module, distributed: Module) -> list[TensorRow]:
    """Return the rows of the inputs and outputs; a distributed program that is a part has some of the sharded one."""
    main, present = sharded.main, {(role, name) for role, name, _ in _inputs_and_outputs(distributed.main)}
    microbatched = {
        part: record for record in sharded.records if isinstance(record, MicrobatchParts) for part in record.parts
    }  # fmt: skip
    rows: dict[tuple[str, str], TensorRow] = {}
    for role, name, kind in _inputs_and_outputs(main):
        if (role, name) not in present:
            continue
        record = microbatched.get(name)
        row = _row(role, name, kind) if record is None else _microbatched_row(role, record, kind, main)
        rows.setdefault((role, row.name), row)
    return list(rows.values())


def _inputs_and_outputs(main: Function) -> list[tuple[str, str, object]]:
    inputs = [("input", i.value.name, i.value.type) for i in main.inputs if i.role == "input"]
    return [*inputs, *(("output", o.name, o.value.type) for o in main.outputs)]


def _row(role: str, name: str, kind: object) -> TensorRow:
    if isinstance(kind, DTensorType):
        return TensorRow(role, name, str(TensorType(kind.shape, kind.dtype)), print_placements(kind.placements))
    return TensorRow(role, name, str(kind), "")


def _microbatched_row(role: str, record: MicrobatchParts, kind: object, main: Function) -> TensorRow:
    kinds = {name: kind for where, name, kind in _inputs_and_outputs(main) if where == role}
    parts = [part for name in record.parts if isinstance(part := kinds.get(name), DTensorType)]
    if not isinstance(kind, DTensorType) or len(parts) != len(record.parts):
        return _row(role, record.value, kind)
    shape = list(kind.shape)
    shape[record.dim] = sum(part.shape[record.dim] for part in parts)
    global_type = TensorType(tuple(shape), kind.dtype)
    return TensorRow(role, record.value, str(global_type), print_placements(kind.placements), len(parts))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        marks = [' class="number"' if i in numbers else "" for i in range(len(cells))]
        inner = (f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    body = [line("td", row) for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        body.append(f'<tr><td colspan="{len(head)}">and {len(rows) - _MOST_ROWS} more</td></tr>')
    return f'<div class="scroll"><table>{line("th", head)}{"".join(body)}</table></div>'


def _ranges(ranks: Sequence[int]) -> str:
    """Format ascending ranks: ``0 to 3, 7``."""
    texts = [f"{first} to {last}" if last > first else str(first) for first, last in consecutive(ranks)]
    return ", ".join(texts[:8]) + (f" and {count(len(texts) - 8, 'range')} more" if len(texts) > 8 else "")
