"""The command `distir`: compile a model, look at it, run it on its ranks."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    from distir_relax.runtime.report import RunReport
    from distir_relax.runtime.world import World

app = typer.Typer(
    name="distir", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Compile a sharded model to one program per rank, look at it, and run it.",
)  # fmt: skip


class Backend(StrEnum):
    """What runs a rank's program."""

    torch = "torch"
    tvm = "tvm"


class Tail(StrEnum):
    """How ranks with smaller shards are treated."""

    ragged = "ragged"
    pad = "pad"


class Stage(StrEnum):
    """A stage of the program."""

    sharded = "sharded"
    distributed = "distributed"
    ranked = "ranked"


class Device(StrEnum):
    """Where a rank computes."""

    cpu = "cpu"
    cuda = "cuda"


BundleArgument = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that distir compile wrote.")]
InputOption = Annotated[Path | None, typer.Option("--input", "-i", help="The inputs: an .npz of global arrays.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Write the global outputs to this .npz.")]
BackendOption = Annotated[Backend, typer.Option(help="What runs the ranks' programs.")]
DeviceOption = Annotated[Device, typer.Option(help="Where the ranks compute.")]
TimeoutOption = Annotated[
    float, typer.Option(min=0, help="End when a rank waits longer than this (seconds; 0: never).")
]
PassesOption = Annotated[
    int, typer.Option(min=1, help="How often all is measured: speeds change from minute to minute.")
]
RepeatOption = Annotated[int, typer.Option(min=1, help="Run so many timed steps, after one to warm up.")]
ReportOption = Annotated[Path | None, typer.Option(help="Write times, bytes sent and weight bytes to this .json.")]


def main() -> None:
    """Run the command line. Errors of the user are one message on stderr and exit code 2."""
    try:
        app()
    except DistIRError as error:
        _complain(error)
        raise SystemExit(2) from None


@app.command("compile")
def compile_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION | FILE.onnx", help="A function that returns the model, or an ONNX file."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle to write.")],
    tail: Annotated[Tail | None, typer.Option(help="Uneven shards: own shapes per rank, or padded.")] = None,
    backend: Annotated[list[Backend] | None, typer.Option(help="Write programs for it; may be repeated.")] = None,
    shard: Annotated[list[str] | None, typer.Option(metavar="PATTERN=PLACEMENT", help="Shard parameters.")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="2x3", help="The mesh's shape.")] = None,
    axes: Annotated[str | None, typer.Option(metavar="dp,tp", help="The names of the mesh's axes.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Passed to the function as its parameter ranks.")] = None,
    name: Annotated[str | None, typer.Option(help="The program's name in the bundle.")] = None,
    input_shape: Annotated[
        list[str] | None, typer.Option(metavar="NAME=1,3,224,224", help="The shape of an input of FILE.onnx.")
    ] = None,
) -> None:
    """Compile a model to a bundle.

    FUNCTION returns a Plan, or (model, example_inputs). It is given --ranks, --tail and --name where it
    has parameters of these names. An ONNX file needs --input-shape for the inputs whose dims it leaves open.
    """
    from distir_relax.compile_target import CompileOptions, compile_target

    options = CompileOptions(
        target=target,
        output=output,
        tail=None if tail is None else tail.value,
        backends=tuple(choice.value for choice in backend or Backend),
        shardings=tuple(shard or ()),
        mesh=mesh,
        axes=axes,
        ranks=ranks,
        name=name,
        input_shapes=tuple(input_shape or ()),
    )
    typer.echo(f"wrote {compile_target(options)}")


@app.command()
def show(
    bundle: BundleArgument,
    stage: Annotated[Stage, typer.Option(help="Which stage of the program.")] = Stage.distributed,
) -> None:
    """Print a bundle's program, highlighted on a terminal."""
    from distir_relax.bundle import read_bundle
    from distir_relax.highlight import print_program

    print_program(read_bundle(bundle, verify_weights=False).stage(stage.value))


@app.command()
def explain(
    bundle: BundleArgument,
    value: Annotated[str, typer.Argument(metavar="%VALUE", help="A value of the sharded stage.")],
) -> None:
    """Say why a value lies as it does, what is sent for it, and what another layout would send."""
    from distir_relax.bundle import read_bundle
    from distir_relax.report import explain as explanation

    typer.echo(explanation(read_bundle(bundle, verify_weights=False), value))


@app.command()
def diff(
    first: BundleArgument,
    second: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Another one, of the same model.")],
) -> None:
    """Print what differs between two bundles: placements, collectives, bytes sent and held."""
    from distir_relax.bundle import read_bundle
    from distir_relax.report import diff as difference

    typer.echo(difference(*(read_bundle(path, verify_weights=False) for path in (first, second))))


