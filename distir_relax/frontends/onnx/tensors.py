"""Conversion of ONNX files, tensors and dtypes to numpy, torch and types of a program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError, UnsupportedOpError
from distir_relax.ir import TensorType
from distir_relax.layout import DTYPES
from distir_relax.ops import SizeArray
from distir_relax.support import MOST, check_regular, shown

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import torch


def load_model(path_or_model: Any) -> onnx.ModelProto:
    """Load a model as `load_model_files` does."""
    return load_model_files(path_or_model)[0]


def load_model_files(path_or_model: Any) -> tuple[onnx.ModelProto, tuple[Path, ...]]:
    """Load a model with its external data, and inline its local functions; return it with the files of the data.

    Raises `ImportModelError` for a file that is missing, is not an ONNX model, or lacks a data file; for a name that is
    not UTF-8, and for an invalid operator set version.
    """
    import onnx
    import onnx.inliner
    from google.protobuf.message import DecodeError

    model, where, files = path_or_model, model_name(path_or_model), tuple[Path, ...]()
    if isinstance(path_or_model, (str, Path)):
        check_regular(path_or_model, ImportModelError)
        try:
            model = onnx.load(str(path_or_model), load_external_data=False)
            check_text(model, where)
            files = _external_files(model, Path(path_or_model).parent)
            onnx.load_external_data_for_model(model, str(Path(path_or_model).parent))
        except DecodeError:
            raise ImportModelError("not an ONNX model", str(path_or_model)) from None
        except (OSError, ValueError, OverflowError, onnx.checker.ValidationError) as error:
            hint = "the files of external data belong in the model's folder"
            raise ImportModelError(f"the model's data cannot be read: {error}", str(path_or_model), hint) from None
    elif not isinstance(model, onnx.ModelProto):
        raise ImportModelError(f"expected a path or an onnx.ModelProto, found {type(model).__name__}")
    else:
        check_text(model, where)
    if not model.graph.node and not model.graph.output:
        raise ImportModelError("expected a model with a graph, found none", where)
    for item in model.opset_import:
        if not 0 < item.version < 2**31:
            raise ImportModelError(f"there is no version {item.version} of operator set {item.domain!r}", where)
    if not model.functions:
        return model, files
    try:
        return onnx.inliner.inline_local_functions(_with_default_attributes(model)), files
    except (RuntimeError, ValueError, TypeError) as error:
        raise ImportModelError(f"the model's local functions cannot be inlined: {error}", where) from None


def _with_default_attributes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose calls of local functions have the attributes with a default, which ONNX's inliner drops."""
    import onnx

    if not any(function.attribute_proto for function in model.functions):
        return model
    filled = onnx.ModelProto()
    filled.CopyFrom(model)
    functions = {(f.domain, f.name, f.overload): f for f in filled.functions}
    while any(_take_default(function, functions) for function in filled.functions):
        pass
    for node in _nodes(filled.graph, *filled.functions):
        function = functions.get((node.domain, node.op_type, node.overload))
        given = {attribute.name for attribute in node.attribute}
        if function is not None:
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
    return filled


def _take_default(function: Any, functions: Mapping[tuple[str, str, str], Any]) -> bool:
    """Give an attribute without a default that of the function to which alone it is passed on; return whether one was.

    Raises `ImportModelError` if it is used elsewhere, too, where it has none.
    """
    uses = [(node, a) for node in _nodes(function) for a in node.attribute if a.ref_attr_name in function.attribute]
    for node, use in uses:
        inner = functions.get((node.domain, node.op_type, node.overload))
        default = next((a for a in inner.attribute_proto if a.name == use.name), None) if inner is not None else None
        if default is None:
            continue
        name = use.ref_attr_name
        if sum(other.ref_attr_name == name for _, other in uses) > 1:
            raise ImportModelError(
                f"expected a default of the attribute {name!r}, which is passed on to {node.op_type}, found none",
                f"the function {function.name}", "give it a default, or a value in every call",
            )  # fmt: skip
        taken = function.attribute_proto.add()
        taken.CopyFrom(default)
        taken.name = name
        function.attribute.remove(name)
        return True
    return False


