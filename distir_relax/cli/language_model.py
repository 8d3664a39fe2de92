"""The language model of `distir serve`, `generate` and `chat`: a bundle, or the folder or GGUF file of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from distir_relax.errors import RunError

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="BUNDLE | DIR | FILE.gguf",
        help="A folder of distir compile, or a folder of save_pretrained or a GGUF file, which is compiled now.",
    ),
]
ModelStrategyOption = Annotated[
    str | None,
    typer.Option("--strategy", metavar="D/T/P/K", help="Of a DIR or a GGUF file: how it is distributed."),
]
ModelPrecisionOption = Annotated[
    str | None,
    typer.Option("--precision", help="Of a DIR or a GGUF file: float32, bf16, int8, int8-channel or int4."),
]


@contextmanager
def compiled_model(model: Path, strategy: str | None, precision: str | None) -> Iterator[Path]:
    """Yield the bundle at `model`; the folder or GGUF file of a model is compiled to one that lasts for the block.

    Its weights stay in their files. Raises RunError for options of a compilation if there is none, and the errors of
    compiling.
    """
    from distir_relax.frontends.pretrained import is_pretrained
    from distir_relax.frontends.pretrained_language_model import is_gguf

    given = {"strategy": strategy, "precision": precision}
    options = {name: value for name, value in given.items() if value is not None}
    if not is_pretrained(model) and not is_gguf(model):
        if options:
            raise RunError(
                f"--{next(iter(options))} is for a folder of a model or a GGUF file, found a bundle", str(model),
                "give it to distir compile",
            )  # fmt: skip
        yield model
        return
    from rich.console import Console

    from distir_relax.cli.compile_target import Target, compile_target
    from distir_relax.cli.progress import Progress
    from distir_relax.runtime.launcher_detection import detect

    if detect() is not None:
        raise RunError(
            "expected a bundle under a launcher, found the model itself: every rank would compile it", str(model),
            "compile it once, with distir compile --generate",
        )  # fmt: skip
    generation = {"generate": True, "max_length": None, "max_batch": None, "max_source": None, "weights": None}
    with TemporaryDirectory(prefix="distir-") as folder:
        bundle = Path(folder) / f"{model.stem if is_gguf(model) else model.resolve().name}.dist"
        with Progress(Console(stderr=True), f"compiling {model}") as progress:
            target = Target(str(model), options, generation=generation)
            compiled = compile_target(target, bundle, ("torch",), [progress], progress.written)
        if compiled.precision is not None:
            typer.echo(compiled.precision, err=True)
        yield bundle
