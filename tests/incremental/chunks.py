"""Runs incremental programs on a sequence in chunks, on the reference executor."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from distir_relax.frontends.imported_model import Imported
from distir_relax.incremental import Incremental
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import CachedState, Module, TensorType, parse, print_module, verify
from distir_relax.ir.symbols import module_symbols, specialize
from distir_relax.ops import check


def derived(imported: Imported, sequence: str = "sequence") -> Module:
    """The incremental program, verified; its text parses back to it."""
    module = Incremental(sequence).run(imported.module)
    verify(module, check)
    assert parse(print_module(module)) == module
    return module


def cuts(length: int, seed: int) -> list[int]:
    """The bounds of random chunks of a sequence."""
    rng = random.Random(seed)
    return [0, *sorted(rng.sample(range(1, length), rng.randint(0, min(6, length - 1)))), length]


def in_chunks(
    module: Module,
    imported: Imported,
    inputs: Mapping[str, torch.Tensor],
    bounds: Sequence[int],
    dim: int = 1,
    whole: Mapping[str, torch.Tensor] = MappingProxyType({}),
    **sizes: int,
) -> dict[str, torch.Tensor]:
    """The outputs for a whole sequence along `dim` of each input, which is given in chunks.

    Inputs that are `whole` are the same in each call; their `sizes` are values of symbols.
    """
    outputs = [*_steps(module, imported, inputs, bounds, dim, whole, sizes)]
    return {name: torch.cat([each[name] for each in outputs], dim) for name in outputs[0]}


def _steps(
    module: Module,
    imported: Imported,
    inputs: Mapping[str, torch.Tensor],
    bounds: Sequence[int],
    dim: int,
    whole: Mapping[str, torch.Tensor],
    given: Mapping[str, int],
) -> Iterator[dict[str, torch.Tensor]]:
    states = {record.input: record.output for record in module.records if isinstance(record, CachedState)}
    known = {s.name for s in module_symbols(module).values()} - {"past", "new"}
    carried: dict[str, torch.Tensor] = {}
    for first, last in itertools.pairwise(bounds):
        sizes = (
            {"past": first, "new": last - first}
            | {name: next(iter(inputs.values())).shape[0] for name in known}
            | given
        )
        fixed = specialize(module, sizes)
        for item in fixed.main.inputs:
            if item.value.name in states and not first:
                carried[item.value.name] = _zeros(item.value.tensor)
        chunk = {name: x.narrow(dim, first, last - first) for name, x in inputs.items()}
        found = interpret(fixed, {**imported.tensors, **carried, **whole, **chunk})
        carried = {state: found.pop(output) for state, output in states.items()}
        yield found


def _zeros(kind: TensorType) -> torch.Tensor:
    return torch.zeros(kind.shape, dtype=getattr(torch, kind.dtype))
