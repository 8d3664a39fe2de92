"""Predictions against measurements: as a table, and as JSON."""

from __future__ import annotations

import json

from distir_relax.calibration.comparison import APART, Outcome, Validation
from distir_relax.support.units import count, size

_SHOWN = 8


def table(validation: Validation) -> str:
    """One line a configuration, how well all agree, and which pairs were predicted the wrong way round."""
    width = max(len("configuration"), *(len(o.name) for o in validation.outcomes))
    head = f"{'configuration':{width}}  ranks   measured  predicted   error  peak measured  predicted   error"
    return "\n".join([head, *(_line(o, width) for o in validation.outcomes), *summary(validation)])


def summary(validation: Validation) -> list[str]:
    """Lines on all configurations together."""
    number = count(len(validation.outcomes), "configuration")
    lines = [
        f"{number}: Spearman {validation.spearman:.3f}, MAPE {validation.mape:.1%}; "
        f"peaks of memory at most {abs(validation.peak_error):.1%} off"
    ]
    pairs = validation.pairs
    if pairs:
        wrong = [pair for pair in pairs if not pair.is_foreseen]
        lines.append(
            f"which is faster of two alike but for {', '.join(validation.compared)}, more than {APART:.0%} apart: "
            f"{len(pairs) - len(wrong)} of {len(pairs)} predicted right"
        )
        lines += [
            f"  not: {pair.faster.name} takes {pair.faster.measured * 1e3:.2f} ms, predicted "
            f"{pair.faster.predicted * 1e3:.2f} ms; {pair.slower.name} {pair.slower.measured * 1e3:.2f} ms, "
            f"{pair.slower.predicted * 1e3:.2f} ms"
            for pair in wrong[:_SHOWN]
        ]
        lines += [f"  and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
    return lines


def json_text(validation: Validation) -> str:
    """The result as JSON text."""
    return json.dumps(validation.as_json())


def _line(o: Outcome, width: int) -> str:
    times = f"{o.measured * 1e3:6.2f} ms  {o.predicted * 1e3:6.2f} ms  {o.error:+z6.1%}"
    # The rank whose peak is furthest off is the one that tells.
    ranks = zip(o.predicted_peaks, o.measured_peaks, strict=True)
    predicted, measured = max(ranks, key=lambda pair: abs(pair[0] / pair[1] - 1))
    peaks = f"{size(measured):>13}  {size(predicted):>9}  {o.peak_error:+z6.1%}"
    return f"{o.name:{width}}  {o.ranks:5}  {times}  {peaks}"
