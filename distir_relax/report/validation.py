"""Predictions against measurements, as a table and as JSON."""

from __future__ import annotations

import json

from distir_relax.calibration.comparison import MIN_GAP, Outcome, Validation
from distir_relax.support.units import count, size

_SHOWN = 8


def table(validation: Validation) -> str:
    """Return one line per configuration, the overall agreement, and the pairs that are predicted in the wrong order."""
    width = max(len("configuration"), *(len(o.name) for o in validation.outcomes))
    head = f"{'configuration':{width}}  ranks   measured  predicted   error  peak measured  predicted   error"
    return "\n".join([head, *(_line(o, width) for o in validation.outcomes), *summary(validation)])


def summary(validation: Validation) -> list[str]:
    """Return lines on all configurations together."""
    configurations = count(len(validation.outcomes), "configuration")
    lines = [
        f"{configurations}: Spearman {validation.spearman:.3f}, MAPE {validation.mape:.1%}; "
        f"largest error of a memory peak {abs(validation.peak_error):.1%}"
    ]
    if validation.covered is not None:
        lines[0] += f"; {validation.covered} of {len(validation.outcomes)} within their 90 % interval"
    if (noise := validation.repeatability) is not None:
        lines.append(
            f"repeatability: halves of the passes differ by {noise.difference:.1%}, Spearman {noise.spearman:.3f}; "
            f"root mean square error {noise.error:.1%}, {noise.own_error:.1%} without the noise of {noise.noise:.1%}"
        )
    lines += _parts(validation)
    pairs = validation.pairs
    if pairs:
        wrong = [pair for pair in pairs if not pair.is_predicted]
        lines.append(
            f"order of pairs that differ only in {', '.join(validation.compared)}, by more than {MIN_GAP:.0%}: "
            f"{len(pairs) - len(wrong)} of {len(pairs)} predicted right"
        )
        lines += [
            f"  wrong: {pair.faster.name} takes {pair.faster.measured * 1e3:.2f} ms, predicted "
            f"{pair.faster.predicted * 1e3:.2f} ms; {pair.slower.name} {pair.slower.measured * 1e3:.2f} ms, "
            f"{pair.slower.predicted * 1e3:.2f} ms"
            for pair in wrong[:_SHOWN]
        ]
        lines += [f"  and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
    return lines


def _parts(validation: Validation) -> list[str]:
    """Return a table of the errors by property; nothing if there is none in which configurations differ."""
    parts = validation.parts
    if not parts:
        return []
    width = max(len(part.value) for part in parts)
    rows = [f"{p.name:9} {p.value:{width}}  {p.count:6}  {p.mape:6.1%}  {p.bias:+z6.1%}" for p in parts]
    return [f"{'':9} {'':{width}}  number   error    bias", *rows]


def json_text(validation: Validation) -> str:
    """Return the result as JSON text."""
    return json.dumps(validation.as_json())


def _line(o: Outcome, width: int) -> str:
    times = f"{o.measured * 1e3:6.2f} ms  {o.predicted * 1e3:6.2f} ms  {o.error:+z6.1%}"
    if not o.measured_peaks:
        return f"{o.name:{width}}  {o.ranks:5}  {times}"
    # Print the rank with the largest peak error.
    ranks = zip(o.predicted_peaks, o.measured_peaks, strict=True)
    predicted, measured = max(ranks, key=lambda pair: abs(pair[0] / pair[1] - 1))
    peaks = f"{size(measured):>13}  {size(predicted):>9}  {o.peak_error:+z6.1%}"
    return f"{o.name:{width}}  {o.ranks:5}  {times}  {peaks}"
