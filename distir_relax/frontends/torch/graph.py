"""Writes an exported graph as ops of the op table, node by node.

A node is a runtime value, or a constant: a tensor that depends on buffers and literals alone, computed on the spot by
the ATen op itself, or a number, a dtype, a list. Only ops that see a runtime value need a conversion.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.errors import AnnotationError, DistIRError, ImportModelError, UnsupportedOpError
from distir_relax.frontends.imported_model import Frame
from distir_relax.frontends.location import frames_of, location_in_stack, module_of
from distir_relax.frontends.torch.functionalize import is_in_place
from distir_relax.ir import TensorType, Value, join_location
from distir_relax.layout import DTYPES, DeviceMesh
from distir_relax.ops import DATA_DEPENDENT, DATA_DEPENDENT_HINT, Builder, Complex, aten_of
from distir_relax.sharding.annotate import is_mark

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node

# Keyword arguments that say where a result lives, not what it is.
_PLACEMENT_ARGUMENTS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
# Ops that make a number of a tensor. One that only assertions use is no concern of a program.
_NUMBERS = ("item.default", "_local_scalar_dense.default")
_EMPTY = (
    *("_assert", "_assert_scalar", "_assert_tensor_metadata", "_assert_async"),
    *("sym_constrain_range", "sym_constrain_range_for_size"),
)


MISTAKEN = "this is a mistake in the op's entry in the op table: please report it with this line of the model"
"""The hint of errors that are ours, not the model's."""


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A number that depends on data, and the op that gives it."""

    source: str


class GraphImporter:
    """Converts one graph that calls no other.

    Every placeholder is first given by `declare` or `bind`; then `run` gives the graph's results. `builder` holds the
    ops, `tensors` the data of parameters and constants by value name, `meshes` the mesh of the annotations, `scopes`
    the modules that an op's first result is made in. With `training`, dropout drops.
    """

    def __init__(self, training: bool = False) -> None:
        self.builder = Builder()
        self.builder.training = training
        self.tensors: dict[str, torch.Tensor] = self.builder.tensors
        self.meshes: tuple[DeviceMesh, ...] = ()
        self.scopes: dict[str, tuple[Frame, ...]] = {}
        self._annotated_at = ""
        # Of the node being converted: the line of its call, and the path of its module.
        self._line = ""
        self._module = ""
        # What each node stands for. It keeps all results alive, so that an id names one tensor in `_hints`.
        self._bound: dict[Node, Any] = {}
        self._hints: dict[int, str] = {}
        self._constants: dict[TensorType, list[tuple[torch.Tensor, Value]]] = {}

    def declare(self, node: Node, name: str, role: str, data: torch.Tensor | None = None) -> Value:
        """Make placeholder `node` an input of the program; `data` is a parameter's tensor."""
        value = self.builder.input(name, self._type(node.meta["val"], name), role)
        if data is not None:
            self.tensors[value.name] = data
        self._bound[node] = value
        return value

    def bind(self, node: Node, result: Any, hint: str = "") -> None:
        """Let `node` stand for `result`: a value, a constant tensor, or any other constant."""
        self._bound[node] = result
        if hint and self.is_tensor(result):
            self._hints.setdefault(id(result), hint)

    def result(self, node: Node) -> Any:
        """What `node` stands for, once it was declared, bound or converted."""
        return self._bound[node]

    def run(self, module: GraphModule) -> Sequence[Any]:
        """Convert the nodes of `module`, whose placeholders are bound; the graph's results."""
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._line = location_in_stack(node.meta.get("stack_trace")) or self._line
                self._module = module_of(node)
                self.builder.location = join_location(self._module, self._line)
                self.builder.hint = node.name
                before = len(self.builder.ops)
                self.bind(node, self._call(node), node.name)
                for op in self.builder.ops[before:]:
                    self.scopes.setdefault(op.results[0].name, frames_of(node))
            elif node.op == "get_attr":
                self._bound[node] = operator.attrgetter(node.target)(module)
            elif node.op == "output":
                results = self._resolve(node.args[0])
                return results if isinstance(results, (tuple, list)) else (results,)
        raise ImportModelError("expected a graph with an output, found none")

    def is_tensor(self, result: Any) -> bool:
        """Whether a result is a runtime value or a constant tensor."""
        import torch

        return isinstance(result, (Value, torch.Tensor))

    def value(self, result: Any, hint: str) -> Value:
        """A result as a value: a constant tensor becomes an input of role constant; equal ones become one."""
        import torch

        if isinstance(result, Value):
            return result
        name = self._hints.get(id(result), hint)
        same_type = self._constants.setdefault(self._type(result, name), [])
        for known, value in same_type:
            if known is result or (not (known.is_meta or result.is_meta) and torch.equal(known, result)):
                return value
        value = self.builder.input(name, self._type(result, name), "constant", self.builder.location)
        self.tensors[value.name] = result.contiguous()
        if not result.is_meta:
            self.builder.known[value.name] = self.tensors[value.name]
        same_type.append((result, value))
        return value

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
        leaves = _leaves((args, kwargs))
        if name in _NUMBERS and isinstance(args[0], Value):
            return _Unknown(name)
        if unknown := next((x for x in leaves if isinstance(x, _Unknown)), None):
            if getattr(target, "_schema", None) is None:
                return unknown
            raise UnsupportedOpError(
                f"aten.{name} takes a number that depends on data (aten.{unknown.source})",
                self.builder.location, DATA_DEPENDENT_HINT,
            )  # fmt: skip
        constant = not any(isinstance(x, (Value, Complex)) for x in leaves)
        result = self._fold(node, name, args, kwargs) if constant else self._convert(node, name, args, kwargs)
        if is_in_place(target):
            self._bound[node.args[0]] = result  # type: ignore[index]
        return result

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
        marked: Value = self.builder.emit("annotate_sharding", value, placements=placements)
        return marked

    def _fold(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        import torch

        target: Any = node.target
        if any(getattr(x, "is_meta", False) for x in _leaves((args, kwargs))):
            args, kwargs = _map(args, _without_data), _map(kwargs, _without_data)
        if is_in_place(target):
            # What was read of a constant before it is changed stays as it was.
            args = (args[0].clone(), *args[1:])
        state = torch.get_rng_state()
        with torch.no_grad():
            result = target(*args, **kwargs)
        # Dropout and attention may draw, and do not where there is no share to drop. On the meta device nothing tells.
        hidden = kwargs.get("generator") is not None or any(getattr(x, "is_meta", False) for x in _leaves(result))
        if (hidden and _may_draw(target)) or not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
            if self.builder.training and aten_of(name, False):
                return self._convert(node, name, args, kwargs)
            raise self._drawn(name)
        return result

    def _drawn(self, name: str) -> UnsupportedOpError:
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
            raise self._drawn(name)
        if convert is None:
            raise self._shaped_by_data(node, name) or _unsupported(name, self.builder.location)
        try:
            positional, named = _normalize(node.target, args, kwargs)
            shapes = [x for x in _leaves((args, kwargs)) if self.is_tensor(x) and not is_complex(x)]
            operand = lambda x: self._operand(x, shapes, node)  # noqa: E731
            operands = _map(positional, operand)
            result = convert(self.builder, *operands, **_map(named, operand))
        except DistIRError:
            raise
        except NotImplementedError as error:
            refused = UnsupportedOpError(f"aten.{name}: {error}", self.builder.location)
            raise self._shaped_by_data(node, name) or refused from None
        except Exception as error:  # a mistake of ours, which the user shall know the place of
            raise _mistaken(name, f"{type(error).__name__}: {error}", self.builder.location) from error
        if is_in_place(node.target) and not is_complex(result):
            # What is written to keeps its shape and its dtype.
            result = self.builder.aten("copy.default", operands[0], result)
        self._check(node, name, result)
        return result

    def _shaped_by_data(self, node: Node, name: str) -> UnsupportedOpError | None:
        if not _is_shaped_by_data(node.meta.get("val")):
            return None
        return UnsupportedOpError(f"aten.{name}: {DATA_DEPENDENT}", self.builder.location, DATA_DEPENDENT_HINT)

    def _operand(self, x: Any, tensors: Sequence[Any], node: Node) -> Any:
        """An argument of a conversion: constant tensors become values, scalars among them `constant` ops."""
        import torch

        if not isinstance(x, torch.Tensor):
            return x
        if x.is_complex():
            hint = self.builder.hint
            return Complex(*(self.value(part.contiguous(), hint) for part in (x.real, x.imag)))
        val = node.meta.get("val")
        stretches = any(len(_shape(t)) >= x.dim() and t is not x for t in tensors)
        same = all(_dtype(t) == _dtype(x) for t in tensors)
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and isinstance(val, torch.Tensor)
        if not x.is_meta and (x.dim() == 0 or (x.numel() == 1 and pointwise and same and stretches)):
            if _dtype(x) not in DTYPES:
                raise UnsupportedOpError(f"the model uses dtype {x.dtype}", self.builder.location)
            return self.builder.constant(x.item(), _dtype(x))
        return self.value(x, self.builder.hint)

    def _check(self, node: Node, name: str, result: Any) -> None:
        """The op table and torch must agree about every converted value."""
        expected = node.meta.get("val")
        pairs = zip(expected, result, strict=False) if isinstance(expected, (tuple, list)) else [(expected, result)]
        for val, value in pairs:
            if val is None or not isinstance(value, Value):
                continue
            if not _is_like(val, value.tensor):
                found = f"it is {value.type} here, and {tuple(val.shape)} of {val.dtype} in torch"
                raise _mistaken(name, found, self.builder.location)

    def _type(self, tensor: torch.Tensor, what: str) -> TensorType:
        import torch

        if _dtype(tensor) not in DTYPES:
            raise UnsupportedOpError(
                f"{what} has dtype {tensor.dtype}, expected one of {', '.join(DTYPES)}", self.builder.location
            )
        if any(isinstance(n, torch.SymInt) for n in tensor.shape):
            raise UnsupportedOpError(
                f"{what} has a shape that depends on data: {tuple(tensor.shape)}", self.builder.location
            )
        return TensorType(tuple(int(n) for n in tensor.shape), _dtype(tensor))

    def _resolve(self, item: Any) -> Any:
        from torch.fx import Node

        return _map(item, lambda x: self._bound[x] if isinstance(x, Node) else x)


def is_complex(x: Any) -> bool:
    """Whether a result is a complex tensor, constant or not."""
    import torch

    return isinstance(x, Complex) or (isinstance(x, torch.Tensor) and x.is_complex())


def _is_like(val: torch.Tensor, kind: TensorType) -> bool:
    """Whether torch's result has this type, as far as torch knows: sizes that follow from constants it does not."""
    import torch

    if val.dim() != len(kind.shape) or _dtype(val) != kind.dtype:
        return False
    return all(isinstance(n, torch.SymInt) or n == m for n, m in zip(val.shape, kind.shape, strict=True))


def _is_shaped_by_data(results: Any) -> bool:
    """Whether a result of a node has a dim that is a symbol."""
    import torch

    items = results if isinstance(results, (tuple, list)) else [results]
    return any(isinstance(n, torch.SymInt) for t in items if isinstance(t, torch.Tensor) for n in t.shape)


def _unsupported(name: str, location: str) -> UnsupportedOpError:
    full = name if "distir" in name else f"aten.{name}"
    return UnsupportedOpError(
        f"the model uses {full}, which has no entry in the op table",
        location,
        "help(distir_relax.define_op) shows how to add one",
    )


def _mistaken(name: str, found: str, location: str) -> UnsupportedOpError:
    return UnsupportedOpError(f"aten.{name} with these arguments is read wrongly: {found}", location, MISTAKEN)


def _may_draw(target: Any) -> bool:
    import torch

    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _spelling(target: Any) -> str:
    """``linear.default`` for an ATen op, ``namespace.name.overload`` for another library's, else the plain name."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return getattr(target, "__name__", str(target))
    return str(target).removeprefix("aten.")


def _normalize(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments in the order of the op's schema, defaults filled in between; keyword-only ones by name."""
    positional, named = list(args), dict(kwargs)
    pending: list[Any] = []
    for argument in target._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            break
        if argument.name in named:
            positional += [*pending, named.pop(argument.name)]
            pending = []
        else:
            pending.append(argument.default_value)
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
    """A tensor or a device among the arguments of an op that has an operand on the meta device."""
    import torch

    return x.to("meta") if isinstance(x, torch.Tensor) else torch.device("meta") if isinstance(x, torch.device) else x


def _leaves(item: Any) -> list[Any]:
    found: list[Any] = []
    _map(item, found.append)
    return found


def _shape(x: Any) -> tuple[int, ...]:
    return x.tensor.shape if isinstance(x, Value) else tuple(x.shape)


def _dtype(x: Any) -> str:
    return x.tensor.dtype if isinstance(x, Value) else str(x.dtype).removeprefix("torch.")
