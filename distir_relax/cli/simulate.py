"""The commands `distir simulate`, `calibrate` and `validate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import (
    ChunkTokensOption,
    Device,
    DeviceOption,
    HostOption,
    JsonOption,
    MaxRequestsOption,
    PassesOption,
    RshOption,
    StateMemoryOption,
    StepTokensOption,
    flag_of,
    read_size_ranges,
    read_workload,
    with_options,
    with_run_options,
)
from distir_relax.compiler.options import ImportOptions, LayoutOptions
from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    from distir_relax.compiler.simulate_generation import GenerationSimulation
    from distir_relax.cost.profile import Profile
    from distir_relax.simulation.sensitivity import Sensitivity
    from distir_relax.simulation.simulation import Simulation


_OPTIONS = ("shardings", "mesh", "strategy", "stages", "input_shapes", "precision", "keep")
_FOR_GENERATION = ("strategy", "precision", "keep")


@app.command()
@with_options(LayoutOptions, ImportOptions, only=_OPTIONS)
def simulate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A bundle, a program's text, FILE.py:FUNCTION or FILE.onnx.")
    ],
    profile: Annotated[str, typer.Option(help="The machine: a name (NAME:NODES for several nodes) or a .toml file.")],
    options: dict[str, Any],
    global_batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step; the example is repeated.")] = None,
    import_: Annotated[
        list[Path] | None, typer.Option("--import", metavar="FILE.py", help="Import a file first, to register ops.")
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE", help="Value of a symbolic size, typical by default; or several: sequence=128:4096:2x."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot time and memory over --dim to this .svg.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline to this .json, for Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report page to this .html.")] = None,
    scale: Annotated[
        str | None,
        typer.Option(metavar="NAME=2x,...", help="Compare with a machine with other figures: network.bandwidth=2x."),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Print the time with each resource twice, and infinitely, as fast.")
    ] = False,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Print the chain of ops that determines the time.")
    ] = False,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Predict generation, after prompts of so many tokens.")
    ] = None,
    generate: Annotated[int | None, typer.Option(min=1, help="Number of tokens to generate for each prompt.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of prompts that arrive together.")] = 1,
    max_requests: MaxRequestsOption = 16,
    memory: StateMemoryOption = 1.0,
    step_tokens: StepTokensOption = 512,
    chunk_tokens: ChunkTokensOption = 128,
    json: JsonOption = False,
) -> None:
    """Predict time and memory of a program on a machine, without running it.

    With --prompt and --generate, of generating text with a bundle of distir compile --generate, or with the folder or
    GGUF file of a language model: time to first token, time per token, throughput and memory of states. The options of
    serving are those of distir serve.

    With --scale, the same program on a machine with some figures multiplied, or replaced: families such as
    device.flops, device.bandwidth, device.memory, network.bandwidth, network.latency, those of a level of links, as in
    NVSwitch.bandwidth, and single figures by their places in the profile.
    """
    if prompt is not None or generate is not None:
        others = {"--global-batch": global_batch, "--dim": dim, "--plot": plot, "--trace": trace, "--html": html}
        others |= {"--sensitivity": sensitivity, "--critical-path": critical_path}
        others |= {flag_of(name): value for name, value in options.items() if name not in _FOR_GENERATION}
        workload = *read_workload(prompt, generate, others), requests
        limits = max_requests, round(memory * 1e9), step_tokens, chunk_tokens
        typer.echo(_generation(model, (profile, scale), workload, limits, import_, options, json))
        return
    from distir_relax.compiler.simulate import simulate as predict
    from distir_relax.report.size_study import SizeStudy, write_size_plot
    from distir_relax.report.trace import write_trace
    from distir_relax.support.user_function import import_file

    for file in import_ or ():
        import_file(file)
    ranges = read_size_ranges(dim)
    sizes = {name: values[0] for name, values in ranges.items()}
    varied = [name for name, values in ranges.items() if len(values) > 1]
    is_single = trace is not None or html is not None or sensitivity or critical_path
    if len(varied) > 1 or (plot is not None and not varied) or (varied and is_single):
        raise DistIRError(
            "expected one --dim with several sizes for a table or a plot, and none for a timeline, a page, "
            "--sensitivity or --critical-path",
            hint="for example: --dim sequence=128:4096:2x --plot plot.svg",
        )
    if varied:
        results = [
            predict(
                model,
                profile=profile,
                global_batch=global_batch,
                dims={**sizes, varied[0]: size},
                scale=scale,
                **options,
            )
            for size in ranges[varied[0]]
        ]
        study = SizeStudy(varied[0], ranges[varied[0]], results)
        if plot is not None:
            write_size_plot(study, plot)
        typer.echo(dumps(study.as_json()) if json else str(study))
        return
    simulation = predict(model, profile=profile, global_batch=global_batch, dims=sizes, scale=scale, **options)
    bounds = _sensitivity(simulation) if sensitivity else None
    if trace is not None:
        write_trace(simulation, trace)
    if html is not None:
        from distir_relax.report.page import write_page

        write_page(simulation, html, f"{model} on {simulation.profile.name}", _proof(model), bounds)
    typer.echo(
        dumps(_simulation_json(simulation, bounds, critical_path))
        if json
        else _simulation_text(simulation, bounds, critical_path)
    )


def _sensitivity(simulation: Simulation) -> Sensitivity:
    from distir_relax.simulation.sensitivity import sensitivity

    return sensitivity(simulation)


def _simulation_text(simulation: Simulation, limits: Sensitivity | None, with_path: bool) -> str:
    """Return the summary of a simulation, and the tables that were requested."""
    from distir_relax.report.critical_path import critical_path_text
    from distir_relax.report.sensitivity import sensitivity_text
    from distir_relax.report.what_if import compare, what_if_text
    from distir_relax.simulation.critical_path import critical_path

    parts = [str(simulation)]
    if simulation.before is not None and simulation.scale is not None:
        parts.append(what_if_text(simulation.scale, compare(simulation.before, simulation)))
    if limits is not None:
        parts.append(sensitivity_text(limits))
    if with_path:
        parts.append(critical_path_text(simulation, critical_path(simulation)))
    return "\n\n".join(parts)


def _simulation_json(simulation: Simulation, limits: Sensitivity | None, with_path: bool) -> dict[str, Any]:
    from distir_relax.report.critical_path import critical_path_json
    from distir_relax.report.what_if import compare, what_if_json
    from distir_relax.simulation.critical_path import critical_path

    plain = simulation.as_json()
    if (before := simulation.before) is not None and simulation.scale is not None:
        plain["what_if"] = what_if_json(simulation.scale, before.as_json(), compare(before, simulation))
    if limits is not None:
        plain["sensitivity"] = limits.as_json()
    if with_path:
        plain["critical_path"] = critical_path_json(simulation, critical_path(simulation))
    return plain


def _generation(
    model: str,
    machine: tuple[str, str | None],
    workload: tuple[int, int, int],
    limits: tuple[int, int, int, int],
    files: Sequence[Path] | None,
    options: Mapping[str, Any],
    json: bool,
) -> str:
    """Return the prediction of generation on a `machine`, a profile and changes of its figures, as text or JSON."""
    from distir_relax.cost.profile import load_profile
    from distir_relax.cost.scaling import scale_profile
    from distir_relax.report.what_if import compare_generation, what_if_json, what_if_text

    profile, scale = load_profile(machine[0]), machine[1]
    scaled = None if scale is None else scale_profile(profile, scale)
    found = _simulate_generation(model, profile, workload, limits, files, options)
    if scaled is None or scale is None:
        return dumps(found.as_json()) if json else str(found)
    after = _simulate_generation(model, scaled, workload, limits, files, options)
    rows = compare_generation(found, after)
    if json:
        return dumps({**after.as_json(), "what_if": what_if_json(scale, found.as_json(), rows)})
    return f"{after}\n\n{what_if_text(scale, rows)}"


def _proof(target: str) -> list[str]:
    """Return the statements that are proved of a bundle; none of anything else."""
    from distir_relax.bundle import read_bundle
    from distir_relax.cli.check import prove_bundle
    from distir_relax.runtime.verification import verify_programs

    if not (Path(target) / "manifest.json").is_file():
        return []
    bundle = read_bundle(target, verify_weights=False)
    verify_programs(bundle)
    return prove_bundle(bundle).lines


def _simulate_generation(
    model: str,
    profile: Profile,
    workload: tuple[int, int, int],
    limits: tuple[int, int, int, int],
    files: Sequence[Path] | None,
    others: Mapping[str, Any],
) -> GenerationSimulation:
    """Simulate generation for a workload: tokens of a prompt, new ones, requests."""
    from distir_relax.compiler.simulate_generation import simulate_generation
    from distir_relax.serving import EngineOptions
    from distir_relax.support.user_function import import_file

    prompt, generate, requests = workload
    for file in files or ():
        import_file(file)
    return simulate_generation(
        model, profile=profile, prompt=prompt, generate=generate, requests=requests,
        options=EngineOptions(*limits), **others,
    )  # fmt: skip


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write, a .toml file.")],
    n: Annotated[
        int | None, typer.Option("-n", min=1, help="Number of ranks, measured together with mpirun; 2 by default.")
    ] = None,
    device: DeviceOption = Device.cpu,
    name: Annotated[str, typer.Option(help="The profile's name.")] = "",
    links: Annotated[str | None, typer.Option(help="Take the links from this profile (with -n 1).")] = None,
    passes: PassesOption = 7,
    budget: Annotated[float, typer.Option(min=0, help="Approximate time limit in seconds; 0: no limit.")] = 120.0,
    max_error: Annotated[
        float, typer.Option(min=0, help="Reject a fit if the median error of a group is larger; 0.5 is 50 %.")
    ] = 0.5,
    host: HostOption = None,
    rsh: RshOption = "",
) -> None:
    """Measure ops and collectives on this machine, or between hosts, and fit a profile to them.

    Passes that exceed the budget are skipped. A fit with too large errors is not written.
    """
    from distir_relax.calibration.calibrate import calibrate as measure_and_fit
    from distir_relax.runtime.hosts import HostList, read_hosts

    hosts = HostList() if host is None else HostList(read_hosts(host, n), rsh)
    count = hosts.ranks or n or 2
    calibration = measure_and_fit(output, count, device.value, name, links, passes, budget, max_error, hosts)
    for group, error in calibration.errors.items():
        typer.echo(f"{group:16} median error of the fit {error:.1%}")
    profile = calibration.profile
    for ranks in profile.groups:
        memory = "" if ranks.memory is None else f", {ranks.memory / 1e9:.1f} GB"
        typer.echo(f"unlike the others: rank {ranks}, speed {ranks.speed:g}{memory}")
    typer.echo(f"wrote {output}" + f": {profile.processor}, {profile.instructions}" * bool(profile.instructions))


@app.command(hidden=True)
def measure(
    output: Path, programs: Path, device: DeviceOption = Device.cpu, passes: int = 1, seconds: float = 0.0,
    crowded: bool = False,
) -> None:  # fmt: skip
    """Run one rank of `distir calibrate`."""
    from distir_relax.calibration.calibrate import measure as run_benchmarks
    from distir_relax.runtime.join import joined_world

    with joined_world() as world:
        run_benchmarks(output, device.value, passes, programs, world, seconds, crowded)
        world.close()


@app.command()
@with_run_options("device", "require_signature")
def validate(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET", help="Bundles, or FILE.py:FUNCTION that returns configurations.")
    ],
    profile: Annotated[
        str | None, typer.Option(help="The machine: a name or a .toml file, best from distir calibrate.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Instead of --profile: fit a profile, measured in turn with the runs, and write it here."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per configuration and pass.")] = 4,
    passes: PassesOption = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads per rank, as in the calibration of the profile.")] = 1,
    compare: Annotated[
        str, typer.Option(metavar="FIELD,...", help="Compare the order of strategies that differ only in these fields.")
    ] = "schedule,chunks",
    plot: Annotated[Path | None, typer.Option(help="Write a scatter plot to this .svg.")] = None,
    json: JsonOption = False,
    host: HostOption = None,
    rsh: RshOption = "",
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Run configurations, also on several hosts, and compare times and memory with the simulator's predictions."""
    from distir_relax.calibration.validate import validate as run_and_compare
    from distir_relax.cost.profile import load_profile
    from distir_relax.report.scatter_plot import write_plot
    from distir_relax.report.validation import json_text, table
    from distir_relax.runtime.hosts import HostList, read_hosts
    from distir_relax.runtime.inputs import check_writable

    if (profile is None) == (calibrate is None):
        raise DistIRError(
            "expected either --profile or --calibrate", hint="--calibrate FILE.toml measures this machine"
        )
    if calibrate is not None:
        check_writable(calibrate)
    compared = [name.strip() for name in compare.split(",") if name.strip()]
    machine = load_profile(profile) if profile else None
    key, device = reading["require_signature"], running["device"]
    hosts = HostList() if host is None else HostList(read_hosts(host), rsh)
    validation = run_and_compare(targets, machine, steps, threads, passes, compared, key, device, hosts)
    if calibrate is not None and validation.calibration is not None:
        validation.calibration.write(calibrate)
    if plot is not None:
        write_plot(validation, plot)
    typer.echo(json_text(validation) if json else table(validation))


@app.command(hidden=True)
def time_bundles(request: str, answer: Path, bundles: list[Path]) -> None:
    """Run one rank of `distir validate`."""
    from distir_relax.calibration.validate import time_bundles as run_all
    from distir_relax.runtime.join import joined_world

    with joined_world() as world:
        run_all(request, answer, bundles, world)
        world.close()
