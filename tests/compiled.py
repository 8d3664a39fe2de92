"""Programs as the passes of the compiler make them, verified on the way, and run against the program that was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distir_relax.compiler.pass_manager import Observer, Stages, Verify, run_passes
from distir_relax.compiler.pass_pipeline import compile_passes
from distir_relax.interpret import execute, interpret
from distir_relax.ir import Module, Pass, parse, print_module
from distir_relax.layout import DeviceMesh


class RoundTrips(Observer):
    """Fails unless the program's text, after each pass, is the program."""

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        assert parse(print_module(module)) == module


def compiled(
    module: Module,
    tail: str = "ragged",
    mesh: DeviceMesh | None = None,
    shardings: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    observers: Sequence[Observer] = (Verify(), RoundTrips()),
) -> dict[str, Module]:
    """The program at the end of each stage, by the stage's name."""
    stages = Stages()
    run_passes(module, compile_passes(mesh, tail, shardings, names), [stages, *observers])
    return stages.modules


def check_results(stages: Mapping[str, Module], tensors: Mapping[str, torch.Tensor], where: str = "") -> None:
    """Fail unless the distributed program gives what the global one does, to 1e-9 in float64."""
    expected = interpret(stages["global"].main, tensors)
    found = execute(stages["sharded"], stages["distributed"], tensors)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{where} %{name}: {text}"
        )
