"""Expansion of ONNX ops that ONNX defines as functions of other ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distir_relax.frontends.onnx.tensors import type_of
from distir_relax.ir import Value
from distir_relax.layout import is_symbolic


def function_of(node: Any, operands: list[Any], domain: str, version: int) -> Any:
    """Return the function that defines the node's op at this operator set version; None without any."""
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    plain = [v for v in schema.function_opset_versions if v <= version]
    if plain:
        return _parse_function(schema.get_function_with_opset_version(max(plain)))
    typed = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    if not typed:
        return None
    types = [_type_proto(x).SerializeToString() for x in operands]
    text = schema.get_context_dependent_function_with_opset_version(max(typed), node.SerializeToString(), types)
    return _parse_function(text) if text else None


def function_nodes(function: Any, node: Any) -> Iterator[Any]:
    """Return the nodes of a function's body with the attributes of the call substituted."""
    attributes = {a.name: a for a in [*function.attribute_proto, *node.attribute]}
    for inner in function.node:
        yield _substitute(inner, attributes)


def _parse_function(function: Any) -> Any:
    import onnx

    return onnx.FunctionProto.FromString(function) if isinstance(function, bytes) else function


def _substitute(node: Any, attributes: Mapping[str, Any]) -> Any:
    import onnx

    bound = onnx.NodeProto()
    bound.CopyFrom(node)
    del bound.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            bound.attribute.append(attribute)
        elif attribute.ref_attr_name in attributes:
            value = onnx.AttributeProto()
            value.CopyFrom(attributes[attribute.ref_attr_name])
            value.name = attribute.name
            bound.attribute.append(value)
    return bound


def _type_proto(item: Any) -> Any:
    import onnx

    if item is None:
        return onnx.TypeProto()
    kind = item.tensor if isinstance(item, Value) else type_of(item)
    name = {"float32": "FLOAT", "float64": "DOUBLE"}.get(kind.dtype, kind.dtype.upper())
    shape = [str(n) if is_symbolic(n) else n for n in kind.shape]
    return onnx.helper.make_tensor_type_proto(onnx.TensorProto.DataType.Value(name), shape)
