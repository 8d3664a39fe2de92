"""The command `distir check`."""

from __future__ import annotations

import json as json_
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import BundleArgument, JsonOption
from distir_relax.support.units import count

if TYPE_CHECKING:
    from distir_relax.bundle import Bundle
    from distir_relax.proof import Proof


@app.command()
def check(bundle: BundleArgument, json: JsonOption = False) -> None:
    """Check that the ranks' programs match each other, cannot deadlock, and compute what the model does."""
    from distir_relax.bundle import read_bundle

    found = list(_checked(read_bundle(bundle, verify_weights=False)))
    if json:
        typer.echo(json_.dumps([_row(*item) for item in found]))
        return
    for path, proof, seconds in found:
        typer.echo(
            f"{path}: {count(proof.ranks, 'rank')}, {count(proof.programs, 'program')} of {proof.ops:,} ops, "
            f"{seconds:.2f} s"
        )
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


def _checked(bundle: Bundle) -> Iterator[tuple[str, Proof, float]]:
    """Check a bundle, its encoder and its evaluation; iterate over the path, the proof and the time of each."""
    from distir_relax.runtime.verification import verify_programs

    start = time.perf_counter()
    verify_programs(bundle)
    for part in (bundle, bundle.encoder, bundle.evaluation):
        if part is not None:
            yield str(part.path), prove_bundle(part), time.perf_counter() - start
            start = time.perf_counter()


def prove_bundle(bundle: Bundle) -> Proof:
    """Check a bundle whose ranks' programs are verified, with those stages that it has; see `prove`."""
    from distir_relax.bundle import STAGE_FILES
    from distir_relax.ir import parse_records
    from distir_relax.proof import prove
    from distir_relax.runtime.verification import read_stage

    sharded, model = (
        read_stage(bundle, stage) if STAGE_FILES[stage] in bundle.texts else None for stage in ("sharded", "global")
    )
    if sharded is not None and model is not None:
        symbols = {symbol.name: symbol for symbol in bundle.manifest.symbols}
        records = parse_records(bundle.records, "records.json", symbols)
        sharded = replace(sharded, records=records)
    ranked, distributed = read_stage(bundle, "ranked", verified=True), read_stage(bundle, "distributed")
    return prove(ranked, distributed, sharded, model, verified=True)
