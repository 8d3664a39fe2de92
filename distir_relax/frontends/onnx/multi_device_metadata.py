"""ONNX's own multi-device metadata (IR version 11): read as annotations, written from a compiled plan.

`ModelProto.configuration` names the devices; each node's `device_configurations` say how its operands and results lie
(ONNX docs/proposals/ONNXMultiDeviceProposal.md). A dim is blocks divided among shards: ``{12, 5} {64, 1}`` is a dim of
768 cut into 5 shards of whole blocks of 64. How blocks that do not divide are dealt out is left to the reader: here
balanced, as everywhere in this package, the larger shards first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.errors import AnnotationError, PlacementError
from distir_relax.ir import DTensorType, Module
from distir_relax.layout import Cut, DeviceMesh, Replicate, Segment, Shard

if TYPE_CHECKING:
    import onnx

_IR_VERSION = 11
MAX_DEVICES = 1 << 20
"""No configuration has more devices."""


@dataclass(frozen=True)
class OnnxSharding:
    """The metadata of a model.

    `specs` gives, by the first result of each node and the name of its tensor, a placement as text; `stages` the
    pipeline stage of a node, by its first result. Stages are a hint of the model: the compiler does not act on them.
    """

    mesh: DeviceMesh
    specs: Mapping[str, Mapping[str, str]]
    stages: Mapping[str, int]


def read_sharding(model: onnx.ModelProto, where: str = "model") -> OnnxSharding | None:
    """The metadata of the model's first configuration; None where it has none.

    Only 1-D layouts can be read: all devices of the configuration in order, with one dim split among them or none.
    Raises `AnnotationError` for any other.
    """
    if not model.configuration:
        return None
    configuration = model.configuration[0]
    if not 0 <= configuration.num_devices <= MAX_DEVICES:
        raise AnnotationError(
            f"expected a configuration of at most {MAX_DEVICES:,} devices, found {configuration.num_devices:,}", where
        )
    mesh = DeviceMesh((max(1, configuration.num_devices),), ("tp",))
    specs: dict[str, dict[str, str]] = {}
    stages: dict[str, int] = {}
    for node in model.graph.node:
        key = node_key(node)
        for chosen in node.device_configurations:
            if chosen.configuration_id != configuration.name:
                continue
            if chosen.HasField("pipeline_stage"):
                stages[key] = chosen.pipeline_stage
            for spec in chosen.sharding_spec:
                place = f"{where}:{node.name or key}, {spec.tensor_name}"
                specs.setdefault(key, {})[spec.tensor_name] = _placement(spec, mesh.size, place)
    return OnnxSharding(mesh, specs, stages)


def node_key(node: onnx.NodeProto) -> str:
    """What a node is told by: its first result, which no other node gives."""
    return str(next(filter(None, node.output), node.name))


def write_sharding(
    model: onnx.ModelProto, sharded: Module, values: Mapping[str, str], name: str = "distir"
) -> onnx.ModelProto:
    """A copy of the model with the layouts of a sharded program as its metadata, in place of what it had.

    `values` leads from the model's tensors to values of the program (`Imported.values`). Tensors that the program does
    not have, such as folded shapes, get no layout. Pipeline stages of the model stay. Raises `PlacementError` for a
    mesh of several axes, and for sizes that ONNX cannot express.
    """
    import onnx

    mesh = sharded.meshes[0]
    if len(mesh.shape) != 1:
        raise PlacementError(f"expected a mesh of one axis for ONNX's metadata, found {mesh}")
    function = sharded.main
    types = {item.value.name: item.value.type for item in function.inputs}
    types.update({value.name: value.type for op in function.ops for value in op.results})
    before = read_sharding(model)
    marked = onnx.ModelProto()
    marked.CopyFrom(model)
    marked.ir_version = max(marked.ir_version, _IR_VERSION)
    del marked.configuration[:]
    marked.configuration.add(name=name, num_devices=mesh.size)
    for node in marked.graph.node:
        del node.device_configurations[:]
        chosen = onnx.NodeDeviceConfigurationProto(configuration_id=name)
        for tensor in dict.fromkeys([*node.input, *node.output]):
            kind = types.get(values.get(tensor, ""))
            if isinstance(kind, DTensorType) and (spec := _spec(tensor, kind, mesh.size)) is not None:
                chosen.sharding_spec.append(spec)
        stage = before.stages.get(node_key(node)) if before else None
        if stage is not None:
            chosen.pipeline_stage = stage
        if chosen.sharding_spec or stage is not None:
            node.device_configurations.append(chosen)
    return marked


def _placement(spec: Any, devices: int, place: str) -> str:
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    held = [device for item in spec.device for device in groups.get(item, [item])]
    split = [(dim.axis, [s for s in dim.simple_sharding if s.num_shards > 1], dim) for dim in spec.sharded_dim]
    split = [(axis, simple, dim) for axis, simple, dim in split if simple]
    if held != list(range(devices)) or len(split) > 1 or (split and len(split[0][1]) > 1):
        raise AnnotationError(
            f"expected devices 0 to {devices - 1} in order and at most one dim split among them, found devices "
            f"{list(spec.device)}",
            place,
            "remove the model's configuration, and give shardings= and mesh=",
        )
    if not split:
        return str(Replicate())
    axis, (simple,), dim = split[0]
    if simple.num_shards != devices or any(item in groups for item in spec.device):
        raise AnnotationError(f"expected {devices} shards, one a device, found {simple.num_shards}", place)
    position = list(dim.simple_sharding).index(simple)
    if len(dim.simple_sharding) == 1 and not simple.HasField("dim_value"):
        return str(Shard(axis))
    if not all(part.HasField("dim_value") for part in dim.simple_sharding):
        raise AnnotationError("expected the sizes of all blocks, found one that is open", place)
    sizes = [part.dim_value for part in dim.simple_sharding]
    repeat, block = math.prod(sizes[:position]), math.prod(sizes[position + 1 :])
    shares = tuple(block * n for n in _balanced(sizes[position], devices))
    return str(Shard(axis, Cut((Segment(repeat, shares),))))


def _spec(tensor: str, kind: DTensorType, devices: int) -> Any:
    """The layout of one tensor; None for a pending sum, which ONNX has no word for."""
    import onnx

    (placement,) = kind.placements
    if isinstance(placement, Replicate):
        everyone = onnx.IntIntListEntryProto(key=-1, value=range(devices))
        return onnx.ShardingSpecProto(tensor_name=tensor, device=[-1], index_to_device_group_map=[everyone])
    if not isinstance(placement, Shard):
        return None
    spec = onnx.ShardingSpecProto(tensor_name=tensor, device=range(devices))
    dim = spec.sharded_dim.add(axis=placement.dim)
    for size, shards in _blocks(placement, tensor):
        dim.simple_sharding.add(dim_value=size, num_shards=shards)
    return spec


def _blocks(placement: Shard, tensor: str) -> Iterator[tuple[int, int]]:
    cut = placement.cut
    assert isinstance(cut, Cut)
    (segment, *others) = cut.segments
    block = math.gcd(*segment.sizes)
    blocks = sum(segment.sizes) // block if block else 0
    if others or tuple(n * block for n in _balanced(blocks, len(segment.sizes))) != tuple(segment.sizes):
        raise PlacementError(
            f"ONNX's metadata cannot express {placement}: it deals out equal blocks",
            tensor,
            "leave the sizes away: S[dim]",
        )
    if segment.repeat > 1:
        yield segment.repeat, 1
    yield blocks, len(segment.sizes)
    if block > 1:
        yield block, 1


def _balanced(total: int, shards: int) -> Sequence[int]:
    return [total // shards + (i < total % shards) for i in range(shards)]
