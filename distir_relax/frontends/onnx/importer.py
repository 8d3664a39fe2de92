"""Import of ONNX models: node by node into the op table's vocabulary, with constant folding of shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Origin, SourceFile
from distir_relax.errors import ImportModelError
from distir_relax.frontends.fixed_inputs import FixedInputs
from distir_relax.frontends.imported_model import Imported, eliminate_dead_ops
from distir_relax.frontends.onnx.graph import OnnxGraph
from distir_relax.frontends.onnx.input_types import input_types
from distir_relax.frontends.onnx.multi_device_metadata import read_sharding
from distir_relax.frontends.onnx.tensors import as_array, as_numpy, dtype_name, load_model_files, model_name
from distir_relax.frontends.torch.arguments import named_arguments
from distir_relax.ir import Module, Value
from distir_relax.layout import Guards, guarding

if TYPE_CHECKING:
    import onnx
    import torch


def import_onnx(
    path_or_model: str | Path | onnx.ModelProto,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    dims: Mapping[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Imported:
    """Import a model from a path (with its files of external data) or an `onnx.ModelProto`.

    Open dims of inputs are symbols, unless `input_shapes` has the shape; `dims` are bounds of symbols, or sizes, by
    name (`input_types`). An input in `constants` has this value, and is no input of the program. Initializers of
    floating or 8-bit dtype with at least one dim become parameters, under their own name and as ``NODE.OPERAND`` of the
    first node that takes them (``/fc/MatMul.B``, as exporters rename transposed weights); other initializers are
    constants, which fold. Sharding metadata of the model (see `read_sharding`) becomes annotations. A call returns the
    output, or a dict of several outputs by name.

    Raises `ImportModelError` for an invalid file, for names that the model does not have, and for shapes that differ
    from the model's; `UnsupportedOpError` for a node that the op table cannot express; `AnnotationError` for invalid
    metadata.
    """
    (model, data_files), file = load_model_files(path_or_model), model_name(path_or_model)
    data = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = [item for item in model.graph.input if item.name not in data]
    _reject_repeated("input", inputs, file)
    _reject_repeated("output", model.graph.output, file)
    fixed = FixedInputs(constants or {}, file)
    fixed.check_names([item.name for item in inputs])
    open_inputs = [item for item in inputs if item.name not in fixed.values]
    types = input_types(open_inputs, input_shapes or {}, dims or {}, file)
    sharding = read_sharding(model, file)
    graph = OnnxGraph(file, sharding)
    scope: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, kind in types.items():
        scope[name] = graph.builder.input(name, kind, "input", file)
        names[name] = scope[name].name
    for item in inputs:
        if item.name in fixed.values:
            scope[item.name] = _fixed(fixed, item, file)
            graph.hint(item.name, scope[item.name])
    for name, tensor in data.items():
        array = as_array(tensor, file)
        scope[name] = graph.parameter(name, array) if _is_parameter(array) else array
        graph.hint(name, scope[name])
        if isinstance(scope[name], Value):
            names[name] = scope[name].name
    opsets = {"" if item.domain == "ai.onnx" else item.domain: item.version for item in model.opset_import}
    parameters = {name: names[name] for name in data if name in names}
    with guarding(Guards()) as guards:
        graph.run(model.graph.node, scope, opsets)
        outputs = _outputs(graph, model, scope, file)
    main = eliminate_dead_ops(graph.builder.function("main", outputs))
    used = {item.value.name for item in main.inputs}
    for alias, value in _operand_names(model.graph.node, parameters, opsets).items():
        names.setdefault(alias, value)
    return Imported(
        module=Module("global", (main,), (sharding.mesh,) if sharding else (), records=tuple(guards.found.values())),
        tensors={name: tensor for name, tensor in graph.tensors.items() if name in used},
        names={name: value for name, value in names.items() if value in used},
        flatten=lambda args, kwargs: _flatten(
            file, {n: names[n] for n in types}, *fixed.without([item.name for item in inputs], args, kwargs)
        ),
        rebuild=lambda tensors: next(iter(tensors.values())) if len(outputs) == 1 else dict(tensors),
        arguments=tuple(types) if fixed.values else (),
        constants=fixed.values,
        values={name: item.name for name, item in scope.items() if isinstance(item, Value)},
        scopes={name: frames for name, frames in graph.scopes.items() if frames},
        shape_ops=graph.shape_ops,
        origin=_origin(path_or_model, data_files),
    )


def _origin(path_or_model: Any, data_files: Sequence[Path]) -> Origin:
    """Return the origin of a model in files; they are hashed now, since all of them have been read."""
    if not isinstance(path_or_model, (str, Path)):
        return Origin()
    model, *others = (SourceFile(path) for path in (path_or_model, *data_files))
    for file in others:
        file.hash()
    digest = model.hash()
    return Origin(digest.name, digest.checksum, tuple(others), ("onnx",))


def _fixed(fixed: FixedInputs, item: Any, file: str) -> Any:
    """Return the array of an input with a fixed value, of the dtype and the shape that the model declares."""
    tensor = item.type.tensor_type
    shape = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
    kind = dtype_name(tensor.elem_type, f"{file}, input {item.name}")
    return as_numpy(fixed.tensor(item.name, kind, shape if tensor.HasField("shape") else None))


def _reject_repeated(what: str, items: Sequence[Any], file: str) -> None:
    if duplicates := [name for name, count in Counter(item.name for item in items).items() if count > 1]:
        raise ImportModelError(f"duplicate {what} {duplicates[0]!r}", file)


def _is_parameter(array: Any) -> bool:
    return array.ndim > 0 and ("float" in array.dtype.name or (array.dtype.itemsize == 1 and array.dtype.kind in "iu"))


def _outputs(graph: OnnxGraph, model: Any, scope: Mapping[str, Any], file: str) -> list[tuple[str, Value]]:
    graph.builder.location = file
    return [(item.name, graph.place(graph.resolve(item.name, scope), item.name)) for item in model.graph.output]


def _operand_names(nodes: Any, parameters: Mapping[str, str], opsets: Mapping[str, int]) -> dict[str, str]:
    """Return the name ``NODE.OPERAND`` of the first named node that takes each parameter."""
    import onnx

    aliases: dict[str, str] = {}
    named: set[str] = set()
    for node in nodes:
        for position, name in enumerate(node.input):
            if name not in parameters or name in named or not node.name:
                continue
            named.add(name)
            domain = "" if node.domain == "ai.onnx" else node.domain
            try:
                operand_schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain).inputs
            except onnx.defs.SchemaError:
                continue
            aliases[f"{node.name}.{operand_schema[min(position, len(operand_schema) - 1)].name}"] = parameters[name]
    return aliases


def _flatten(
    model: str, inputs: Mapping[str, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    tensors = named_arguments(model, list(inputs), args, kwargs)
    return {inputs[name]: tensor for name, tensor in tensors.items()}
