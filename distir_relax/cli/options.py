"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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


class Starter(StrEnum):
    """What starts the ranks of a launch."""

    mpirun = "mpirun"
    torchrun = "torchrun"


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
TraceOption = Annotated[
    Path | None, typer.Option(help="Draw the tasks of a pipeline, predicted and measured, to this .svg.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ShardOption = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN=PLACEMENT", help="Shard parameters of a model.")
]
AutoOption = Annotated[bool, typer.Option("--auto", help="Look for the placements that take least time on --mesh.")]
MemoryOption = Annotated[
    float | None, typer.Option(min=0, metavar="BYTES", help="With --auto: what a device may need at most, as 16e9.")
]
ProfileOption = Annotated[
    str | None, typer.Option(help="By whose costs stages and placements are chosen: a name or a .toml.")
]
CheckpointOption = Annotated[
    Path | None, typer.Option(help="Safetensors file, or folder of them, with the weights of a model without data.")
]
MeshOption = Annotated[str | None, typer.Option(metavar="2x3", help="The mesh's shape, for a model.")]
AxesOption = Annotated[str | None, typer.Option(metavar="dp,tp", help="The names of the mesh's axes.")]
ShapeOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=1,3,224,224", help="The shape of an input of FILE.onnx.")
]
TaskOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Task of a DIR: causal-lm, feature-extraction, ...; by default the saved class."),
]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Samples of a call of a DIR's model; 1 unless given.")]
SequenceOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of each sample; 128, or as many as the model takes.")
]
StrategyOption = Annotated[
    str | None,
    typer.Option(metavar="D/T/P/K", help="Data, tensor, pipeline degrees, microbatches, options: 2/4/1/8,zero=1."),
]
StagesOption = Annotated[
    str | None,
    typer.Option(metavar="PATH,PATH", help="Where stages of a pipeline begin but the first: modules, or ONNX nodes."),
]


def read_stages(text: str | None) -> tuple[str, ...] | None:
    """The boundaries of stages from ``model.layers.3,model.layers.9``; None where nothing is given."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())
