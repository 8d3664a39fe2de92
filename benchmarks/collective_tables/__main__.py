"""Predictions of published times of collectives, by the profiles `dgx-a100`, `dgx-h100` and `dgx-h200`.

    python -m benchmarks.collective_tables [--source nccl-tests-152] [--json found.json]

No figure of a profile is fitted to these rows; those that the profiles cite are in the same repositories.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from distir_relax.calibration.statistics import mean_absolute_percentage_error

from .rows import SOURCES, Row, read_rows


def summary(name: str, rows: Sequence[Row]) -> str:
    """Return the mean and the largest error of some rows, as a line."""
    errors = [row.error for row in rows]
    mean_absolute = mean_absolute_percentage_error([row.predicted for row in rows], [row.seconds for row in rows])
    mean, largest = sum(errors) / len(errors), max(errors, key=abs)
    return f"{name:32} {len(rows):4} {mean_absolute:13.1%} {mean:+8.1%} {largest:+8.1%}"


def main() -> int:
    """Print each prediction, then the errors; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=list(SOURCES), nargs="*", default=list(SOURCES))
    parser.add_argument("--json", type=Path, help="file for the predictions")
    options = parser.parse_args()
    rows = [row for row in read_rows() if row.source in options.source]
    print(f"{'source':24} {'ranks':>5} {'collective':12} {'bytes':>12} {'measured':>11} {'predicted':>11} {'error':>7}")
    for row in rows:
        times = f"{row.seconds * 1e6:8.1f} us {row.predicted * 1e6:8.1f} us {row.error:+7.1%}"
        print(f"{row.source:24} {row.ranks:5} {row.collective:12} {row.bytes:12} {times}  {row.note}")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.source}{' ' * bool(row.note)}{row.note}", []).append(row)
    print(f"\n{'':32} {'rows':>4} {'mean absolute':>13} {'mean':>8} {'largest':>8}")
    for name, group in {**groups, "all": rows}.items():
        print(summary(name, group))
    if options.json:
        found = [
            {**asdict(row), "measured_s": row.seconds, "predicted_s": row.predicted, "error": row.error} for row in rows
        ]
        options.json.write_text(json.dumps({"sources": SOURCES, "rows": found}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
