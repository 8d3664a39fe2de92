"""Conversion of an exported graph to ops of the op table, node by node.

A node is a runtime value, or a constant: a tensor that depends only on buffers and literals, which the ATen op itself
computes during import, or a number, a dtype, a list. Only ops with runtime operands need a conversion.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.errors import AnnotationError, DistIRError, ImportModelError, UnsupportedOpError, VerificationError
from distir_relax.frontends.imported_model import Frame
from distir_relax.frontends.location import frames_of, location_in_stack, module_of
from distir_relax.frontends.shape_ops import is_shape_ops
from distir_relax.frontends.torch.custom_autograd import is_own_gradient, is_seed
from distir_relax.frontends.torch.functionalize import is_in_place
from distir_relax.frontends.torch.inner_gradients import emit_gradients, is_gradients, is_own_input
from distir_relax.frontends.torch.large_constants import (
    compute,
    compute_pointwise,
    is_pointwise,
    is_small,
    is_too_large,
    narrowed,
)
from distir_relax.frontends.torch.loss_call import location_of_loss
from distir_relax.frontends.torch.scans import is_linear_scan
from distir_relax.ir import TensorType, Value, join_location
from distir_relax.layout import (
    DTYPES,
    DeviceMesh,
    Symbol,
    floor_divide,
    is_always,
    is_symbolic,
    locate_guards,
    maximum,
    minimum,
    size_of,
)
from distir_relax.layout.validate import validate_annotation
from distir_relax.ops import (
    DATA_DEPENDENT,
    DATA_DEPENDENT_HINT,
    Builder,
    Complex,
    aten_of,
    broadcast_to,
    cast,
    filled,
    reshape_to,
)
from distir_relax.sharding.annotate import is_mark

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node

# Keyword arguments that determine where a result is stored, not its value.
TRANSFORM_HINT = "write it with ops on the whole batch; torch.autograd.grad and torch.func.grad are captured"
"""What to write in place of functions of `torch.func`."""
_TRANSFORMS = {"_add_batch_dim": "torch.func.vmap", "_make_dual": "torch.func.jvp"}
"""Functions of `torch.func` by the ops that they begin with."""
_PLACEMENT_ARGUMENTS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
# Ops that convert a tensor to a number. If only assertions use it, the program ignores it.
_NUMBERS = ("item.default", "_local_scalar_dense.default")
_EMPTY = (
    *("_assert", "_assert_scalar", "_assert_tensor_metadata", "_assert_async"),
    *("sym_constrain_range", "sym_constrain_range_for_size"),
)


_SIZES: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": floor_divide,
    "mod": operator.mod,
    "neg": operator.neg,
    "sym_max": maximum,
    "sym_min": minimum,
}
"""Functions that compute sizes from symbolic ones, by the name of torch's function."""
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "sym_not", "and_", "or_")

