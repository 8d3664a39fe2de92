"""Import of the nodes of an ONNX graph by partial evaluation.

A name maps to a value of the program, or to a numpy array whose data is constant. A node with constant operands is
folded; `Shape` of a value is constant, up to symbolic sizes (`SizeArray`). So chains of Shape, Gather, Concat and
Reshape fold away, as in figure 4 of the DistIR paper (arXiv 2111.05426).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError, ImportModelError, RunError, UnsupportedOpError, VerificationError
from distir_relax.frontends.imported_model import Frame
from distir_relax.frontends.onnx.constant_folding import fold_by_onnx, fold_by_table
from distir_relax.frontends.onnx.control_flow import GRAPH_OPS, GraphNode
from distir_relax.frontends.onnx.function_expansion import function_nodes, function_of
from distir_relax.frontends.onnx.multi_device_metadata import OnnxSharding, node_key
from distir_relax.frontends.onnx.symbol_hints import blamed_symbols, symbol_hint
from distir_relax.frontends.onnx.tensors import as_array, as_torch, dtype_name, type_of
from distir_relax.ir import TensorType, Value
from distir_relax.layout import UndecidedSize, locate_guards
from distir_relax.layout.validate import validate_placements
from distir_relax.ops import (
    DATA_DEPENDENT,
    DATA_DEPENDENT_HINT,
    Builder,
    OnnxOperands,
    SizeArray,
    is_data_dependent,
    lookup_onnx,
    place_sizes,
)

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import torch

_CONTROL_FLOW = "conditions and trip counts must be constant, or follow from shapes"
_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")


class UnconvertedResult:
    """A result without a conversion; an error if a node uses it."""

    def __init__(self, op_type: str, index: int) -> None:
        self.description = f"result {index} of {op_type}"


class OnnxGraph:
    """Conversion of nodes to ops of the op table. `file` is the model's name in locations.

    `builder` holds the ops, `tensors` the data of parameters and constants by value name, `scopes` the modules in the
    names of nodes, `shape_ops` the number of nodes that were folded before a value's. The layouts that `sharding` has
    for operands and results become annotations.
    """

    def __init__(self, file: str, sharding: OnnxSharding | None = None) -> None:
        self.builder = Builder()
        self.tensors: dict[str, torch.Tensor] = self.builder.tensors
        self.scopes: dict[str, tuple[Frame, ...]] = {}
        self.shape_ops: dict[str, int] = {}
        self._folded = 0
        self._file = file
        self._sharding = sharding
        self._annotated: dict[tuple[str, str], Value] = {}
        self._hints: dict[int, str] = {}
        self._arrays: list[Any] = []
        self._constants: dict[tuple[TensorType, bytes], Value] = {}
        # Scopes of the loop iterations being imported, outermost first.
        self._loop_scopes: tuple[Frame, ...] = ()
        self.steps = 0

    def parameter(self, name: str, array: np.ndarray[Any, Any]) -> Value:
        """Declare an initializer that is a parameter."""
        data = as_torch(array, f"{self._file}, {name}")
        value = self.builder.input(_hint(name), type_of(array), "parameter", f"{self._file}:{_place(name)}")
        self.tensors[value.name] = self.builder.constants[value.name] = data
        return value

    def run(self, nodes: Sequence[onnx.NodeProto], scope: dict[str, Any], opsets: Mapping[str, int]) -> None:
        """Import nodes in order; `scope` maps names to values and constants, and receives the results."""
        for node in nodes:
            self.builder.location = self.where(node)
            locate_guards(self.builder.location)
            self.builder.hint = _hint(next(filter(None, node.output), node.op_type))
            before = len(self.builder.ops)
            operands = [self._annotate(node, name, self.resolve(name, scope)) if name else None for name in node.input]
            for name, result in zip(node.output, self.node(node, operands, scope, opsets), strict=False):
                if name:
                    scope[name] = self._annotate(node, name, result)
                    self.hint(name, result)
            emitted = self.builder.ops[before:]
            for op in emitted:
                self.scopes.setdefault(op.results[0].name, (*self._loop_scopes, *_frames(node.name)))
            if emitted and self._folded:
                self.shape_ops[emitted[-1].results[0].name] = self._folded
            self._folded = 0 if emitted else self._folded + 1

    def step(self, name: str, read: Callable[[], None]) -> None:
        """Import one iteration of a loop by `read`, as the block `name`."""
        self.steps += 1
        before, place, hint = self._loop_scopes, self.builder.location, self.builder.hint
        self._loop_scopes = (*before, *_frames(name), Frame(name))
        read()
        self._loop_scopes, self.builder.location, self.builder.hint = before, place, hint

    def node(self, node: Any, operands: list[Any], scope: dict[str, Any], opsets: Mapping[str, int]) -> Sequence[Any]:
        """Return the results of one node. Raise `ImportModelError` for an invalid node."""
        try:
            return self._results(node, operands, scope, opsets)
        except (VerificationError, UndecidedSize) as error:
            problem: Exception = error
            reason = error.message
            names = blamed_symbols(reason, operands)
        except DistIRError:
            raise
        # Conversions fail in any way on invalid operands and attributes of a file.
        except Exception as error:
            problem, reason = error, f"{type(error).__name__}: {error}"
            names = blamed_symbols("", operands)
        if names:
            raise UnsupportedOpError(
                f"the ONNX op {node.op_type} cannot be converted for every size of {', '.join(names)}: {reason}",
                self.builder.location,
                symbol_hint(reason, names),
            ) from problem
        raise ImportModelError(
            f"the node is not a valid {node.op_type}: {reason}",
            self.builder.location,
            "does onnx.checker.check_model accept the model?",
        ) from problem

    def _results(
        self, node: Any, operands: list[Any], scope: dict[str, Any], opsets: Mapping[str, int]
    ) -> Sequence[Any]:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute):
            return self._run_graphs(node, operands, domain, scope, opsets)
        if node.op_type in _RANDOM and not domain:
            raise self._unsupported(node, domain, "draw random numbers outside and pass them in as an input")
        if not any(isinstance(x, (Value, SizeArray)) for x in operands):
            return self._fold(node, operands, domain, opsets)
        if is_data_dependent(f"onnx.{node.op_type}") and not domain:
            raise UnsupportedOpError(
                f"the ONNX op {node.op_type}: {DATA_DEPENDENT}", self.builder.location, DATA_DEPENDENT_HINT
            )
        convert = lookup_onnx(f"{domain}::{node.op_type}" if domain else node.op_type)
        if convert is None:
            return self._expand(node, operands, domain, opsets)
        attributes = self._attributes(node, domain, opsets)
        if not any(isinstance(x, Value) for x in operands):
            # What cannot be folded is computed at run time.
            with contextlib.suppress(NotImplementedError, UnsupportedOpError):
                return fold_by_table(convert, operands, attributes, self.builder.location)
        wrapped_operands = OnnxOperands(operands, self.place, self.builder.constants)
        try:
            result = convert(self.builder, wrapped_operands, attributes)
        except NotImplementedError as error:
            return self._expand(node, operands, domain, opsets, str(error))
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        return results + [UnconvertedResult(node.op_type, i) for i in range(len(results), len(node.output))]

    def where(self, node: Any) -> str:
        """Return the location of a node: the file, and its name or that of its first result."""
        return f"{self._file}:{_place(node.name or next(filter(None, node.output), node.op_type))}"

    def place(self, item: Any, hint: str = "") -> Value:
        """Convert a constant to a value: a `constant` op for a scalar, otherwise a constant input of the program."""
        if isinstance(item, Value):
            return item
        if isinstance(item, SizeArray):
            computed: Value = place_sizes(self.builder, item)
            return computed
        tensor = as_torch(item, self.builder.location)
        if not item.shape:
            return self.builder.constant(tensor.item(), type_of(item).dtype)
        key = (type_of(item), item.tobytes())
        if key not in self._constants:
            name = self._hints.get(id(item), hint or self.builder.hint)
            value = self.builder.input(name, key[0], "constant", self.builder.location)
            self.tensors[value.name] = self.builder.constants[value.name] = tensor
            self._constants[key] = value
        return self._constants[key]

    def hint(self, name: str, item: Any) -> None:
        """Name the constant for a known array after the model's name for it."""
        if not isinstance(item, (Value, UnconvertedResult)):
            self._hints.setdefault(id(item), _hint(name))
            # Keep the array alive: an id is unique only among live objects.
            self._arrays.append(item)

    def _annotate(self, node: Any, name: str, item: Any) -> Any:
        """Annotate `item`, the operand or result `name` of a node, according to the model's metadata."""
        text = self._sharding.specs.get(node_key(node), {}).get(name) if self._sharding else None
        if self._sharding is None or text is None or not isinstance(item, Value):
            return item
        if (item.name, text) not in self._annotated:
            where = self.builder.location
            placements = validate_placements(text, self._sharding.mesh, item.tensor.shape, where)
            hint, self.builder.hint = self.builder.hint, f"{item.name}.sharded"
            annotated: Value = self.builder.emit("annotate_sharding", item, placements=placements)
            self.builder.hint = hint
            # An annotated value needs no second annotation.
            self._annotated[(item.name, text)] = self._annotated[(annotated.name, text)] = annotated
        return self._annotated[(item.name, text)]

    def resolve(self, name: str, scope: Mapping[str, Any]) -> Any:
        """Return the value or constant of a name. Raise `ImportModelError` for an undefined name, `UnsupportedOpError`
        for a result without a conversion.
        """
        if name not in scope:
            raise ImportModelError(f"{name!r} is used before its definition", self.builder.location)
        item = scope[name]
        if isinstance(item, UnconvertedResult):
            raise UnsupportedOpError(
                f"{item.description}, {name!r}, is used, but no conversion produces it", self.builder.location
            )
        return item

    def _attributes(self, node: Any, domain: str, opsets: Mapping[str, int]) -> dict[str, Any]:
        attrs = {a.name: self._attribute(a) for a in node.attribute}
        return {**attrs, "opset": opsets.get(domain, 1), "outputs": len(node.output)}

    def _attribute(self, attribute: Any) -> Any:
        import onnx

        value = onnx.helper.get_attribute_value(attribute)
        if attribute.type == attribute.TENSOR:
            return as_array(value, self.builder.location)
        if attribute.type == attribute.STRING:
            return value.decode("utf-8")
        if attribute.name in ("to", "output_dtype") and value:
            return dtype_name(value, self.builder.location)
        return list(value) if attribute.type in (attribute.INTS, attribute.FLOATS) else value

    def _fold(self, node: Any, operands: list[Any], domain: str, opsets: Mapping[str, int]) -> Sequence[Any]:
        """Fold a node with constant operands by the op table, or by ONNX's evaluator if that cannot express it."""
        convert = lookup_onnx(f"{domain}::{node.op_type}" if domain else node.op_type)
        if convert is not None:
            # The evaluator supports more, such as dtypes that programs lack.
            with contextlib.suppress(NotImplementedError, UnsupportedOpError, RunError):
                return fold_by_table(convert, operands, self._attributes(node, domain, opsets), self.builder.location)
        return fold_by_onnx(node, operands, opsets, self.builder.location)

    def _run_graphs(
        self, node: Any, operands: list[Any], domain: str, scope: dict[str, Any], opsets: Mapping[str, int]
    ) -> Sequence[Any]:
        """Return the results of a node with subgraphs."""
        if domain or node.op_type not in GRAPH_OPS:
            raise self._unsupported(node, domain, reason="it has subgraphs")
        place, hint = self.builder.location, self.builder.hint
        try:
            results = GraphNode(self, node, operands, scope, opsets).results()
        except NotImplementedError as error:
            self.builder.location = place
            raise self._unsupported(node, domain, _CONTROL_FLOW, str(error)) from None
        self.builder.location, self.builder.hint = place, hint
        return results

    def _expand(
        self, node: Any, operands: list[Any], domain: str, opsets: Mapping[str, int], reason: str = ""
    ) -> Sequence[Any]:
        """Expand an op without a conversion, or rejected by its conversion, by its ONNX function."""
        function = function_of(node, operands, domain, opsets.get(domain, 1))
        if function is None:
            # No size makes an op known.
            names = blamed_symbols(reason, operands) if reason else []
            raise self._unsupported(node, domain, symbol_hint(reason, names) if names else "", reason)
        scope = dict(zip(function.input, [*operands, *[None] * len(function.input)], strict=False))
        inner_opsets = {item.domain: item.version for item in function.opset_import}
        place, hint = self.builder.location, self.builder.hint
        for inner in function_nodes(function, node):
            inputs = [self.resolve(name, scope) if name else None for name in inner.input]
            results = self.node(inner, inputs, scope, inner_opsets)
            self.builder.location, self.builder.hint = place, hint
            scope.update({name: x for name, x in zip(inner.output, results, strict=False) if name})
        return [scope.get(name) for name in function.output]

    def _unsupported(self, node: Any, domain: str, hint: str = "", reason: str = "") -> UnsupportedOpError:
        full = f"{domain}::{node.op_type}" if domain else node.op_type
        problem = f"the model uses the ONNX op {full}, which the op table cannot express"
        return UnsupportedOpError(
            f"{problem}: {reason}" if reason else problem,
            self.builder.location,
            hint or f'add a spelling: @onnx_spelling("{full}")',
        )


def _frames(node: str) -> tuple[Frame, ...]:
    """Return the modules in a node's name: ``/layers.1/mlp/Mul`` is in ``/layers.1`` and in ``/layers.1/mlp``."""
    modules = node.split("/")[1:-1]
    return tuple(Frame("/" + "/".join(modules[: i + 1])) for i in range(len(modules)))


def _hint(name: str) -> str:
    """Return a value name for the model's name: without the leading slash and suffixes of exporters."""
    return re.sub(r"[^\w.]+", ".", re.sub(r"_output_0$", "", name)).strip(".")


def _place(name: str) -> str:
    return re.sub(r"[\s;#]+", "_", name)
