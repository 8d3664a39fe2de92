"""State in objects that are no modules: tensors that a model writes to and holds in plain objects, such as a cache.

`torch.export` lifts tensors of such objects as constants, and follows no writes to them. A constant that is written
to becomes a buffer of the program here, named after its place in the model (``cache.layers.0.keys``); one that is the
same tensor as a buffer becomes that buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.frontends.torch.functionalize import written_inputs
from distir_relax.frontends.torch.module_state import object_tensors

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


def adopt_written_constants(program: ExportedProgram, model: torch.nn.Module) -> None:
    """Make buffers of the constants that a flat `program` writes to."""
    from torch.export.graph_signature import InputKind

    specs = program.graph_signature.input_specs
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    tensors = {**program.state_dict, **program.constants}
    constants = [spec for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR]
    written = written_inputs(program)
    memories = {_memory(tensors[str(s.target)]) for s in constants if s.arg.name in written}
    if not memories:
        return
    known = {
        _memory(tensors[str(spec.target)]): nodes[spec.arg.name] for spec in specs if spec.kind is InputKind.BUFFER
    }
    taken = {str(spec.target) for spec in specs}
    for spec in constants:
        tensor = tensors[str(spec.target)]
        memory, node = _memory(tensor), nodes[spec.arg.name]
        if memory not in memories:
            continue
        if memory in known:
            node.replace_all_uses_with(known[memory])
            program.graph.erase_node(node)
            specs.remove(spec)
            program.constants.pop(str(spec.target))
            continue
        known[memory] = node
        name = _path(model, tensor) or str(spec.target)
        if name not in taken:
            taken.add(name)
            program.constants[name] = program.constants.pop(str(spec.target))
            spec.target = name
        spec.kind, spec.persistent = InputKind.BUFFER, False
    program.graph_module.recompile()


def _memory(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _path(model: torch.nn.Module, tensor: torch.Tensor) -> str:
    """Where an object of the model holds the tensor; empty where that is not found."""
    wanted = tensor.device, _memory(tensor)
    return next((path for path, held in object_tensors(model) if (held.device, _memory(held)) == wanted), "")