REPORT_HINT = "this is a bug in the op's entry in the op table: please report it with this line of the model"
"""Hint of errors caused by this package, not by the model."""


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A number that depends on data, and the op that computes it."""

    source: str


class GraphImporter:
    """Conversion of one graph without subgraphs.

    `declare` or `bind` must first be called for every placeholder; then `run` returns the graph's results. `builder`
    holds the ops, `tensors` the data of parameters and constants by value name, `meshes` the mesh of the annotations,
    `scopes` the modules in which an op's first result is computed, `shape_ops` the counts of annotations. With
    `training`, dropout is active. With `mixes_dtypes`, ops may have operands of several dtypes, as under autocast.
    """

    def __init__(self, training: bool = False, mixes_dtypes: bool = False) -> None:
        import torch

        self._mixes_dtypes = mixes_dtypes
        self.builder = Builder()
        self.builder.training = training
        self.builder.default_dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        self.builder.guards_slices = True
        self.tensors: dict[str, torch.Tensor] = self.builder.tensors
        self.meshes: tuple[DeviceMesh, ...] = ()
        self.scopes: dict[str, tuple[Frame, ...]] = {}
        self.shape_ops: Counter[str] = Counter()
        self._annotated_at = ""
        # Of the current node: the line of its call, and the path of its module.
        self._line = ""
        self._module = ""
        # Results of nodes. It keeps all results alive, so that an id identifies one tensor in `_hints`.
        self._bound: dict[Node, Any] = {}
        self._hints: dict[int, str] = {}
        self._constants: dict[TensorType, list[tuple[torch.Tensor, Value]]] = {}
        # Large constants are broadcast where they are computed: the number of ops before, and the place in the model.
        self._origins: dict[int, tuple[int, str, tuple[Frame, ...]]] = {}
        self._broadcasts: dict[tuple[str, tuple[int, ...]], Value] = {}

    def declare(
        self,
        node: Node,
        name: str,
        role: str,
        data: torch.Tensor | None = None,
        symbols: Mapping[int, Symbol] | None = None,
    ) -> Value:
        """Declare placeholder `node` as an input of the program, with these `symbols` by dim.

        `data` is a parameter's tensor.
        """
        kind = self._type(node.meta["val"], name, symbols or {})
        value = self.builder.input(name, kind, role)
        if data is not None:
            self.tensors[value.name] = data
        self._bound[node] = value
        return value

    def bind(self, node: Node, result: Any, hint: str = "") -> None:
        """Bind `node` to `result`: a value, a constant tensor, or another constant."""
        self._bound[node] = result
        if hint and self.is_tensor(result):
            self._hints.setdefault(id(result), hint)

    def result(self, node: Node) -> Any:
        """Return the result of `node`, once it was declared, bound or converted."""
        return self._bound[node]

    def run(self, module: GraphModule) -> Sequence[Any]:
        """Convert the nodes of `module`, whose placeholders are bound; return the graph's results."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                stack = node.meta.get("stack_trace")
                self._line = location_of_loss(stack) or location_in_stack(stack) or self._line
                self._module = module_of(node)
                self.builder.location = join_location(self._module, self._line)
                locate_guards(self.builder.location)
                self.builder.hint = node.name
                before = len(self.builder.ops)
                result = self._call(node)
                self.bind(node, result, node.name)
                if self.is_tensor(result):
                    self._origins.setdefault(id(result), (before, self.builder.location, frames_of(node)))
                for op in self.builder.ops[before:]:
                    self.scopes.setdefault(op.results[0].name, frames_of(node))
            elif node.op == "get_attr":
                self._bound[node] = operator.attrgetter(node.target)(module)
            elif node.op == "output":
                results = self._resolve(node.args[0])
                return results if isinstance(results, (tuple, list)) else (results,)
        raise ImportModelError("expected a graph with an output, found none")

    def is_tensor(self, result: Any) -> bool:
        """Return whether a result is a runtime value or a constant tensor."""
        import torch

        return isinstance(result, (Value, torch.Tensor))

    def value(self, result: Any, hint: str) -> Value:
        """Convert a result to a value: a constant tensor becomes an input of role constant; equal ones share one."""
        import torch

        if isinstance(result, Value):
            return result
        name = self._hints.get(id(result), hint)
        if not (result.is_meta or is_small(result)) and (part := narrowed(result)) is not result:
            known = self._as_positions(result)
            return known if isinstance(known, Value) else self._broadcast(self.value(part, name), result)
        same_type = self._constants.setdefault(self._type(result, name), [])
        for data, value in same_type:
            if data is result or (not (data.is_meta or result.is_meta) and torch.equal(data, result)):
                return value
        value = self.builder.input(name, self._type(result, name), "constant", self.builder.location)
        self.tensors[value.name] = result.contiguous()
        if not result.is_meta:
            self.builder.constants[value.name] = self.tensors[value.name]
        same_type.append((result, value))
        return value

    def _broadcast(self, part: Value, result: torch.Tensor) -> Value:
        """Broadcast a constant to one that is uniform along some dims, once, where the model computes it."""
        key = part.name, tuple(result.shape)
        if key not in self._broadcasts:
            builder = self.builder
            number, location, frames = self._origins.get(id(result), (len(builder.ops), builder.location, ()))
            current, builder.location = builder.location, location
            self._broadcasts[key] = builder.emit("broadcast_to", part, shape=key[1])
            builder.location = current
            builder.ops.insert(number, builder.ops.pop())
            self.scopes[self._broadcasts[key].name] = frames
        return self._broadcasts[key]

    def _call(self, node: Node) -> Any:
        target: Any = node.target
        name = _spelling(target)
        args, kwargs = self._resolve(node.args), self._resolve(node.kwargs)
        if target is operator.getitem:
            return args[0][args[1]]
        if name.split(".")[0] in _EMPTY:
            return None
        if name == "sym_size.int" and isinstance(args[0], Value):
            return args[0].tensor.shape[args[1]]
        if is_mark(target):
            return self._annotate(*args)
        if is_shape_ops(target):
            value = self.value(args[0], self.builder.hint)
            self.shape_ops[value.name] += args[1]
            return value
        if is_linear_scan(target):
            operands = [self.value(x, self.builder.hint) for x in args[:2]]
            return self.builder.emit("linear_scan", *operands, axis=args[2])
        if _is_of_gradients(target):
            return self._gradients(target, args)
        leaves = _leaves((args, kwargs))
        is_sized = is_symbolic(tuple(leaves))
        if is_sized and getattr(target, "_schema", None) is None:
            return self._size(target, name, args)
        if name in _NUMBERS and isinstance(args[0], Value):
            return _Unknown(name)
        if unknown := next((x for x in leaves if isinstance(x, _Unknown)), None):
            if getattr(target, "_schema", None) is None:
                return unknown
            raise UnsupportedOpError(
                f"aten.{name} takes a number that depends on data (aten.{unknown.source})",
                self.builder.location, DATA_DEPENDENT_HINT,
            )  # fmt: skip
        constant = not is_sized and not any(isinstance(x, (Value, Complex)) for x in leaves)
        result = self._fold(node, name, args, kwargs) if constant else self._convert(node, name, args, kwargs)
        if is_in_place(target):
            self._bound[node.args[0]] = result  # type: ignore[index]
        return result

    def _gradients(self, target: Any, args: Sequence[Any]) -> Any:
        """Convert an op of gradients that the model computes itself."""
        g, hint = self.builder, self.builder.hint
        if is_gradients(target):
            outputs, inputs, seeds = ([self.value(x, hint) for x in part] for part in args[:3])
            return emit_gradients(g, outputs, inputs, seeds, args[3])
        value = self.value(args[0], hint)
        if is_own_gradient(target):
            # Constants need no gradient.
            pairs = [pair for pair in zip(*args[2:], strict=True) if isinstance(pair[0], Value)]
            operands = [value, args[1], *(self.value(x, hint) for pair in pairs for x in pair)]
            results = g.emit("own_gradient", *operands, inputs=len(pairs))
            return results[0] if isinstance(results, tuple) else results
        # A view has a name of its own: a gradient of it is not that of what it views.
        shape = value.tensor.shape
        return g.emit("reshape", filled(g, shape, 0.0, value.tensor.dtype) if is_seed(target) else value, shape=shape)

    def _annotate(self, x: Any, shape: Sequence[int], axes: Sequence[str], placements: str, line: str) -> Value:
        location = join_location(self._module, line)
        mesh = DeviceMesh(tuple(shape), tuple(axes))
        if self.meshes and self.meshes[0] != mesh:
            raise AnnotationError(
                f"expected one mesh for all annotations: {mesh} here, {self.meshes[0]} at {self._annotated_at}",
                location,
            )
        self.meshes, self._annotated_at = (mesh,), self._annotated_at or location
        value = self.value(x, self.builder.hint)
        self.builder.location = location
        self.builder.hint = f"{value.name}.sharded"
        layout = validate_annotation(placements, mesh, value.tensor.shape, location)
        annotated: Value = self.builder.emit("annotate_sharding", value, placements=layout)
        return annotated

    def _size(self, target: Any, name: str, args: Sequence[Any]) -> Any:
        """Compute a size, or a comparison of sizes, from symbolic ones."""
        if name in _COMPARISONS:
            # Only assertions of what torch has proved use it.
            return _Unknown(f"comparison of {args[0]} and {args[1]}")
        if name not in _SIZES:
            raise UnsupportedOpError(
                f"the model computes {name} of a size, {', '.join(map(str, args))}", self.builder.location,
                f"sizes can be computed by {', '.join(_SIZES)}",
            )  # fmt: skip
        return _SIZES[name](*args)

    def _fold(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        import torch

        target: Any = node.target
        if any(getattr(x, "is_meta", False) for x in _leaves((args, kwargs))):
            args, kwargs = _map(args, _without_data), _map(kwargs, _without_data)
        if is_in_place(target):
            # Earlier reads of a constant must not see the write.
            args = (args[0].clone(), *args[1:])
        state = torch.get_rng_state()
        with torch.no_grad():
            result = self._evaluate(node, name, args, kwargs)
        # Ops with a random mode, such as dropout, do not always draw. On meta the generator state is unknown.
        is_unknown = kwargs.get("generator") is not None or any(getattr(x, "is_meta", False) for x in _leaves(result))
        if (is_unknown and _may_draw(target)) or not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
            if self.builder.training and aten_of(name, False):
                return self._convert(node, name, args, kwargs)
            raise self._random_op_error(name)
        return result

    def _evaluate(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        """Compute constants, large ones without copies; return a value if its op stays in the program."""
        target: Any = node.target
        val = node.meta.get("val")
        leaves = _leaves((args, kwargs))
        is_plain = is_small(val) or is_in_place(target) or _may_draw(target)
        if any(getattr(x, "is_meta", False) for x in leaves):
            return compute(target, *_map((args, kwargs), lambda x: x.to("meta") if hasattr(x, "is_meta") else x))
        if not _may_draw(target):
            # Positions of a model without data are known, and so are its masks.
            kwargs = {key: "cpu" if str(x) == "meta" else x for key, x in kwargs.items()}
        if is_plain:
            return compute(target, args, kwargs)
        convert = aten_of(name, any(map(is_complex, leaves)))
        if is_pointwise(convert, *_normalize(target, args, kwargs)):
            result = compute_pointwise(target, args, kwargs, val)
            if result is None:
                result = self._convert(node, name, *_map((args, kwargs), self._as_positions))
            return result
        if convert is not None and is_too_large(target, args, kwargs):
            try:
                return self._convert(node, name, args, kwargs)
            except UnsupportedOpError:  # The op needs values of its operands.
                pass
        return compute(target, args, kwargs)

    def _as_positions(self, x: Any) -> Any:
        """Return a constant whose elements are equal, or positions along a dim, as the op that gives them.

        Of a large mask, the elements are then functions of their indices, not of data.
        """
        import torch

        if not isinstance(x, torch.Tensor) or x.is_meta or x.dtype not in (torch.int64, torch.bool):
            return x
        part = narrowed(x)
        numbers = part.reshape(-1)
        if len(numbers) == 1:
            return filled(self.builder, tuple(x.shape), numbers.item(), _dtype(x))
        if x.dtype == torch.bool or sum(n > 1 for n in part.shape) != 1:
            return x
        first, stride = int(numbers[0]), int(numbers[1] - numbers[0])
        if not stride or not torch.equal(numbers, first + stride * torch.arange(len(numbers))):
            return x
        end = first + stride * len(numbers)
        counted = self.builder.emit("arange", start=first, end=end, stride=stride, dtype="int64")
        return broadcast_to(self.builder, reshape_to(self.builder, counted, tuple(part.shape)), tuple(x.shape))

    def _random_op_error(self, name: str) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"aten.{name} draws random numbers, which a program cannot do",
            self.builder.location,
            "draw them outside and pass them in as an input",
        )

    def _convert(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        takes_complex = any(is_complex(x) for x in _leaves((args, kwargs)))
        convert = aten_of(name, takes_complex)
        if is_in_place(node.target) and convert is None:
            convert = aten_of(name.replace("_.", ".", 1), takes_complex)
        if convert is None and _may_draw(node.target):
            raise self._random_op_error(name)
        if convert is None:
            raise self._data_dependent_shape_error(node, name) or _unsupported(name, self.builder.location)
        try:
            positional, named = _normalize(node.target, args, kwargs)
            shapes = [x for x in _leaves((args, kwargs)) if self.is_tensor(x) and not is_complex(x)]
            operand = lambda x: self._operand(x, shapes, node)  # noqa: E731
            operands, options = _map(positional, operand), _map(named, operand)
            dtypes = _float_dtypes((operands, options))
            is_mixed = self._mixes_dtypes and len(dtypes) > 1
            result = self._convert_as_is(node, convert, operands, options, is_mixed)
            if result is None:
                result = self._convert_wide(node, convert, operands, options, max(dtypes, key=lambda d: DTYPES[d][1]))
        except DistIRError:
            raise
        except NotImplementedError as error:
            rejected = UnsupportedOpError(f"aten.{name}: {error}", self.builder.location)
            raise self._data_dependent_shape_error(node, name) or rejected from None
        except Exception as error:  # a bug of this package; the user needs its location
            raise _conversion_error(name, f"{type(error).__name__}: {error}", self.builder.location) from error
        if is_in_place(node.target) and not is_complex(result):
            # The written tensor keeps its shape and dtype.
            result = self.builder.aten("copy.default", operands[0], result)
        result = self._with_fixed_sizes(node, result)
        self._check(node, name, result)
        return result

    def _convert_as_is(self, node: Node, convert: Any, operands: Any, options: Any, is_mixed: bool) -> Any:
        """Convert a node; return None if operands of several dtypes are no operands of the op, or give another result.

        Under autocast norms and recurrent layers have such operands.
        """
        before = len(self.builder.ops)
        try:
            result = convert(self.builder, *operands, **options)
        except VerificationError:
            if not is_mixed:
                raise
        else:
            pairs = zip(_leaves(result), _leaves(node.meta.get("val")), strict=False)
            if not is_mixed or all(_dtype(r) == _dtype(v) for r, v in pairs if _is_float(r)):
                return result
        del self.builder.ops[before:]
        return None

    def _convert_wide(self, node: Node, convert: Any, operands: Any, options: Any, dtype: str) -> Any:
        """Convert a node on operands of one dtype, with results of the dtypes that torch has."""
        g = self.builder
        widen = lambda x: cast(g, x, dtype) if _is_float(x) else x  # noqa: E731
        results = convert(g, *_map(operands, widen), **_map(options, widen))
        val: Any = node.meta.get("val")
        if isinstance(results, (tuple, list)):
            pairs = zip(results, val, strict=False)
            return type(results)(cast(g, r, _dtype(v)) if _is_float(r) else r for r, v in pairs)
        return cast(g, results, _dtype(val)) if _is_float(results) else results

    def _with_fixed_sizes(self, node: Node, result: Any) -> Any:
        """Return results with the sizes that torch has fixed at the example's, guarded by equality with ours."""
        val = node.meta.get("val")
        if isinstance(result, (tuple, list)) and isinstance(val, (tuple, list)):
            return type(result)(self._fixed(v, r) for v, r in zip(val, result, strict=False))
        return self._fixed(val, result)

    def _fixed(self, val: Any, result: Any) -> Any:
        if not isinstance(result, Value) or len(getattr(val, "shape", ())) != len(result.tensor.shape):
            return result
        ours = result.tensor.shape
        shape = tuple(n if is_symbolic(m) and isinstance(n, int) else m for n, m in zip(val.shape, ours, strict=True))
        if shape == ours or any(is_always(a, "==", b) is False for a, b in zip(shape, ours, strict=True)):
            return result
        return self.builder.emit("reshape", result, shape=shape)

    def _data_dependent_shape_error(self, node: Node, name: str) -> UnsupportedOpError | None:
        if not _is_shaped_by_data(node.meta.get("val")):
            return None
        return UnsupportedOpError(f"aten.{name}: {DATA_DEPENDENT}", self.builder.location, DATA_DEPENDENT_HINT)

    def _operand(self, x: Any, tensors: Sequence[Any], node: Node) -> Any:
        """Convert an operand: a constant tensor becomes a value, a constant scalar a `constant` op."""
        import torch

        if not isinstance(x, torch.Tensor):
            return x
        if x.is_complex():
            hint = self.builder.hint
            return Complex(*(self.value(part.contiguous(), hint) for part in (x.real, x.imag)))
        val = node.meta.get("val")
        broadcasts = any(len(_shape(t)) >= x.dim() and t is not x for t in tensors)
        same = all(_dtype(t) == _dtype(x) for t in tensors)
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and isinstance(val, torch.Tensor)
        if not x.is_meta and (x.dim() == 0 or (x.numel() == 1 and pointwise and same and broadcasts)):
            if _dtype(x) not in DTYPES:
                raise UnsupportedOpError(f"the model uses dtype {x.dtype}", self.builder.location)
            return self.builder.constant(x.item(), _dtype(x))
        return self.value(x, self.builder.hint)

    def _check(self, node: Node, name: str, result: Any) -> None:
        """Check that the op table and torch agree on the type of every converted value."""
        expected = node.meta.get("val")
        pairs = zip(expected, result, strict=False) if isinstance(expected, (tuple, list)) else [(expected, result)]
        for val, value in pairs:
            if val is None or not isinstance(value, Value):
                continue
            if not _is_like(val, value.tensor):
                description = f"it is {value.type} here, and {tuple(val.shape)} of {val.dtype} in torch"
                raise _conversion_error(name, description, self.builder.location)

    def _type(self, tensor: torch.Tensor, what: str, symbols: Mapping[int, Symbol] | None = None) -> TensorType:
        import torch

        if _dtype(tensor) not in DTYPES:
            raise UnsupportedOpError(
                f"{what} has dtype {tensor.dtype}, expected one of {', '.join(DTYPES)}", self.builder.location
            )
        sizes = {dim: size_of(symbol) for dim, symbol in (symbols or {}).items()}
        if any(isinstance(n, torch.SymInt) and dim not in sizes for dim, n in enumerate(tensor.shape)):
            raise UnsupportedOpError(
                f"{what} has a shape that depends on data: {tuple(tensor.shape)}", self.builder.location
            )
        shape = tuple(sizes[dim] if dim in sizes else int(n) for dim, n in enumerate(tensor.shape))
        return TensorType(shape, _dtype(tensor))

    def _resolve(self, item: Any) -> Any:
        from torch.fx import Node

        return _map(item, lambda x: self._bound[x] if isinstance(x, Node) else x)


def is_complex(x: Any) -> bool:
    """Return whether a result is a complex tensor, constant or not."""
    import torch

    return isinstance(x, Complex) or (isinstance(x, torch.Tensor) and x.is_complex())


def _is_like(val: torch.Tensor, kind: TensorType) -> bool:
    """Return whether torch's result has this type; sizes that follow from constants are unknown to torch."""
    import torch

    if val.dim() != len(kind.shape) or _dtype(val) != kind.dtype:
        return False
    return all(isinstance(n, torch.SymInt) or n == m for n, m in zip(val.shape, kind.shape, strict=True))


def _is_shaped_by_data(results: Any) -> bool:
    """Return whether a node's result has a dim that depends on data, which torch names ``u0`` and so on."""
    import torch

    items = results if isinstance(results, (tuple, list)) else [results]
    sizes = (n for t in items if isinstance(t, torch.Tensor) for n in t.shape if isinstance(n, torch.SymInt))
    return any(re.search(r"\bu\d", str(n)) for n in sizes)


def _unsupported(name: str, location: str) -> UnsupportedOpError:
    if function := _TRANSFORMS.get(name.partition(".")[0]):
        return UnsupportedOpError(
            f"{function} of a tensor that depends on the inputs is not captured", location, TRANSFORM_HINT
        )
    full = name if "distir" in name else f"aten.{name}"
    return UnsupportedOpError(
        f"the model uses {full}, which has no entry in the op table",
        location,
        "help(distir_relax.define_op) shows how to add one",
    )


def _conversion_error(name: str, reason: str, location: str) -> UnsupportedOpError:
    return UnsupportedOpError(f"aten.{name} is converted wrongly with these arguments: {reason}", location, REPORT_HINT)


def _is_float(x: Any) -> bool:
    return isinstance(x, Value) and "float" in x.tensor.dtype


def _float_dtypes(item: Any) -> set[str]:
    return {x.tensor.dtype for x in _leaves(item) if _is_float(x)}


def _is_of_gradients(target: Any) -> bool:
    return is_gradients(target) or is_own_input(target) or is_seed(target) or is_own_gradient(target)


def _may_draw(target: Any) -> bool:
    import torch

    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _spelling(target: Any) -> str:
    """Return ``linear.default`` for an ATen op, ``namespace.name.overload`` for another library's, else the name."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return getattr(target, "__name__", str(target))
    return str(target).removeprefix("aten.")


def _normalize(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments in the order of the op's schema with defaults filled in, and keyword-only arguments by name."""
    positional, named = list(args), dict(kwargs)
    defaults: list[Any] = []
    for argument in target._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            break
        if argument.name in named:
            positional += [*defaults, named.pop(argument.name)]
            defaults = []
        else:
            defaults.append(argument.default_value)
    return positional, {k: v for k, v in named.items() if k not in _PLACEMENT_ARGUMENTS}


def _map(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, (tuple, list)):
        return [_map(x, change) for x in item] if isinstance(item, list) else tuple(_map(x, change) for x in item)
    if isinstance(item, dict):
        return {key: _map(x, change) for key, x in item.items()}
    if isinstance(item, slice):
        return slice(change(item.start), change(item.stop), change(item.step))
    return change(item)


def _without_data(x: Any) -> Any:
    """Move a tensor or device to meta, for an op with an operand on the meta device."""
    import torch

    return x.to("meta") if isinstance(x, torch.Tensor) else torch.device("meta") if isinstance(x, torch.device) else x


def _leaves(item: Any) -> list[Any]:
    leaves: list[Any] = []
    _map(item, leaves.append)
    return leaves


def _shape(x: Any) -> tuple[int, ...]:
    return x.tensor.shape if isinstance(x, Value) else tuple(x.shape)


def _dtype(x: Any) -> str:
    return x.tensor.dtype if isinstance(x, Value) else str(x.dtype).removeprefix("torch.")
