"""The bundle of a compiled plan: manifest, programs, texts and weights. The format is in ``docs/bundle.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from distir_relax import bundle as format_
from distir_relax.errors import DistIRError
from distir_relax.ir import DeviceMesh, DTensorType, Function, Module, Shard, Value, print_module, print_placements
from distir_relax.lowering.to_torch import to_torch

if TYPE_CHECKING:
    import torch

BACKENDS = ("torch", "tvm")


def to_bundle(
    name: str,
    sharded: Module,
    distributed: Module,
    ranked: Module,
    tensors: Mapping[str, torch.Tensor],
    tail: str,
    backends: tuple[str, ...] = BACKENDS,
    note: Callable[[Value], str] | None = None,
) -> format_.Bundle:
    """A bundle in memory. `tensors` are the global weights, shared and not copied; `note` remarks on sharded values.

    Raises `DistIRError` for an unknown backend, and what the emission of a backend raises.
    """
    if not backends or set(backends) - set(BACKENDS):
        raise DistIRError(f"backends are {', '.join(BACKENDS)}, found {', '.join(backends) or 'none'}")
    mesh = sharded.meshes[0]
    files: dict[str, str] = {}
    paths: dict[str, dict[str, str]] = {f.name: {} for f in ranked.functions}
    if "torch" in backends:
        for program, text in to_torch(ranked, name).items():
            paths[program]["torch"] = f"programs/{program}.py"
            files[f"programs/{program}.py"] = text
    if "tvm" in backends:
        from distir_relax.lowering.to_relax import to_relax_json

        for program, text in to_relax_json(ranked).items():
            paths[program]["relax"] = f"programs/{program}.json"
            files[f"programs/{program}.json"] = text
    texts = {
        "sharded.txt": print_module(sharded, note),
        "distir.txt": print_module(distributed),
        "ranked.txt": print_module(ranked),
    }
    order = [f.name for f in ranked.functions]
    manifest = format_.Manifest(
        name=name,
        mesh=format_.Mesh(mesh.shape, mesh.axes),
        tail=tail,
        schedule_hash=hashlib.sha256(texts["distir.txt"].encode()).hexdigest(),
        programs=tuple(
            format_.Program(
                f.name, paths[f.name].get("torch"), paths[f.name].get("relax"), tuple(i.value.name for i in f.inputs)
            )
            for f in ranked.functions
        ),
        ranks=tuple(order.index(function) for function in ranked.ranks),
        inputs=_tensors(sharded.main, mesh, lambda role: role == "input"),
        outputs=tuple(_tensor(o.name, o.value, mesh) for o in sharded.main.outputs),
        weights=_tensors(sharded.main, mesh, lambda role: role != "input"),
    )
    return format_.Bundle(manifest, files, format_.TensorWeights(tensors), texts)


def _tensors(function: Function, mesh: DeviceMesh, wanted: Callable[[str], bool]) -> tuple[format_.Tensor, ...]:
    return tuple(_tensor(i.value.name, i.value, mesh) for i in function.inputs if wanted(i.role))


def _tensor(name: str, value: Value, mesh: DeviceMesh) -> format_.Tensor:
    kind = value.type
    assert isinstance(kind, DTensorType)
    shards = []
    for axis, placement in enumerate(kind.placements):
        if isinstance(placement, Shard):
            assert placement.cut is not None
            intervals = tuple(tuple(placement.cut.intervals(i)) for i in range(mesh.shape[axis]))
            shards.append(format_.Shard(axis, placement.dim, intervals))
    return format_.Tensor(name, kind.dtype, kind.shape, print_placements(kind.placements), tuple(shards))
