"""The bundle of a compiled plan: manifest, programs, texts and weights. The format is in ``docs/bundle.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distir_relax import bundle as format_
from distir_relax.errors import DistIRError, PlacementError, VerificationError
from distir_relax.ir import (
    Divided,
    DTensorType,
    Function,
    Module,
    TensorType,
    Value,
    inline,
    lay_out,
    print_module,
    print_records,
)
from distir_relax.layout import At, DeviceMesh, R, Shard, holders, print_placements
from distir_relax.lowering.emit.torch import to_torch
from distir_relax.ops import Trait, lookup
from distir_relax.sharding import remarks

if TYPE_CHECKING:
    import torch


def to_bundle(
    name: str,
    sharded: Module,
    distributed: Module,
    ranked: Module,
    tensors: Mapping[str, torch.Tensor],
    tail: str,
    backends: tuple[str, ...] = format_.BACKENDS,
    fast_math: bool = False,
) -> format_.Bundle:
    """A bundle in memory. `tensors` are the global weights, shared and not copied.

    Without `backends` it holds the texts of the stages alone. `fast_math` is as for `to_relax`. Raises `DistIRError`
    for an unknown backend, and for weights without data; and what the emission of a backend raises.
    """
    mesh = distributed.meshes[0]
    texts = {"sharded.txt": print_module(sharded, remarks(sharded)), "distir.txt": print_module(distributed)}
    main = sharded.main
    placed = zip(main.inputs, distributed.main.inputs, strict=True)
    layouts = [(i.value.name, _at_place(i.value, there.value, mesh), i.role) for i, there in placed]
    ends = zip(main.outputs, distributed.main.outputs, strict=True)
    outputs = [(o.name, _at_place(o.value, there.value, mesh)) for o, there in ends]
    if missing := [i.value.name for i in main.inputs if i.role != "input" and i.value.name not in tensors]:
        raise DistIRError(
            f"expected the data of the weights {', '.join(missing)}, found none",
            hint="compile(mod, params=...) takes those of a TVM module",
        )
    updates: Mapping[str, str] = {}
    if any(lookup(op.name).code.in_place for function in sharded.functions for op in function.ops):
        flat = inline(sharded).main
        _check_updates(flat)
        _check_state(flat)
        updates = _updates(flat)
    return _bundle(name, mesh, ranked, texts, layouts, outputs, updates, tensors, tail, backends, fast_math)


def _at_place(value: Value, local: Value, mesh: DeviceMesh) -> DTensorType:
    """How a value lies on `mesh`, of which its own may be one place; `local` is on the devices of that place, or of
    all."""
    kind = value.dtensor
    if len(kind.placements) == len(mesh.shape):
        return kind
    devices = local.placed.devices
    where = R if len(devices) == mesh.size else At(devices[0] // (mesh.size // mesh.shape[0]))
    return replace(kind, placements=(where, *kind.placements))


def program_to_bundle(
    name: str,
    module: Module,
    ranked: Module,
    tensors: Mapping[str, torch.Tensor],
    backends: tuple[str, ...] = ("torch",),
) -> format_.Bundle:
    """A bundle of a program of the distributed stage that says itself how its inputs and outputs lie.

    `ranked` is what its ranks do. `tensors` are its parameters, constants and state by name. Raises `DistIRError` for
    an input or output without a layout, for a tensor that is missing or unlike what the program takes, and as
    `to_bundle` does.
    """
    flat = inline(module)
    main = flat.main
    _check_updates(main)
    mesh = flat.meshes[0]
    layouts = [(i.value.name, _declared("input", i.value.name, i.value, i.layout, mesh), i.role) for i in main.inputs]
    outputs = [(o.name, _declared("output", o.name, o.value, o.layout, mesh)) for o in main.outputs]
    _check_tensors([(label, kind) for label, kind, role in layouts if role != "input"], tensors)
    texts = {"distir.txt": print_module(module)}
    return _bundle(name, mesh, ranked, texts, layouts, outputs, _updates(main), tensors, "ragged", backends)


_EXAMPLE = 'input %x: f32[4,8] @ {0,1} as R.DTensor((8, 8), "float32", "mesh[0]", "S[0]")'


def _declared(what: str, label: str, value: Value, layout: DTensorType | None, mesh: DeviceMesh) -> DTensorType:
    """The layout of an input or output, with all its sizes; devices must hold just the pieces that it says."""
    if layout is None:
        raise DistIRError(
            f"the {what} {label!r} does not say how it lies", hint=f"write it: {_EXAMPLE}, or tensor(…) in a builder"
        )
    where = f"{what} {label!r}"
    try:
        settled, pieces = lay_out(layout.shape, layout.dtype, print_placements(layout.placements), mesh)
    except PlacementError as error:
        raise PlacementError(error.message, where, error.hint) from None
    if pieces != value.placed:
        raise VerificationError(f"{settled} is in pieces of {pieces}, the program says {value.type}", where)
    return settled


def _bundle(
    name: str,
    mesh: DeviceMesh,
    ranked: Module,
    texts: dict[str, str],
    inputs: Sequence[tuple[str, DTensorType, str]],
    outputs: Sequence[tuple[str, DTensorType]],
    updates: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    tail: str,
    backends: tuple[str, ...],
    fast_math: bool = False,
) -> format_.Bundle:
    if unknown := set(backends) - set(format_.BACKENDS):
        raise DistIRError(
            f"bundles hold programs for {', '.join(format_.BACKENDS)}, found {', '.join(sorted(unknown))}"
        )
    _check_updates_in_place(mesh, inputs, dict(outputs), updates)
    files: dict[str, str] = {}
    entries = [f for f in ranked.functions if f.name in ranked.ranks]
    paths: dict[str, dict[str, str]] = {f.name: {} for f in entries}
    if "torch" in backends:
        for program, text in to_torch(ranked, name).items():
            paths[program]["torch"] = f"programs/{program}.py"
            files[f"programs/{program}.py"] = text
    if "tvm" in backends:
        from distir_relax.lowering.emit.relax import to_relax_json

        for program, text in to_relax_json(ranked, fast_math).items():
            paths[program]["relax"] = f"programs/{program}.json"
            files[f"programs/{program}.json"] = text
    order = [f.name for f in entries]
    manifest = format_.Manifest(
        name=name,
        mesh=mesh,
        tail=tail,
        schedule_hash=hashlib.sha256(texts["distir.txt"].encode()).hexdigest(),
        programs=tuple(
            format_.Program(
                f.name, paths[f.name].get("torch"), paths[f.name].get("relax"), tuple(i.value.name for i in f.inputs)
            )
            for f in entries
        ),
        ranks=tuple(order.index(function) for function in ranked.ranks),
        inputs=tuple(_tensor(label, kind, mesh) for label, kind, role in inputs if role == "input"),
        outputs=tuple(_tensor(label, kind, mesh) for label, kind in outputs),
        weights=tuple(_tensor(label, kind, mesh) for label, kind, role in inputs if role != "input"),
        updates=updates,
        divided_inputs=_divisions(ranked, "input"),
        divided_outputs=_divisions(ranked, "output"),
    )
    texts = {**texts, "ranked.txt": print_module(ranked), format_.RECORDS_FILE: print_records(ranked.records)}
    return format_.Bundle(manifest, files, format_.TensorWeights(tensors), texts)


def _divisions(module: Module, role: str) -> tuple[format_.Division, ...]:
    found = (record for record in module.records if isinstance(record, Divided) and record.role == role)
    return tuple(format_.Division(record.value, record.dim, record.names) for record in found)


def _check_updates_in_place(
    mesh: DeviceMesh,
    inputs: Sequence[tuple[str, DTensorType, str]],
    outputs: Mapping[str, DTensorType],
    updates: Mapping[str, str],
) -> None:
    """The new value of a weight is computed by the ranks that hold the weight."""
    for name, kind, _ in inputs:
        if name in updates and holders(kind.placements, mesh) != holders(outputs[updates[name]].placements, mesh):
            new = outputs[updates[name]]
            raise VerificationError(
                f"{name!r} is placed as {print_placements(kind.placements)}, and its new value, {updates[name]!r}, as "
                f"{print_placements(new.placements)}"
            )


def _check_tensors(expected: Sequence[tuple[str, DTensorType]], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, kind in expected:
        if name not in tensors:
            raise DistIRError(f"expected a tensor for {name!r}, found none")
        found = TensorType(tuple(tensors[name].shape), str(tensors[name].dtype).removeprefix("torch."))
        if found != kind.tensor:
            raise DistIRError(f"expected {kind.tensor} for {name!r}, found {found}")


def _check_updates(main: Function) -> None:
    """Nothing may use a tensor, or a view of it, after it was updated in place."""
    storage = {i.value.name: i.value.name for i in main.inputs}
    updated: dict[str, str] = {}
    for op in main.ops:
        entry = lookup(op.name, op.location)
        for value in op.operands:
            if storage[value.name] in updated:
                raise VerificationError(f"{op.name} uses {value} after {updated[storage[value.name]]}", op.location)
        if entry.code.in_place:
            updated[storage[op.operands[0].name]] = f"{op.name} has updated it in place"
        for value in op.results:
            storage[value.name] = (
                storage[op.operands[0].name] if Trait.VIEW in entry.traits and op.operands else value.name
            )


def _check_state(main: Function) -> None:
    """No weight or state is laid out anew before it is updated: what would be updated is the copy."""
    state = {item.value.name: item.role for item in main.inputs if item.role != "input"}
    copies = {
        op.results[0].name: op.operands[0]
        for op in main.ops
        if Trait.REDISTRIBUTION in lookup(op.name).traits and op.operands[0].name in state
    }
    for op in main.ops:
        if lookup(op.name).code.in_place and op.operands[0].name in copies:
            own, new = copies[op.operands[0].name], op.results[0].dtensor
            role = state[own.name]
            raise PlacementError(
                f"the {role} {own.name!r} lies as {print_placements(own.dtensor.placements)}, and its new value as "
                f"{print_placements(new.placements)}",
                op.location,
                f"annotate them alike, or leave the annotation of the {role} out",
            )


def _updates(main: Function) -> dict[str, str]:
    """For each weight that an op updates in place, the output that is its new value."""
    parameters = {i.value.name for i in main.inputs if i.role != "input"}
    of = {
        op.results[0].name: op.operands[0].name
        for op in main.ops
        if lookup(op.name).code.in_place and op.operands[0].name in parameters
    }
    return {of[o.value.name]: o.name for o in main.outputs if o.value.name in of}


def _tensor(name: str, kind: DTensorType, mesh: DeviceMesh) -> format_.Tensor:
    shards = []
    for axis, placement in enumerate(kind.placements):
        if isinstance(placement, Shard):
            assert placement.cut is not None
            intervals = tuple(tuple(placement.cut.intervals(i)) for i in range(mesh.shape[axis]))
            shards.append(format_.Shard(axis, placement.dim, intervals))
    ranks = None
    if any(isinstance(p, At) for p in kind.placements):
        ranks = holders(kind.placements, mesh)
    return format_.Tensor(name, kind.dtype, kind.shape, print_placements(kind.placements), tuple(shards), ranks)
