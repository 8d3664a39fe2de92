"""Build the bundle of a compiled plan: manifest, programs, texts and weights. The format is in ``docs/bundle.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distir_relax import bundle as format_
from distir_relax.errors import DistIRError, PlacementError, VerificationError
from distir_relax.ir import (
    CachedState,
    DTensorType,
    Function,
    HeadPartition,
    MicrobatchParts,
    Module,
    TensorType,
    Value,
    inline,
    make_layout,
    print_module,
    print_records,
)
from distir_relax.ir.symbols import module_symbols, specialize_layout
from distir_relax.layout import (
    At,
    DeviceMesh,
    Interval,
    R,
    Shard,
    Symbol,
    assuming,
    multiple_of_symbol,
    print_placements,
    shard_devices,
    symbols_within,
)
from distir_relax.lowering.emit.torch import to_torch
from distir_relax.ops import Trait, lookup
from distir_relax.sharding import layout_comments

if TYPE_CHECKING:
    import torch

_NO_ORIGIN = format_.Origin()


def to_bundle(
    name: str,
    sharded: Module,
    distributed: Module,
    ranked: Module,
    tensors: Mapping[str, torch.Tensor],
    tail: str,
    backends: tuple[str, ...] = format_.BACKENDS,
    fast_math: bool = False,
    origin: format_.Origin = _NO_ORIGIN,
) -> format_.Bundle:
    """Build a bundle in memory. `tensors` are the global weights, which are shared, not copied.

    The distributed program may be a part of the sharded one, with some of its inputs and outputs. Any backend can run
    the bundle. The code of `backends` is generated now, so that its errors show: for torch the bundle has it for
    reading. `fast_math` is as for `to_relax`, `origin` is that of the model. Raises `DistIRError` for an unknown
    backend and for weights without data, and the errors of the backends' code generation.
    """
    mesh = distributed.meshes[0]
    texts = {"sharded.txt": print_module(sharded, layout_comments(sharded)), "distir.txt": print_module(distributed)}
    declared, results = {i.value.name: i for i in sharded.main.inputs}, {o.name: o for o in sharded.main.outputs}
    layouts = [
        (local.value.name, _layout_on(declared[local.value.name].value, local.value, mesh), local.role)
        for local in distributed.main.inputs
    ]
    outputs = [(o.name, _layout_on(results[o.name].value, o.value, mesh)) for o in distributed.main.outputs]
    if missing := [name for name, _, role in layouts if role != "input" and name not in tensors]:
        raise DistIRError(
            f"expected the data of the weights {', '.join(missing)}, found none",
            hint="compile(mod, params=...) takes those of a TVM module",
        )
    _check_states(ranked, layouts, dict(outputs))
    updates: Mapping[str, str] = {}
    if any(lookup(op.name).updates for function in sharded.functions for op in function.ops):
        inlined = inline(sharded).main
        _check_updates(inlined)
        _check_state(inlined)
        updates = _updates(inlined)
    return _bundle(name, mesh, ranked, texts, layouts, outputs, updates, tensors, tail, backends, fast_math, origin)


def _layout_on(value: Value, local: Value, mesh: DeviceMesh) -> DTensorType:
    """Return the layout of a value on `mesh`, whose first axis may be that of places; `local` is on the devices of its
    place, or on all."""
    layout = value.dtensor
    if len(layout.placements) == len(mesh.shape):
        return layout
    devices = local.placed.devices
    place = R if len(devices) == mesh.size else At(devices[0] // (mesh.size // mesh.shape[0]))
    return replace(layout, placements=(place, *layout.placements))


def program_to_bundle(
    name: str,
    module: Module,
    ranked: Module,
    tensors: Mapping[str, torch.Tensor],
    backends: tuple[str, ...] = ("torch",),
) -> format_.Bundle:
    """Build a bundle of a distributed program that declares the layouts of its inputs and outputs.

    `ranked` is its projection to ranks. `tensors` are its parameters, constants and state by name. Raises `DistIRError`
    for an input or output without a layout, for a tensor that is missing or has another type, and the errors of
    `to_bundle`.
    """
    inlined = inline(module)
    main = inlined.main
    _check_updates(main)
    mesh = inlined.meshes[0]
    layouts = [(i.value.name, _resolve("input", i.value.name, i.value, i.layout, mesh), i.role) for i in main.inputs]
    outputs = [(o.name, _resolve("output", o.name, o.value, o.layout, mesh)) for o in main.outputs]
    _check_tensors([(label, kind) for label, kind, role in layouts if role != "input"], tensors)
    texts = {"distir.txt": print_module(module)}
    return _bundle(name, mesh, ranked, texts, layouts, outputs, _updates(main), tensors, "ragged", backends)


_EXAMPLE = 'input %x: f32[4,8] @ {0,1} as R.DTensor((8, 8), "float32", "mesh[0]", "S[0]")'


def _resolve(what: str, label: str, value: Value, layout: DTensorType | None, mesh: DeviceMesh) -> DTensorType:
    """Resolve the declared layout of an input or output, and check that the local type is consistent with it."""
    if layout is None:
        raise DistIRError(
            f"the {what} {label!r} does not declare its layout", hint=f"write it: {_EXAMPLE}, or tensor(…) in a builder"
        )
    where = f"{what} {label!r}"
    try:
        resolved, local = make_layout(layout.shape, layout.dtype, print_placements(layout.placements), mesh)
    except PlacementError as error:
        raise PlacementError(error.message, where, error.hint) from None
    if local != value.placed:
        raise VerificationError(f"the local type of {resolved} is {local}, the program declares {value.type}", where)
    return resolved


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
    origin: format_.Origin = _NO_ORIGIN,
) -> format_.Bundle:
    if unknown := set(backends) - set(format_.BACKENDS):
        raise DistIRError(f"expected backends among {', '.join(format_.BACKENDS)}, found {', '.join(sorted(unknown))}")
    _check_updates_in_place(mesh, inputs, dict(outputs), updates)
    files: dict[str, str] = {}
    entries = [f for f in ranked.functions if f.name in ranked.ranks]
    with assuming(ranked.guards):
        if "torch" in backends:
            files = {f"programs/{program}.py": text for program, text in to_torch(ranked, name).items()}
        if "tvm" in backends:
            from distir_relax.lowering.emit.relax import to_relax_programs

            to_relax_programs(ranked, fast_math)
    order = [f.name for f in entries]
    states = {record.input: record for record in ranked.records if isinstance(record, CachedState)}
    heads = {record.value: record for record in ranked.records if isinstance(record, HeadPartition) and record.copies}
    next_states = {record.output for record in states.values()}
    weights = format_.TensorWeights(tensors)
    manifest = format_.Manifest(
        name=name,
        mesh=mesh,
        tail=tail,
        schedule_hash=hashlib.sha256(texts["distir.txt"].encode()).hexdigest(),
        programs=tuple(
            format_.Program(f.name, path if (path := f"programs/{f.name}.py") in files else None, _input_names(f))
            for f in entries
        ),
        ranks=tuple(order.index(function) for function in ranked.ranks),
        inputs=tuple(_tensor(label, k, mesh) for label, k, role in inputs if role == "input" and label not in states),
        outputs=tuple(_tensor(label, kind, mesh) for label, kind in outputs if label not in next_states),
        weights=tuple(_weight(label, k, mesh, heads.get(label)) for label, k, role in inputs if role != "input"),
        parameters={label: weights.name_in_file(label) for label, _, role in inputs if role == "parameter"},
        updates=updates,
        divided_inputs=_batch_divisions(ranked, "input"),
        divided_outputs=_batch_divisions(ranked, "output"),
        symbols=_call_symbols(ranked, inputs),
        guards=ranked.guards,
        states=tuple(
            format_.State(_tensor(label, kind, mesh), states[label].dim, states[label].grows)
            for label, kind, _ in inputs
            if label in states
        ),
        fast_math=fast_math,
        provenance=origin.provenance(("numpy", "torch", *(("tvm",) if "tvm" in backends else ()))),
    )
    texts = {**texts, "ranked.txt": print_module(ranked), format_.RECORDS_FILE: print_records(ranked.records)}
    return format_.Bundle(manifest, files, weights, texts, source_files=origin.files)


def _input_names(function: Function) -> tuple[str, ...]:
    return tuple(item.value.name for item in function.inputs)


def _call_symbols(ranked: Module, inputs: Sequence[tuple[str, DTensorType, str]]) -> tuple[Symbol, ...]:
    """Return the symbols of a program, whose values a call determines by its inputs' sizes.

    A program that continues a sequence may also have the sizes ``past`` and ``last``, which its caller chooses
    (`incremental.LastPositions`), and those of states that an encoder has computed.

    Raises `DistIRError` for a symbol that is not the size of an input.
    """
    symbols = set(module_symbols(ranked).values()).union(*(symbols_within(kind.shape) for _, kind, _ in inputs))
    # States are inputs here, too.
    sized = {n for _, kind, role in inputs if role == "input" for n in kind.shape}
    for record in ranked.records:
        if isinstance(record, MicrobatchParts) and record.role == "input":
            shapes = [kind.shape[record.dim] for name, kind, _ in inputs if name in record.parts]
            sized.add(sum(shapes))
    determined = {found[0] for n in sized if (found := multiple_of_symbol(n))}
    is_continued = any(isinstance(record, CachedState) for record in ranked.records)
    for symbol in symbols:
        if symbol not in determined and not (is_continued and symbol.name in ("past", "last")):
            raise DistIRError(f"expected an input with a dim of size {symbol}, found none", hint="name such a dim")
    return tuple(sorted(symbols, key=str))


def _check_states(
    ranked: Module, inputs: Sequence[tuple[str, DTensorType, str]], outputs: Mapping[str, DTensorType]
) -> None:
    """Check that each state is left as the next call takes it, at its size then."""
    kinds = {name: kind for name, kind, _ in inputs}
    for record in ranked.records:
        if isinstance(record, CachedState):
            before, after = kinds[record.input], outputs[record.output]
            before = specialize_layout(before, {"past": after.shape[record.dim]} if record.grows else {})
            if before.placements != after.placements:
                raise PlacementError(
                    f"the state {record.input!r} is placed as {print_placements(before.placements)}, and its next value"
                    f" as {print_placements(after.placements)}"
                )


def _batch_divisions(module: Module, role: str) -> tuple[format_.Division, ...]:
    records = (record for record in module.records if isinstance(record, MicrobatchParts) and record.role == role)
    return tuple(format_.Division(record.value, record.dim, record.parts) for record in records)


def _check_updates_in_place(
    mesh: DeviceMesh,
    inputs: Sequence[tuple[str, DTensorType, str]],
    outputs: Mapping[str, DTensorType],
    updates: Mapping[str, str],
) -> None:
    """Check that the ranks that hold a weight are those that compute its new value."""
    for name, kind, _ in inputs:
        if name in updates and shard_devices(kind.placements, mesh) != shard_devices(
            outputs[updates[name]].placements, mesh
        ):
            new = outputs[updates[name]]
            raise VerificationError(
                f"{name!r} is placed as {print_placements(kind.placements)}, and its new value, {updates[name]!r}, as "
                f"{print_placements(new.placements)}"
            )


def _check_tensors(expected: Sequence[tuple[str, DTensorType]], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, kind in expected:
        if name not in tensors:
            raise DistIRError(f"expected a tensor for {name!r}, found none")
        actual = TensorType(tuple(tensors[name].shape), str(tensors[name].dtype).removeprefix("torch."))
        if actual != kind.tensor:
            raise DistIRError(f"expected {kind.tensor} for {name!r}, found {actual}")


def _check_updates(main: Function) -> None:
    """Check that no op uses a tensor, or a view of it, after it was updated in place."""
    storage = {i.value.name: i.value.name for i in main.inputs}
    updated: dict[str, str] = {}
    for op in main.ops:
        entry = lookup(op.name, op.location)
        for value in op.operands:
            if storage[value.name] in updated:
                raise VerificationError(f"{op.name} uses {value} after {updated[storage[value.name]]}", op.location)
        if entry.updates:
            updated[storage[op.operands[0].name]] = f"{op.name} has updated it in place"
        for value in op.results:
            storage[value.name] = (
                storage[op.operands[0].name] if Trait.VIEW in entry.traits and op.operands else value.name
            )


def _check_state(main: Function) -> None:
    """Check that no weight or state is resharded before its update: only the copy would be updated."""
    state = {item.value.name: item.role for item in main.inputs if item.role != "input"}
    copies = {
        op.results[0].name: op.operands[0]
        for op in main.ops
        if Trait.REDISTRIBUTION in lookup(op.name).traits and op.operands[0].name in state
    }
    for op in main.ops:
        if lookup(op.name).updates and op.operands[0].name in copies:
            source, updated = copies[op.operands[0].name], op.results[0].dtensor
            role = state[source.name]
            raise PlacementError(
                f"the {role} {source.name!r} is placed as {print_placements(source.dtensor.placements)}, and its new "
                f"value as {print_placements(updated.placements)}",
                op.location,
                f"annotate both alike, or remove the annotation of the {role}",
            )


def _updates(main: Function) -> dict[str, str]:
    """Return for each weight that an op updates in place the output with its new value."""
    parameters = {i.value.name for i in main.inputs if i.role != "input"}
    updated_weight = {
        op.results[0].name: op.operands[0].name
        for op in main.ops
        if lookup(op.name).updates and op.operands[0].name in parameters
    }
    return {updated_weight[o.value.name]: o.name for o in main.outputs if o.value.name in updated_weight}


def _weight(name: str, kind: DTensorType, mesh: DeviceMesh, heads: HeadPartition | None) -> format_.Tensor:
    """Return the layout of a weight as it is stored: of copies of a head, each rank reads the rows of the head."""
    tensor = _tensor(name, kind, mesh)
    if heads is None:
        return tensor
    rows = kind.shape[heads.dim] // len(heads.copies)

    def stored(pieces: Sequence[Interval]) -> tuple[Interval, ...]:
        copies = [heads.copies[start // rows] for piece in pieces for start in range(*piece, rows)]
        return ((copies[0] * rows, (copies[-1] + 1) * rows),) if copies else ()

    shards = [replace(s, intervals=tuple(map(stored, s.intervals))) if s.dim == heads.dim else s for s in tensor.shards]
    assert any(s.dim == heads.dim for s in shards), f"the heads of {name} are divided"
    shape = (*kind.shape[: heads.dim], heads.count * rows, *kind.shape[heads.dim + 1 :])
    return replace(tensor, shape=shape, shards=tuple(shards))


def _tensor(name: str, kind: DTensorType, mesh: DeviceMesh) -> format_.Tensor:
    shards = []
    for axis, placement in enumerate(kind.placements):
        if isinstance(placement, Shard):
            assert placement.cut is not None
            intervals = tuple(tuple(placement.cut.intervals(i)) for i in range(mesh.shape[axis]))
            shards.append(format_.Shard(axis, placement.dim, intervals))
    ranks = None
    if any(isinstance(p, At) for p in kind.placements):
        ranks = shard_devices(kind.placements, mesh)
    return format_.Tensor(name, kind.dtype, kind.shape, print_placements(kind.placements), tuple(shards), ranks)
