"""Page of a post-mortem file: one self-contained HTML file with the position, step times and stacks of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from distir_relax.errors import RunError
from distir_relax.report.curves import Curve, chart
from distir_relax.report.page import figure
from distir_relax.support import Fields, is_finite, parse_json, read_bytes
from distir_relax.support.files import write_text
from distir_relax.support.units import seconds, size

_MOST = 1 << 28
_KINDS = ("c0", "c1", "c2", "c3")


def write_post_mortem_page(file: Path, page: Path) -> None:
    """Write the page of a post-mortem file. Raise RunError for a file of another form, and if it cannot be written."""
    write_text(page, post_mortem_page(file))


def post_mortem_page(file: Path) -> str:
    """Return the page of a post-mortem file as HTML. Raise RunError if it cannot be read, or has another form."""
    where = str(file)
    content = Fields.of(parse_json(read_bytes(file, RunError, _MOST), RunError, where), RunError, where)
    missing, ranks = content.fields("missing"), content.rows("ranks")
    folder = resources.files("distir_relax.report") / "templates"
    collective = missing.text("collective")
    return Template((folder / "post_mortem.html").read_text()).substitute(
        title=escape(content.text("failure")),
        style=(folder / "page.css").read_text(),
        headline="".join(_headline(content.text("time"), missing, ranks)),
        note=escape(f"Most ranks wait in {collective}" if collective else ""),
        ranks="".join(map(_row, ranks)),
        steps=chart("seconds by step", [*_curves(ranks)], seconds, from_zero=True),
        threads="".join(text for rank in ranks for text in _threads(rank)),
    )


def _headline(time: str, missing: Fields, ranks: Sequence[Fields]) -> Iterator[str]:
    yield figure("time", time, "")
    recorded = sum("host" in rank.table for rank in ranks)
    yield figure("ranks", str(len(ranks)), f"{recorded} of them left a record", recorded < len(ranks))
    if numbers := missing.wholes("ranks"):
        yield figure("missing", f"rank {', '.join(map(str, numbers))}", "from the collective of most ranks", True)


def _row(rank: Fields) -> str:
    waiting, steps = rank.table.get("collective"), _steps(rank)
    waits = waiting.get("seconds") if isinstance(waiting, dict) else None
    peak = rank.whole("peak_memory") if "peak_memory" in rank.table else None
    words = (rank.text("host", ""), rank.text("position"))
    numbers = (
        seconds(float(waits)) if waits is not None and is_finite(waits) else "", seconds(steps[-1]) if steps else "",
        "" if peak is None else size(peak),
    )  # fmt: skip
    cells = [
        f"<td>{rank.whole('rank')}</td>", *(f'<td class="words">{escape(word)}</td>' for word in words),
        *(f"<td>{escape(number)}</td>" for number in numbers),
    ]  # fmt: skip
    return f"<tr>{''.join(cells)}</tr>"


def _steps(rank: Fields) -> tuple[float, ...]:
    return rank.numbers("step_seconds") if "step_seconds" in rank.table else ()


def _curves(ranks: Sequence[Fields]) -> Iterator[Curve]:
    for rank, kind in zip(ranks, _KINDS, strict=False):
        if points := [*enumerate(_steps(rank))]:
            yield Curve(f"rank {rank.whole('rank')}", kind, points)


def _threads(rank: Fields) -> Iterator[str]:
    if "threads" in rank.table:
        threads, number = rank.fields("threads"), rank.whole("rank")
        for name in threads.table:
            stack = escape("\n".join(threads.texts(name)))
            summary = f"<summary>rank {number}: {escape(name)}</summary>"
            yield f'<details>{summary}<pre tabindex="0">{stack}</pre></details>'
