"""The commands `distir run`, `launch` and `doctor`."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distir_relax.cli.app import app, printed_once
from distir_relax.cli.options import (
    BundleArgument,
    HostOption,
    InputOption,
    JsonOption,
    Launcher,
    OutputOption,
    RepeatOption,
    ReportOption,
    RshOption,
    TraceOption,
    flag_of,
    with_run_options,
)
from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    from distir_relax.bundle import BundleFile
    from distir_relax.runtime.report import RunReport


@app.command()
@with_run_options()
def run(
    bundle: BundleArgument,
    input: InputOption = None,
    output: OutputOption = None,
    repeat: RepeatOption = 1,
    report: ReportOption = None,
    trace: TraceOption = None,
    profile: Annotated[
        str, typer.Option(help="Machine for the predictions of --trace: a name or a .toml file.")
    ] = "cpu-local",
    json: JsonOption = False,
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Run a bundle: as one rank under mpirun or torchrun, otherwise with all ranks as threads of this process."""
    from distir_relax.bundle import BundleFile
    from distir_relax.runtime.execute import RunOptions
    from distir_relax.runtime.execute import run as execute
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.launched import RankOptions

    file, ranks = BundleFile(bundle, **reading), RankOptions(**running)
    options = RunOptions(file, input, output, ranks, repeat, report)
    with joined_world(ranks.timeout) as world:
        with printed_once(world):
            # All ranks report an unusable --trace before anything runs.
            draw = _trace_writer(file, ranks.backend, profile, trace, json)
            result = execute(options, world)
        if result is not None:
            if json:
                typer.echo(json_.dumps({**result.to_json(), "output": None if output is None else str(output)}))
            else:
                _print_summary(result, output, report is not None)
            draw(result)
        world.close()


@app.command()
@with_run_options()
def launch(
    bundle: BundleArgument,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Number of ranks; by default that of the bundle.")] = None,
    input: InputOption = None,
    output: OutputOption = None,
    repeat: RepeatOption = 1,
    report: ReportOption = None,
    host: HostOption = None,
    launcher: Annotated[Launcher, typer.Option("--with", help="Command that starts ranks here.")] = Launcher.mpirun,
    rsh: RshOption = "",
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Run a bundle with mpirun or torchrun on this machine, or by agents on several hosts, and print the commands.

    All hosts need this Python and the working directory under the same paths. A host that lacks the bundle gets the
    slices that its ranks read, and other files as a whole.
    """
    from distir_relax.bundle import BundleFile
    from distir_relax.bundle.host_slices import host_files
    from distir_relax.runtime.agents.file_copies import LaunchFile
    from distir_relax.runtime.hosts import read_hosts
    from distir_relax.runtime.launch import launch as start
    from distir_relax.runtime.launch import launch_on_hosts, launch_with_torchrun
    from distir_relax.runtime.launcher_detection import check_alone
    from distir_relax.runtime.world import check_size

    check_alone()
    # Report errors that are known before the launch once, without mpirun's own output around them.
    opened = BundleFile(bundle, **reading).read(verify_weights=False)
    mesh = opened.manifest.mesh
    check_size(mesh, n or mesh.size)
    arguments = ["run", str(bundle)]
    given = {"input": input, "output": output, "report": report, "repeat": repeat, **running, **reading}
    for name, value in given.items():
        if value is not None and value is not False:
            arguments += [flag_of(name), *([] if value is True else [str(value)])]
    hosts = () if host is None else read_hosts(host, mesh.size)
    if hosts:
        # Weights of other files take the place of the bundle's, which nobody reads then.
        slices = partial(host_files, opened) if reading["weights"] is None else None
        others = [LaunchFile(str(path)) for path in (input, *reading.values()) if isinstance(path, Path)]
        raise typer.Exit(launch_on_hosts(hosts, arguments, rsh, files=[LaunchFile(str(bundle), slices), *others]))
    begin = launch_with_torchrun if launcher is Launcher.torchrun else start
    raise typer.Exit(begin(mesh.size, arguments))


@app.command()
def doctor(
    json: JsonOption = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the choices between kernels again, on a quiet machine.")
    ] = False,
) -> None:
    """Check this machine's setup, and print how to fix failures."""
    from rich.console import Console

    from distir_relax.runtime.doctor import examine, measure_again

    if measure:
        measure_again()
    if json:
        checks = [asdict(finding) | ({"fix": ""} if finding.ok else {}) for finding in examine()]
        is_ok = all(check["ok"] or not check["essential"] for check in checks)
        typer.echo(json_.dumps({"ok": is_ok, "checks": checks}))
        raise typer.Exit(0 if is_ok else 1)
    console = Console(highlight=False)
    is_ok = True
    for finding in examine():
        mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]" if finding.essential else "[yellow]lack[/]"
        console.print(f"{mark} {finding.name:22}", end=" ")
        console.print(finding.detail, markup=False, soft_wrap=True)
        if not finding.ok:
            is_ok = is_ok and not finding.essential
            console.print(f"     to fix: {finding.fix}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if is_ok else 1)


def _print_summary(report: RunReport, output: Path | None, table: bool) -> None:
    if table:
        _print_table(report)
    wrote = f"; wrote {output}" if output is not None else ""
    steps = f"median of {report.steps} steps" if report.steps > 1 else "one step"
    typer.echo(
        f"{report.name}: {len(report.ranks)} ranks ({report.transport}), {report.backend}, "
        f"{report.step_seconds * 1e3:.3g} ms ({steps}){wrote}"
    )


def _trace_writer(
    file: BundleFile, backend: str, profile: str, path: Path | None, quiet: bool
) -> Callable[[RunReport], None]:
    """Return a listener that draws the tasks of a run's last step below the predicted ones; a no-op without `path`.

    With `quiet` it prints to stderr.
    """
    if path is None:
        return lambda report: None
    if file.trust_code:
        raise DistIRError("--trace predicts the program that was compiled", hint="remove --trace or --trust-code")
    if backend != "torch":
        raise DistIRError("only the torch backend records task times", hint="remove --trace or --backend")
    from distir_relax.calibration.machine_check import warn_of_mismatch
    from distir_relax.compiler.simulate import simulate
    from distir_relax.cost.profile import load_profile
    from distir_relax.report.pipeline_tasks import Row, predicted_rows, write_chart
    from distir_relax.runtime.inputs import check_writable

    check_writable(path)
    devices = file.read(verify_weights=False).manifest.mesh.size
    machine = load_profile(profile)
    warn_of_mismatch(machine)
    predicted = predicted_rows(simulate(file.path, profile=machine.with_devices(devices)))
    if not predicted:
        raise DistIRError("the program is not a pipeline: it has no tasks to draw", str(file.path), "remove --trace")

    def draw(report: RunReport) -> None:
        measured = [Row(f"rank {rank}", tasks) for rank, tasks in enumerate(report.tasks)]
        write_chart(predicted, measured, path)
        typer.echo(f"wrote {path}", err=quiet)

    return draw


def _print_table(report: RunReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    kinds = sorted({kind for rank in report.ranks for kind in rank.sent_bytes})
    for title in ("rank", "program", "weight bytes", "bytes sent", *(f"{kind} (calls)" for kind in kinds)):
        table.add_column(title, justify="left" if title == "program" else "right")
    for rank in report.ranks:
        by_kind = [f"{rank.sent_bytes.get(kind, 0):,} ({rank.calls.get(kind, 0)})" for kind in kinds]
        total = sum(rank.sent_bytes.values())
        table.add_row(str(rank.rank), rank.program, f"{rank.weight_bytes:,}", f"{total:,}", *by_kind)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
