"""ONNX's multi-device metadata (IR version 11): imported as annotations, exported from a compiled plan.

`ModelProto.configuration` names the devices; each node's `device_configurations` have the layouts of its operands and
results (ONNX docs/proposals/ONNXMultiDeviceProposal.md). A dim is split into blocks, which are distributed over shards:
``{12, 5} {64, 1}`` is a dim of 768 cut into 5 shards of whole blocks of 64. The proposal leaves the distribution of
blocks that do not divide evenly open: here it is balanced, larger shards first, as everywhere in this package.
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
"""Maximum number of devices of a configuration."""


@dataclass(frozen=True)
class OnnxSharding:
    """The metadata of a model.

    `specs` maps the first result of each node and the name of its tensor to a placement as text; `stages` maps the
    first result of a node to its pipeline stage. Stages are a hint of the model, which the compiler does not use.
    """

    mesh: DeviceMesh
    specs: Mapping[str, Mapping[str, str]]
    stages: Mapping[str, int]


def read_sharding(model: onnx.ModelProto, where: str = "model") -> OnnxSharding | None:
    """Return the metadata of the model's first configuration; None without any.

    Only 1-D layouts are supported: all devices of the configuration in order, with at most one sharded dim. Raises
    `AnnotationError` for others.
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
        for device_configuration in node.device_configurations:
            if device_configuration.configuration_id != configuration.name:
                continue
            if device_configuration.HasField("pipeline_stage"):
                stages[key] = device_configuration.pipeline_stage
            for spec in device_configuration.sharding_spec:
                place = f"{where}:{node.name or key}, {spec.tensor_name}"
                specs.setdefault(key, {})[spec.tensor_name] = _placement(spec, mesh.size, place)
    return OnnxSharding(mesh, specs, stages)


def node_key(node: onnx.NodeProto) -> str:
    """Return the key of a node: its first result, which is unique."""
    return str(next(filter(None, node.output), node.name))


def write_sharding(
    model: onnx.ModelProto, sharded: Module, values: Mapping[str, str], name: str = "distir"
) -> onnx.ModelProto:
    """Return a copy of the model with the layouts of a sharded program as its metadata, replacing any.

    `values` maps the model's tensors to values of the program (`Imported.values`). Tensors without a value, such as
    folded shapes, get no layout. Pipeline stages of the model are preserved. Raises `PlacementError` for a mesh of
    several axes, and for sizes that ONNX cannot express.
    """
    import onnx

    mesh = sharded.meshes[0]
    if len(mesh.shape) != 1:
        raise PlacementError(f"expected a mesh of one axis for ONNX's metadata, found {mesh}")
    function = sharded.main
    types = {item.value.name: item.value.type for item in function.inputs}
    types.update({value.name: value.type for op in function.ops for value in op.results})
    metadata = read_sharding(model)
    annotated = onnx.ModelProto()
    annotated.CopyFrom(model)
    annotated.ir_version = max(annotated.ir_version, _IR_VERSION)
    del annotated.configuration[:]
    annotated.configuration.add(name=name, num_devices=mesh.size)
    for node in annotated.graph.node:
        del node.device_configurations[:]
        device_configuration = onnx.NodeDeviceConfigurationProto(configuration_id=name)
        for tensor in dict.fromkeys([*node.input, *node.output]):
            kind = types.get(values.get(tensor, ""))
            if isinstance(kind, DTensorType) and (spec := _spec(tensor, kind, mesh.size)) is not None:
                device_configuration.sharding_spec.append(spec)
        stage = metadata.stages.get(node_key(node)) if metadata else None
        if stage is not None:
            device_configuration.pipeline_stage = stage
        if device_configuration.sharding_spec or stage is not None:
            node.device_configurations.append(device_configuration)
    return annotated


def _placement(spec: Any, devices: int, place: str) -> str:
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    devices_in_order = [device for item in spec.device for device in groups.get(item, [item])]
    split = [(dim.axis, [s for s in dim.simple_sharding if s.num_shards > 1], dim) for dim in spec.sharded_dim]
    split = [(axis, simple, dim) for axis, simple, dim in split if simple]
    if devices_in_order != list(range(devices)) or len(split) > 1 or (split and len(split[0][1]) > 1):
        raise AnnotationError(
            f"expected devices 0 to {devices - 1} in order and at most one sharded dim, found devices "
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
        raise AnnotationError("expected the sizes of all blocks, found an open one", place)
    sizes = [part.dim_value for part in dim.simple_sharding]
    repeat, block = math.prod(sizes[:position]), math.prod(sizes[position + 1 :])
    shares = tuple(block * n for n in _balanced(sizes[position], devices))
    return str(Shard(axis, Cut((Segment(repeat, shares),))))


def _spec(tensor: str, kind: DTensorType, devices: int) -> Any:
    """Return the layout of one tensor; None for a partial sum, which ONNX cannot express."""
    import onnx

    (placement,) = kind.placements
    if isinstance(placement, Replicate):
        group = onnx.IntIntListEntryProto(key=-1, value=range(devices))
        return onnx.ShardingSpecProto(tensor_name=tensor, device=[-1], index_to_device_group_map=[group])
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
            f"ONNX's metadata cannot express {placement}: it distributes equal blocks",
            tensor,
            "omit the sizes: S[dim]",
        )
    if segment.repeat > 1:
        yield segment.repeat, 1
    yield blocks, len(segment.sizes)
    if block > 1:
        yield block, 1


def _balanced(total: int, shards: int) -> Sequence[int]:
    return [total // shards + (i < total % shards) for i in range(shards)]
