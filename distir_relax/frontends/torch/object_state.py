"""State in plain objects: tensors that a model writes to and stores outside of modules, such as a cache.

`torch.export` lifts such tensors as constants, and does not capture writes to them. A mutated constant becomes a buffer
of the program, named after its path in the model (``cache.layers.0.keys``); one that is the same tensor as a buffer
becomes that buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.frontends.torch.functionalize import mutated_inputs
from distir_relax.frontends.torch.module_state import object_tensors

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


def promote_mutated_constants(program: ExportedProgram, model: torch.nn.Module) -> None:
    """Convert the constants that a flat `program` writes to into buffers."""
    from torch.export.graph_signature import InputKind

    specs = program.graph_signature.input_specs
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    tensors = {**program.state_dict, **program.constants}
    constants = [spec for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR]
    mutated = mutated_inputs(program)
    memories = {_memory(tensors[str(s.target)]) for s in constants if s.arg.name in mutated}
    if not memories:
        return
    buffers = {
        _memory(tensors[str(spec.target)]): nodes[spec.arg.name] for spec in specs if spec.kind is InputKind.BUFFER
    }
    used_names = {str(spec.target) for spec in specs}
    for spec in constants:
        tensor = tensors[str(spec.target)]
        memory, node = _memory(tensor), nodes[spec.arg.name]
        if memory not in memories:
            continue
        if memory in buffers:
            node.replace_all_uses_with(buffers[memory])
            program.graph.erase_node(node)
            specs.remove(spec)
            program.constants.pop(str(spec.target))
            continue
        buffers[memory] = node
        name = _path(model, tensor) or str(spec.target)
        if name not in used_names:
            used_names.add(name)
            program.constants[name] = program.constants.pop(str(spec.target))
            spec.target = name
        spec.kind, spec.persistent = InputKind.BUFFER, False
    program.graph_module.recompile()


def _memory(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _path(model: torch.nn.Module, tensor: torch.Tensor) -> str:
    """Return the path of a tensor in an object of the model; "" if there is none."""
    key = tensor.device, _memory(tensor)
    return next((path for path, value in object_tensors(model) if (value.device, _memory(value)) == key), "")