@app.command()
def rules(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="An op to explain; all ops, if not given.")] = None,
    operands: Annotated[list[str] | None, typer.Argument(metavar="TYPE", help="Operands such as f32[4,5].")] = None,
    attr: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An attribute; may be repeated.")] = None,
) -> None:
    """Print how each op may be split, or explain one op, on operands of given types."""
    from rich.console import Console
    from rich.table import Table

    from distir_relax.analysis.rules import explain_rule, parse_attrs, table

    if op is not None:
        typer.echo(explain_rule(op, operands or (), parse_attrs(attr or ())))
        return
    shown = Table(box=None, pad_edge=False, header_style="")
    for title in ("op", "rule", "a pending sum passes", "torch"):
        shown.add_column(title)
    for row in table():
        shown.add_row(*(text.replace("[", "\\[") for text in row))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(shown)


@app.command()
def simulate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A bundle, a program's text, FILE.py:FUNCTION or FILE.onnx.")
    ],
    profile: Annotated[str, typer.Option(help="The machine: a name (NAME:NODES for several nodes) or a .toml file.")],
    strategy: Annotated[str | None, typer.Option(metavar="D/T/P/K", help="Passed to the function.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Passed to the function; for the throughput.")] = None,
    input_shape: Annotated[
        list[str] | None, typer.Option(metavar="NAME=1,3,224,224", help="The shape of an input of FILE.onnx.")
    ] = None,
    shard: Annotated[list[str] | None, typer.Option(metavar="PATTERN=PLACEMENT", help="For FILE.onnx.")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="2x3", help="The mesh's shape, for FILE.onnx.")] = None,
    axes: Annotated[str | None, typer.Option(metavar="dp,tp", help="The names of the mesh's axes.")] = None,
    import_: Annotated[
        list[Path] | None, typer.Option("--import", metavar="FILE.py", help="Import it first: it registers ops.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the time line to this .json, for Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report page to this .html.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Predict time and memory of a program on a machine, without running it."""
    from distir_relax.compile_target import read_mesh, read_shapes, read_shardings
    from distir_relax.report.simulation import json_text, summary
    from distir_relax.report.trace import write_trace
    from distir_relax.simulator import simulate as predict
    from distir_relax.user_function import import_file

    for file in import_ or ():
        import_file(file)
    found = predict(
        model,
        profile=profile,
        strategy=strategy,
        global_batch=global_batch,
        input_shapes=read_shapes(input_shape or ()),
        shardings=read_shardings(shard or ()),
        mesh=read_mesh(mesh, axes),
    )
    if trace is not None:
        write_trace(found, trace)
    if html is not None:
        from distir_relax.report.page import write_page

        write_page(found, html, title=f"{model} on {found.profile.name}")
    typer.echo(json_text(found) if json else summary(found))


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write, a .toml file.")],
    n: Annotated[int, typer.Option("-n", min=1, help="Ranks, measured together with mpirun.")] = 2,
    device: DeviceOption = Device.cpu,
    name: Annotated[str, typer.Option(help="The profile's name.")] = "",
    links: Annotated[str | None, typer.Option(help="Take the links from this profile (with -n 1).")] = None,
    passes: PassesOption = 7,
) -> None:
    """Measure this machine's ops and collectives, and write the profile that explains them."""
    from distir_relax.calibration.calibrate import calibrate as measure_and_fit

    found = measure_and_fit(output, n, device.value, name, links, passes)
    for group, error in found.errors.items():
        typer.echo(f"{group:16} median error of the fit {error:.1%}")
    typer.echo(f"wrote {output}")


@app.command(hidden=True)
def measure(output: Path, device: DeviceOption = Device.cpu, passes: int = 1) -> None:
    """One rank of `distir calibrate`."""
    from distir_relax.calibration.calibrate import measure as run_benchmarks
    from distir_relax.runtime.world import join_world

    world = join_world()
    run_benchmarks(output, device.value, passes, world)
    if world is not None:
        world.close()


@app.command()
def validate(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET", help="Bundles, or FILE.py:FUNCTION that returns configurations.")
    ],
    profile: Annotated[
        str | None, typer.Option(help="The machine: a name or a .toml file, best from distir calibrate.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Instead of --profile: fit one in turn with the runs, and write it to this .toml."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each configuration, in each pass.")] = 4,
    passes: PassesOption = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank, as when the profile was calibrated.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write a scatter plot to this .svg.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run configurations for real and compare their times with the simulator's."""
    from distir_relax.analysis.profile import load_profile
    from distir_relax.calibration.validate import validate as run_and_compare
    from distir_relax.report.validation import json_text, table, write_plot
    from distir_relax.runtime.inputs import check_writable

    if (profile is None) == (calibrate is None):
        raise DistIRError(
            "expected either --profile or --calibrate", hint="--calibrate FILE.toml measures this machine"
        )
    if calibrate is not None:
        check_writable(calibrate)
    found = run_and_compare(targets, load_profile(profile) if profile else None, steps, threads, passes)
    if calibrate is not None and found.calibration is not None:
        found.calibration.write(calibrate)
    if plot is not None:
        write_plot(found, plot)
    typer.echo(json_text(found) if json else table(found))


@app.command(hidden=True)
def time_bundles(request: Path, answer: Path) -> None:
    """One rank of `distir validate`."""
    from distir_relax.calibration.validate import time_bundles as run_all
    from distir_relax.runtime.world import join_world

    world = join_world()
    assert world is not None, "distir validate starts this with mpirun"
    run_all(request, answer, world)
    world.close()


@app.command()
def run(
    bundle: BundleArgument,
    input: InputOption = None,
    output: OutputOption = None,
    backend: BackendOption = Backend.torch,
    device: DeviceOption = Device.cpu,
    timeout: TimeoutOption = 120.0,
    repeat: RepeatOption = 1,
    report: ReportOption = None,
) -> None:
    """Run a bundle: as one rank under mpirun or torchrun, otherwise with all ranks as threads of this process."""
    from distir_relax.runtime.execute import RunOptions, run_rank, run_threads
    from distir_relax.runtime.world import join_world

    options = RunOptions(bundle, input, output, backend.value, device.value, timeout, repeat, report)
    world = join_world()
    if world is None:
        _summarise(run_threads(options), output, report is not None)
        return
    try:
        result = run_rank(world, options)
    except DistIRError as error:
        _leave(world, error)
    if result is not None:
        _summarise(result, output, report is not None)
    world.close()


@app.command()
def launch(
    bundle: BundleArgument,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Ranks; as many as the bundle has, if not given.")] = None,
    input: InputOption = None,
    output: OutputOption = None,
    backend: BackendOption = Backend.torch,
    device: DeviceOption = Device.cpu,
    timeout: TimeoutOption = 120.0,
    repeat: RepeatOption = 1,
    report: ReportOption = None,
) -> None:
    """Run a bundle with this machine's mpirun, printing the command."""
    from distir_relax.bundle import read_bundle
    from distir_relax.runtime.launch import launch as start
    from distir_relax.runtime.world import check_size

    # What is wrong already is said once and here, without mpirun's own words around it.
    mesh = read_bundle(bundle, verify_weights=False).manifest.mesh
    check_size(mesh, n or mesh.world_size)
    arguments = ["run", str(bundle)]
    for option, value in (("--input", input), ("--output", output), ("--report", report)):
        if value is not None:
            arguments += [option, str(value)]
    arguments += ["--backend", backend.value, "--device", device.value]
    arguments += ["--timeout", f"{timeout:g}", "--repeat", str(repeat)]
    raise typer.Exit(start(mesh.world_size, arguments))


@app.command()
def doctor() -> None:
    """Check what works on this machine, and say how to mend what does not."""
    from rich.console import Console

    from distir_relax.runtime.doctor import examine

    console = Console(highlight=False)
    well = True
    for finding in examine():
        mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]" if finding.essential else "[yellow]lack[/]"
        console.print(f"{mark} {finding.name:22}", end=" ")
        console.print(finding.detail, markup=False, soft_wrap=True)
        if not finding.ok:
            well = well and not finding.essential
            console.print(f"     to mend: {finding.mend}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if well else 1)


def _leave(world: World, error: DistIRError) -> None:
    """End this rank after an error that all ranks have: the first one prints it, before any of them is gone."""
    if world.rank == 0:
        _complain(error)
    world.close()
    raise SystemExit(2)


def _complain(error: DistIRError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)


def _summarise(report: RunReport, output: Path | None, table: bool) -> None:
    if table:
        _print_table(report)
    wrote = f"; wrote {output}" if output is not None else ""
    steps = f"median of {report.steps} steps" if report.steps > 1 else "one step"
    typer.echo(
        f"{report.name}: {len(report.ranks)} ranks ({report.transport}), {report.backend}, "
        f"{report.step_seconds * 1e3:.3g} ms ({steps}){wrote}"
    )


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
