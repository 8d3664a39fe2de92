"""Sensitivity of a step to the machine's resources, as text and as a table of the report page."""

from __future__ import annotations

from html import escape

from distir_relax.report.text_table import align_columns
from distir_relax.simulation.sensitivity import Gain, Sensitivity
from distir_relax.support.units import seconds

_HEAD = ("resource", "twice as fast", "saves", "infinitely fast", "saves")


def sensitivity_text(result: Sensitivity) -> str:
    """Return the resource that bounds the step, and the table of all."""
    table = align_columns([_HEAD, *(_row(gain, result.seconds) for gain in result.gains)])
    return "\n".join([bound_text(result), *table])


def bound_text(result: Sensitivity) -> str:
    """Return the resource that bounds the step, with the time that twice of it saves."""
    if result.bound_by is None:
        return "bound by nothing: no faster resource makes the step shorter"
    first = result.gains[0]
    saved = _saved(first.twice, result.seconds)
    return (
        f"bound by {result.bound_by}: a step of {seconds(result.seconds)} is {saved} shorter if that is twice as fast"
    )


def sensitivity_section(result: Sensitivity | None) -> str:
    """Return the section of the report page; without a result, the reason."""
    if result is None:
        body = (
            '<p class="note">A simulation of this program takes long, and this needs twenty: '
            "<code>distir simulate --sensitivity</code>.</p>"
        )
    else:
        rows = "".join(_row_html(gain, result.seconds) for gain in result.gains)
        head = "".join(f"<th>{escape(title)}</th>" for title in _HEAD)
        text = bound_text(result)
        body = (
            f'<p class="note">{escape(text[0].upper() + text[1:])}. Each row is a simulation with this resource alone '
            f'faster.</p><div class="scrolls"><table class="narrow"><thead><tr>{head}<th class="share"></th></tr>'
            f"</thead><tbody>{rows}</tbody></table></div>"
        )
    return f"<section>\n<h2>Limits of the step</h2>\n{body}\n</section>"


def _row_html(gain: Gain, base: float) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in _row(gain, base))
    width = max(0.0, 1 - gain.twice / base) if base else 0.0
    return f'<tr>{cells}<td class="share"><i class="compute" style="width:{width:.2%}"></i></td></tr>'


def _row(gain: Gain, base: float) -> tuple[str, str, str, str, str]:
    twice, unlimited = (seconds(time) if time else "0" for time in (gain.twice, gain.unlimited))
    return gain.resource, twice, _saved(gain.twice, base), unlimited, _saved(gain.unlimited, base)


def _saved(time: float, base: float) -> str:
    return f"{1 - time / base if base else 0.0:.1%}"
