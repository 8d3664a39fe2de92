"""JSON output of `distir show`, `explain`, `rules` and `compile`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from distir_relax.ir import Autosharding, Function, Module, Op, PerRank, placements_of
from distir_relax.ir.program import Attribute
from distir_relax.layout import DeviceMesh, print_placements
from distir_relax.simulation.footprint import Footprint


def program_json(module: Module) -> dict[str, Any]:
    """Return a program: stage, meshes, the function of each rank (ranked stage), functions with inputs, ops, outputs.

    Types, and attributes without a JSON form, are printed as in the program's text.
    """
    return {
        "stage": module.stage,
        "meshes": [mesh_json(mesh) for mesh in module.meshes],
        "ranks": list(module.ranks),
        "functions": [_function(function) for function in module.functions],
    }


def mesh_json(mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each axis, by name."""
    return dict(zip(mesh.axes, mesh.shape, strict=True))


def compiled_json(usage: Footprint, modules: Mapping[str, Module], passes: Mapping[str, float]) -> dict[str, Any]:
    """Return a compilation: ranks, programs, bytes by rank (`sent_bytes` is null if unknown), seconds of each pass.

    `search` has the results of searches for placements, as text.
    """
    records = modules["sharded"].records if "sharded" in modules else ()
    return {
        "ranks": usage.ranks,
        "programs": usage.programs,
        "weight_bytes": list(usage.weights),
        "packed_weight_bytes": list(usage.packed),
        "sent_bytes": None if usage.sent is None else list(usage.sent),
        "passes": dict(passes),
        "search": [str(record) for record in records if isinstance(record, Autosharding)],
    }


def _function(function: Function) -> dict[str, Any]:
    return {
        "name": function.name,
        "inputs": [
            {"name": i.value.name, "role": i.role, "type": str(i.value.type), "location": i.location}
            for i in function.inputs
        ],
        "ops": [_op(op) for op in function.ops],
        "outputs": [{"name": o.name, "value": o.value.name} for o in function.outputs],
    }


def _op(op: Op) -> dict[str, Any]:
    return {
        "op": op.name,
        "operands": [value.name for value in op.operands],
        "results": [{"name": value.name, "type": str(value.type)} for value in op.results],
        "attributes": {key: _plain(value) for key, value in op.attrs.items()},
        "location": op.location,
    }


def _plain(value: Attribute) -> Any:
    if placements := placements_of(value):
        return print_placements(placements)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    infinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if isinstance(value, PerRank) or infinite else value
