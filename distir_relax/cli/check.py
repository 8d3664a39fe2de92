"""The command `distir check`."""

from __future__ import annotations

import json as json_
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import BundleArgument, JsonOption
from distir_relax.support.units import count

if TYPE_CHECKING:
    from distir_relax.bundle import Bundle
    from distir_relax.counterexample import Counterexample, Stages
    from distir_relax.proof import Proof, Refuted


@app.command()
def check(
    bundle: BundleArgument,
    example: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Time to search for the smallest input that shows a mistake; 0: no search."
        ),
    ] = 10.0,
    json: JsonOption = False,
) -> None:
    """Check that the ranks' programs match each other, cannot deadlock, and compute what the model does.

    If a plan is refused, its programs run on small inputs, to find one that shows the mistake.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.proof import Refuted
    from distir_relax.runtime.verification import verify_programs

    found = read_bundle(bundle, verify_weights=False)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    verify_programs(found)
    for part in (found, found.encoder, found.evaluation):
        if part is None:
            continue
        stages = read_stages(part)
        try:
            proof = _prove(stages)
        except Refuted as refuted:
            shown = _counterexample(stages, refuted, example)
            if json:
                typer.echo(json_.dumps([*rows, _refused(str(part.path), refuted, shown)]))
            raise _with_example(refuted, shown) from None
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        rows.append(_row(str(part.path), proof, seconds))
        if not json:
            _print(str(part.path), proof, seconds)
    if json:
        typer.echo(json_.dumps(rows))


def _print(path: str, proof: Proof, seconds: float) -> None:
    programs = f"{count(proof.programs, 'program')} of {proof.ops:,} ops"
    typer.echo(f"{path}: {count(proof.ranks, 'rank')}, {programs}, {seconds:.2f} s")
    for line in proof.lines:
        typer.echo(f"  {line}")


def _row(path: str, proof: Proof, seconds: float) -> dict[str, Any]:
    trusted = [item for ops in proof.statements.values() for item in ops]
    return {
        "name": path,
        "ranks": proof.ranks,
        "programs": proof.programs,
        "ops": proof.ops,
        "statements": list(proof.statements),
        "trusted": [{"op": str(item.op.results[0]), "reason": item.reason} for item in trusted],
        "seconds": seconds,
    }


def _counterexample(stages: Stages, refuted: Refuted, seconds: float) -> Counterexample | None:
    """Search for the smallest input that shows a mistake; return None if no time is given."""
    from distir_relax.counterexample import find_counterexample

    return find_counterexample(stages, refuted.statement, seconds) if seconds > 0 else None


def _refused(path: str, refuted: Refuted, example: Counterexample | None) -> dict[str, Any]:
    return {
        "name": path,
        "refused": refuted.statement,
        "message": refuted.message,
        "where": refuted.where,
        "example": None if example is None else example.as_json(),
    }


def _with_example(refuted: Refuted, example: Counterexample | None) -> Refuted:
    """Return an error with the smallest input that shows it."""
    return refuted if example is None else replace(refuted, message=f"{refuted.message}\n  {example}")


def read_stages(bundle: Bundle) -> Stages:
    """Return the programs of a bundle, those of the ranks verified; it may have no sharded program and no model."""
    from distir_relax.bundle import STAGE_FILES
    from distir_relax.counterexample import Stages
    from distir_relax.ir import parse_records
    from distir_relax.runtime.verification import read_stage

    sharded, model = (
        read_stage(bundle, stage) if STAGE_FILES[stage] in bundle.texts else None for stage in ("sharded", "global")
    )
    if sharded is not None and model is not None:
        symbols = {symbol.name: symbol for symbol in bundle.manifest.symbols}
        records = parse_records(bundle.records, "records.json", symbols)
        sharded = replace(sharded, records=records)
    return Stages(read_stage(bundle, "ranked", verified=True), read_stage(bundle, "distributed"), sharded, model)


def prove_bundle(bundle: Bundle) -> Proof:
    """Check a bundle whose ranks' programs are verified, with those stages that it has; see `prove`."""
    return _prove(read_stages(bundle))


def _prove(stages: Stages) -> Proof:
    from distir_relax.proof import prove

    return prove(stages.ranked, stages.distributed, stages.sharded, stages.model, verified=True)
