"""The command `distir check`."""

from __future__ import annotations

import json as json_
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import BundleArgument, JsonOption
from distir_relax.support.units import count

if TYPE_CHECKING:
    from distir_relax.bundle import Bundle


@app.command()
def check(bundle: BundleArgument, json: JsonOption = False) -> None:
    """Check that the ranks' programs match each other, cannot deadlock, and compute the sharded program together."""
    from distir_relax.bundle import read_bundle

    found = list(_checked(read_bundle(bundle, verify_weights=False)))
    if json:
        typer.echo(json_.dumps(found))
        return
    for row in found:
        typer.echo(
            f"{row['name']}: {count(row['ranks'], 'rank')}, {count(row['programs'], 'program')} of {row['ops']:,} ops, "
            f"{row['seconds']:.2f} s\n"
            "  sizes and communication match, and no rank waits forever\n"
            "  each program is its rank's part of the schedule distir.txt\n"
            f"  the schedule computes the sharded program sharded.txt{_trusted(row['trusted'])}"
        )


def _trusted(trusted: list[dict[str, str]]) -> str:
    """Return the limits of the statement before: the ops taken on trust."""
    if not trusted:
        return ""
    reasons = ", and ".join(dict.fromkeys(item["reason"] for item in trusted))
    return f",\n    if {count(len(trusted), 'op')} in it are right, which cannot be followed: {reasons}"


def _checked(bundle: Bundle) -> Iterator[dict[str, Any]]:
    """Check a bundle, its encoder and its evaluation; iterate over the findings of each."""
    from distir_relax.layout import assuming
    from distir_relax.proof import check_projection, check_schedule
    from distir_relax.runtime.verification import read_stage, verify_programs

    start = time.perf_counter()
    verify_programs(bundle)
    for part in (bundle, bundle.encoder, bundle.evaluation):
        if part is not None:
            ranked = read_stage(part, "ranked", verified=True)
            schedule = read_stage(part, "distributed")
            with assuming(ranked.guards):
                ops = check_projection(schedule, ranked)
                trusted = check_schedule(read_stage(part, "sharded"), schedule)
            yield {
                "name": str(part.path),
                "ranks": len(ranked.ranks),
                "programs": len(set(ranked.ranks)),
                "ops": ops,
                "trusted": [{"op": str(item.op.results[0]), "reason": item.reason} for item in trusted],
                "seconds": time.perf_counter() - start,
            }
            start = time.perf_counter()
