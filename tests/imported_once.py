"""Models that are imported once in a process, and compiled in several ways: the export takes most of the time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import distir_relax as dr
from distir_relax.compiler.compile import compile_source, default_name, read_model
from distir_relax.compiler.generation import GenerationSource, read_generation
from distir_relax.compiler.options import complete
from distir_relax.compiler.source import Source
from distir_relax.frontends.imported_model import Imported
from tests.zoo import Case


def compile_imported(imported: Imported, name: str, **options: Any) -> dr.Plan:
    """Compile an imported model, with `CompileOptions`."""
    return compile_source(Source(imported, complete(options, name)))


def compile_case(case: Case, **options: Any) -> dr.Plan:
    """`dr.compile` of a case, with `CompileOptions`."""
    return compile_imported(_imported(case), default_name(case.model), **options)


def compile_language_model(
    model: torch.nn.Module,
    *,
    max_length: int | None = None,
    max_batch: int | None = None,
    max_source: int | None = None,
    **options: Any,
) -> dr.Generation:
    """`dr.compile_generation` of a model, with these limits and `CompileOptions`."""
    source = _generation_source(model, max_length, max_batch, max_source)
    return source.compile(complete(options, source.name))


class ImportedTraining:
    """A training whose model has been imported; all its parameters have an influence on the loss."""

    def __init__(self, training: dr.Training) -> None:
        self._training = training
        self._source = training.read()

    def compile(self, **options: Any) -> dr.TrainingStep:
        """`dr.compile_training`, with `CompileOptions`, from the parameters as they were."""
        training, source = self._training, self._source
        plan = compile_source(replace(source, options=complete(options, str(source.options["name"]))))
        assert not plan.imported.unused
        return training.step(plan, options)


@cache
def _imported(case: Case) -> Imported:
    return read_model(case.model, case.args, case.kwargs)


@cache
def _generation_source(
    model: torch.nn.Module, max_length: int | None, max_batch: int | None, max_source: int | None
) -> GenerationSource:
    return read_generation(model, max_length=max_length, max_batch=max_batch, max_source=max_source)
