"""The evaluation as one HTML file that needs nothing else: the tables, the pictures for light and for dark screens."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from distir_relax.support.units import count, seconds

from .comparison import Cell, Measured, Speedup, Table
from .figures import DARK, LIGHT, Picture
from .searches import Found

_INTRODUCTION = (
    "The paper's six models (benchmarks/paper/models.py), torch models without weights, imported and split by "
    "strategies; every configuration of its grid simulated on 16 devices. GPT-2 is a forward pass over sequences of 8 "
    "tokens, a sample is one of these: embeddings, blocks op by op, and the last norm, without a head. All is in "
    "float16, sums of gradients and the optimizer's step too: nothing is kept in float32, no loss scaling is counted."
)
_MISSING = (
    "What tables 2 and 3 say of the paper was measured on its DGX-2; what they say of ours is predicted. There is no "
    "such machine here.",
    "Table 1's times of trials and searches on the machine itself, and with ten trials behind a search.",
    "Table 4: 71 to 94 random configurations of each model were measured, and not published. There are 33 measurements "
    "of MLP 1B, read off a plot; the profile was fitted to them.",
    "Figures 5 to 7 as numbers: they are pictures without a table. The paper does not say the batches of figure 5.",
    "The paper's memory is of programs that keep more: layer sums and their ReLU, and 2P - 1 microbatches on a "
    "first stage. So what fits differs.",
)


def page(found: Sequence[Found], tables: Sequence[Table], drawn: Sequence[Picture], folder: Path,
         speedups: Sequence[Speedup], measured: Sequence[Measured]) -> str:  # fmt: skip
    """The page's text. The pictures are read from `folder`, where they were written."""
    style = (resources.files("distir_relax.report") / "templates" / "page.css").read_text()
    return Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).substitute(
        style=style,
        headline="".join(_figure(*row) for row in _headline(found, speedups, measured)),
        introduction=escape(_INTRODUCTION),
        tables="\n".join(_table(table) for table in tables if table.rows),
        pictures="\n".join(_picture(picture, folder) for picture in drawn),
        missing="\n".join(f"<li>{escape(text)}</li>" for text in _MISSING),
    )


def ratio_errors(speedups: Sequence[Speedup]) -> list[float]:
    """How far off our ratios between strategies are from the paper's, each relative to the paper's."""
    return [abs(ours / paper - 1) for row in speedups for ours, paper in row.ratios()]


def _headline(
    found: Sequence[Found], speedups: Sequence[Speedup], measured: Sequence[Measured]
) -> list[tuple[str, str, str]]:
    total = sum(len(one.search.outcomes) for one in found)
    rows = [
        ("configurations", f"{total:,}", count(len(found), "model")),
        ("searched in", seconds(sum(one.seconds for one in found)), f"on {found[0].cores} cores" if found else ""),
    ]
    if speedups:
        same = sum(row.is_same for row in speedups)
        worst = max((row.lost for row in speedups if row.lost is not None), default=0.0)
        rows.append(("the paper's best found", f"{same} of {len(speedups)}", f"others at most {worst:.0%} slower"))
        errors = ratio_errors(speedups)
        if errors:
            rows.append(("ratios between strategies", f"{sum(errors) / len(errors):.0%} off", f"mean of {len(errors)}"))
    if measured:
        error = sum(abs(m.predicted / m.measured - 1) for m in measured) / len(measured)
        rows.append(("measured throughput", f"{error:.1%} off", f"mean of {len(measured)}, MLP 1B"))
    return rows


def _figure(name: str, value: str, note: str) -> str:
    return f'<div class="figure"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><small>{escape(note)}</small></div>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(_text(v))}</td>' for v in row.values())}</tr>" for row in table.rows)
    text = f'<table id="{table.name}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    note = f'<p class="note">{escape(table.note)}</p>'
    return f'<section><h2>{escape(table.title)}</h2>{note}<div class="scrolls">{text}</div></section>'


def _text(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        shown = f"{float(f'{value:.4g}'):,.10g}"
        return shown if "." in shown or value >= 100 else f"{shown}.0"
    return f"{value:,}" if isinstance(value, int) else value


def _picture(picture: Picture, folder: Path) -> str:
    light, dark = (_data(folder / f"{picture.name}{scheme.suffix}.png") for scheme in (LIGHT, DARK))
    title = escape(picture.title)
    return (
        f'<figure id="{picture.name}"><figcaption>{title}</figcaption><picture>'
        f'<source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img src="{light}" alt="{title}" width="828" height="648"></picture></figure>'
    )


def _data(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