def _nodes(*graphs: Any) -> Iterator[Any]:
    """Return the nodes of graphs or functions, those of the graphs of their attributes included."""
    for graph in graphs:
        for node in graph.node:
            yield node
            yield from _nodes(*(g for a in node.attribute for g in ([a.g] if a.HasField("g") else a.graphs)))


def _external_files(model: onnx.ModelProto, folder: Path) -> tuple[Path, ...]:
    """Return the files with data of a model's initializers."""
    import onnx

    found = [
        folder / entry.value
        for tensor in model.graph.initializer
        if onnx.external_data_helper.uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    ]
    return tuple(dict.fromkeys(found))


def check_text(message: Any, where: str, path: str = "") -> None:
    """Raise `ImportModelError`, with the path of the field, if a string of a protobuf message is not UTF-8."""
    for field, value in message.ListFields():
        inside = f"{path}.{field.name}" if path else str(field.name)
        items = list(enumerate(value)) if field.is_repeated else [(None, value)]
        if field.type == field.TYPE_STRING:
            # protobuf returns bytes for invalid UTF-8.
            if wrong := next((item for _, item in items if isinstance(item, bytes)), None):
                raise ImportModelError(f"a name is not UTF-8: {shown(wrong)}", f"{where} ({inside})")
        elif field.type == field.TYPE_MESSAGE:
            for number, item in items:
                check_text(item, where, inside if number is None else f"{inside}[{number}]")


def model_name(path_or_model: Any) -> str:
    """Return the model's name in locations: the file's name, else the graph's."""
    if isinstance(path_or_model, (str, Path)):
        return Path(path_or_model).name
    graph = getattr(path_or_model, "graph", None)
    return str(getattr(graph, "name", "") or "model")


def dtype_name(elem_type: int, where: str) -> str:
    """Return the dtype of an ONNX element type. Raise `UnsupportedOpError` for one that programs do not have."""
    import onnx

    if elem_type not in onnx.TensorProto.DataType.values():
        raise UnsupportedOpError(f"there is no element type {shown(elem_type)} in ONNX", where)
    name = str(onnx.TensorProto.DataType.Name(elem_type)).lower()
    name = {"float": "float32", "double": "float64"}.get(name, name)
    if name not in DTYPES:
        raise UnsupportedOpError(f"found dtype {name}, expected one of {', '.join(DTYPES)}", where)
    return name


def as_array(tensor: onnx.TensorProto, where: str) -> np.ndarray[Any, Any]:
    """Return the data of an ONNX tensor.

    Raises `ImportModelError` if it is in a file that was not read, or does not match dims and dtype;
    `UnsupportedOpError` for an unknown dtype.
    """
    import onnx

    place = f"{where}, {tensor.name}" if tensor.name else where
    if any(n < 0 for n in tensor.dims) or math.prod(tensor.dims) > MOST:
        raise ImportModelError(f"no tensor has the dims {shown(tuple(tensor.dims))}", place)
    if tensor.data_type not in onnx.TensorProto.DataType.values():
        raise UnsupportedOpError(f"there is no element type {tensor.data_type} in ONNX", place)
    if onnx.external_data_helper.uses_external_data(tensor):
        raise ImportModelError(
            f"the data of {tensor.name!r} is in a separate file", where, "give the model's path: its data is read too"
        )
    try:
        array: np.ndarray[Any, Any] = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        raise ImportModelError(f"the data is no {kind} {tuple(tensor.dims)}: {error}", place) from None
    return array


def as_torch(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    """Convert an array to a tensor. Raise `UnsupportedOpError` for a dtype that programs do not have."""
    import numpy as np
    import torch

    if array.dtype.name not in DTYPES:
        raise UnsupportedOpError(f"found dtype {array.dtype.name}, expected one of {', '.join(DTYPES)}", where)
    writeable = array if array.flags.writeable and array.flags.c_contiguous else array.copy(order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(writeable.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(writeable)


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to an array, the inverse of `as_torch`."""
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


def type_of(array: np.ndarray[Any, Any] | SizeArray) -> TensorType:
    """Return the type of an array."""
    if isinstance(array, SizeArray):
        return array.type
    return TensorType(tuple(array.shape), array.dtype.name)
