"""The evaluation of the DistIR paper, run again: `make paper`.

    python -m benchmarks.paper                      all of it, to build/paper
    python -m benchmarks.paper --model 'MLP 1B'     one model

Searches are kept as they go, by the code that they are of; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from distir_relax.errors import DistIRError
from distir_relax.report.search import csv_text
from distir_relax.support.units import seconds

from .comparison import (
    accuracy_table,
    all_speedups,
    best_table,
    measurements,
    models_table,
    speedup_table,
    timing_table,
    write_csv,
)
from .figures import pictures
from .page import page, ratio_errors
from .searches import GRIDS, Found, Grid, code_digest, run


def evaluate(grids: Sequence[Grid], output: Path, samples: int = 24) -> list[Found]:
    """Run the searches, and write tables, pictures and the page to a folder; of each search, simulate about `samples`
    configurations alone for figure 7. Raises as searches do."""
    found = []
    for grid in grids:
        one = run(grid, output / "searches" / code_digest(), samples)
        best = one.search.ranked[0]
        print(
            f"{grid.model}: {len(one.search.outcomes):,} configurations in {seconds(one.seconds)}, "
            f"the best {best.strategy} with {best.samples:,} samples, {best.throughput:,.0f}/s",
            flush=True,
        )
        found.append(one)
    write(found, output)
    return found


def write(found: Sequence[Found], output: Path) -> None:
    """Write all that is said of these searches: CSV, PNG, and ``index.html``."""
    output.mkdir(parents=True, exist_ok=True)
    rows = all_speedups(found)
    measured = [m for one in found if one.model == "MLP 1B" for m in measurements(one)]
    tables = [models_table(found), best_table(found), speedup_table(found, 2), speedup_table(found, 3)]
    tables += [accuracy_table(measured)] if measured else []
    for table in (*tables, timing_table(found)):
        write_csv(table, output)
    for one in found:
        name = f"outcomes-{one.model.lower().replace(' ', '-')}.csv"
        (output / name).write_text(csv_text(one.search), encoding="utf-8")
    drawn = pictures(found, measured)
    for picture in drawn:
        picture.write(output)
    text = page(found, tables, drawn, output, rows, measured)
    (output / "index.html").write_text(text, encoding="utf-8")
    errors = ratio_errors(rows)
    if errors:
        mean = sum(errors) / len(errors)
        print(f"{len(errors)} ratios of tables 2 and 3 are {mean:.1%} off in the mean, {max(errors):.0%} at worst")
    print(f"written to {output}/index.html")


def main() -> None:
    """Read the command line. A user's error is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [grid.model for grid in GRIDS]
    parser.add_argument("--model", choices=names, nargs="*", default=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--output", type=Path, default=Path("build/paper"), help="the folder, made where it is missing")
    options = parser.parse_args()
    try:
        evaluate([grid for grid in GRIDS if grid.model in options.model], options.output)
    except DistIRError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
