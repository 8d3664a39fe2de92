"""Import of TVM Relax modules: one function, binding by binding.

The op table uses Relax's vocabulary, so most ops keep name and operands; other spellings are next to their entries
(`ops.relax`). `R.dist.annotate_sharding` and `R.dist.redistribute` become annotations, and so do the `R.DTensor` types
of parameters and results. `R.DTensor` types of intermediate values are results of an earlier propagation, and are
ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import AnnotationError, DistIRError, ImportModelError, UnsupportedOpError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.relax_shapes import bind_dims, bind_shapes, convert_size, open_symbols
from distir_relax.frontends.torch.arguments import as_tensor, named_arguments
from distir_relax.ir import Module, TensorType, Value
from distir_relax.kernels.prim_func_factors import block_rule
from distir_relax.kernels.tvm_extern import packed_text
from distir_relax.layout import DTYPES, DeviceMesh, Guards, guarding
from distir_relax.layout.validate import validate_placements
from distir_relax.ops import (
    DATA_DEPENDENT,
    DATA_DEPENDENT_HINT,
    Builder,
    Trait,
    entries,
    is_data_dependent,
    lookup_relax,
)

if TYPE_CHECKING:
    import torch
    import tvm


def import_relax(
    mod: tvm.IRModule,
    function: str | None = None,
    params: Mapping[str, Any] | Sequence[Any] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    dims: Mapping[str, Any] | None = None,
) -> Imported:
    """Import a function of `mod`: the named one, else ``main``, else the only public one.

    The first ``num_input`` parameters (an attribute) are inputs, the others weights; without the attribute all are
    inputs. `params` has the data of weights: by name, also of parameters that the attribute does not cover, or in order
    for the last parameters. `input_shapes` has the sizes of symbolic dims of parameters, and data has those of weights;
    other symbolic dims become symbols, with the bounds that `dims` has by name, or from 1 to the attribute
    ``tir_var_upper_bound``. Constants of the module become constants of the program; calls of other Relax functions are
    inlined.

    Raises `ImportModelError` for a module that is not a straight-line program of known shapes, `UnsupportedOpError`
    for an op without an entry in the op table, `AnnotationError` and `PlacementError` for invalid annotations.
    """
    name, entry = _choose(mod, function)
    data = _data(entry, name, params)
    mod = bind_shapes(mod, name, {**_shapes_of_data(entry, data), **(input_shapes or {})})
    entry = mod[name]
    first = int((entry.attrs or {}).get("num_input", len(entry.params)))
    weights = [number >= first or tensor is not None for number, tensor in enumerate(data)]
    inputs = [p for p, is_weight in zip(entry.params, weights, strict=True) if not is_weight]
    importer = _Importer(mod, name, open_symbols(entry, name, inputs, dims or {}))
    with guarding(Guards()) as guards:
        for parameter, tensor, is_weight in zip(entry.params, data, weights, strict=True):
            importer.declare(parameter, tensor, is_weight)
        result = importer.body(entry.body)
    names = {item.value.name: item.value.name for item in importer.builder.inputs if item.role != "constant"}
    outputs = list(importer.outputs(result, entry.ret_ty))
    program = importer.builder.function("main", outputs)
    taken = [item.value.name for item in program.inputs if item.role == "input"]
    return Imported(
        module=Module("global", (program,), importer.meshes, records=tuple(guards.found.values())),
        tensors=importer.tensors,
        names=names,
        places=importer.places,
        flatten=lambda args, kwargs: named_arguments(f"@{name}", taken, args, kwargs),
        rebuild=lambda tensors: _rebuild(result, iter([tensors[label] for label, _ in outputs])),
    )


def _choose(mod: Any, name: str | None) -> tuple[str, Any]:
    from tvm import relax

    functions = {var.name_hint: f for var, f in mod.functions.items() if isinstance(f, relax.Function)}
    public = [key for key, f in functions.items() if "global_symbol" in (f.attrs or {})] or list(functions)
    if name is None:
        name = "main" if "main" in functions else public[0] if len(public) == 1 else None
    if name is None or name not in functions:
        raise ImportModelError(
            f"expected a Relax function to compile, found {', '.join(functions) or 'none'}",
            hint="call it main, or import it by name: import_relax(mod, function=...)",
        )
    return name, functions[name]


def _data(function: Any, name: str, params: Mapping[str, Any] | Sequence[Any] | None) -> list[Any]:
    """Return the data of each parameter, None for inputs."""
    parameters = [p.name for p in function.params]
    if params is None:
        return [None] * len(parameters)
    if isinstance(params, Mapping):
        if unknown := set(params) - set(parameters):
            raise ImportModelError(f"@{name} has no parameters {', '.join(sorted(unknown))}")
        return [params.get(p) for p in parameters]
    inputs = int((function.attrs or {}).get("num_input", len(parameters) - len(params)))
    if inputs + len(params) != len(parameters):
        raise ImportModelError(
            f"@{name} has {len(parameters)} parameters and {inputs} inputs, found data for {len(params)}"
        )
    return [None] * inputs + list(params)


def _shapes_of_data(function: Any, data: Sequence[Any]) -> dict[str, Sequence[int]]:
    """Return the shapes of parameters' data where their types have symbolic dims."""
    from tvm import relax

    return {
        p.name: [int(n) for n in tensor.shape]
        for p, tensor in zip(function.params, data, strict=True)
        if tensor is not None and relax.analysis.tir_vars_in_type(p.ty)
    }


class _Importer:
    """Import of bindings into a `Builder`. A Relax value maps to a value, a list (a tuple), or a Python constant.

    `sizes` are those of TVM's variables.
    """

    def __init__(self, mod: Any, name: str, sizes: dict[Any, int]) -> None:
        self.builder = Builder()
        self.tensors: dict[str, torch.Tensor] = self.builder.tensors
        self.meshes, self.places = _declared_meshes(mod)
        self._module = mod
        self._function = name
        self._values: dict[Any, Any] = {}
        self._sizes = sizes
        self._active: list[str] = [name]

    def declare(self, parameter: Any, data: Any, weight: bool) -> None:
        """Declare a parameter of the function as an input or a weight, annotated if its type has a layout."""
        self.builder.location = f"@{self._function}, {parameter.name}"
        kind = self._type(parameter.ty)
        role = "parameter" if weight else "input"
        value = self.builder.input(parameter.name, kind, role, self.builder.location)
        if data is not None:
            self.tensors[value.name] = self._checked(data, kind, parameter.name)
        self._values[parameter] = self._apply_layout(value, parameter.ty, parameter.name)

    def body(self, body: Any) -> Any:
        """Import the blocks of a function; return its result."""
        from tvm import relax

        if not isinstance(body, relax.SeqExpr):
            return self.value(body)
        for block in body.blocks:
            for binding in block.bindings:
                self.builder.location = f"@{self._function}, {binding.var.name}"
                self.builder.hint = binding.var.name
                self._values[binding.var] = self._convert_binding(binding)
        return self.value(body.body)

    def outputs(self, result: Any, kind: Any) -> Iterator[tuple[str, Value]]:
        """Return the values of a result with distinct names, annotated according to the function's type."""
        counts: dict[str, int] = {}
        for value, declared in _leaves(result, kind):
            if not isinstance(value, Value):
                raise ImportModelError(f"expected tensors as results, found {value!r}", f"@{self._function}")
            count = counts[value.name] = counts.get(value.name, 0) + 1
            self.builder.location = f"@{self._function}, result {value.name}"
            yield (
                value.name if count == 1 else f"{value.name}_{count}",
                self._apply_layout(value, declared, value.name),
            )

    def value(self, expression: Any) -> Any:
        """Convert an expression: a value, a list of values, or a constant."""
        import tvm
        from tvm import relax

        if isinstance(expression, relax.Var) and expression not in self._sizes:
            return self._values[expression]
        if isinstance(expression, relax.Tuple):
            return [self.value(item) for item in expression.fields]
        if isinstance(expression, relax.TupleGetItem):
            return self.value(expression.tuple_value)[expression.index]
        if isinstance(expression, relax.GlobalVar):
            function = self._module[expression]
            return expression.name_hint, packed_text(function), block_rule(function)
        if isinstance(expression, relax.ExternFunc):
            return str(expression.global_symbol)
        if isinstance(expression, relax.ShapeExpr):
            return tuple(self._number(n) for n in expression.values)
        if isinstance(expression, tvm.ir.GenericConst):
            return self._constant(expression)
        if isinstance(expression, tvm.ir.StringImm):
            return str(expression.value)
        if isinstance(expression, tvm.ir.Call):
            return self._call(expression)
        return self._number(expression)

    def _convert_binding(self, binding: Any) -> Any:
        from tvm import relax

        value = getattr(binding, "value", None)
        if isinstance(binding, relax.MatchCast):
            return self._match(self.value(value), binding.ty)
        if isinstance(value, relax.If) or value is None:
            raise ImportModelError(
                f"expected a straight-line program, found {type(value).__name__}",
                self.builder.location,
                "bind conditions before compiling",
            )
        return value if isinstance(value, relax.Function) else self.value(value)

    def _match(self, value: Any, kind: Any) -> Any:
        """Bind the new variables in the type of a value; the others must have the value's sizes."""
        if isinstance(value, list):
            return [self._match(item, field) for item, field in zip(value, kind.fields, strict=True)]
        kind = getattr(kind, "tensor_ty", kind)
        actual = value.tensor.shape if isinstance(value, Value) else value
        expected = getattr(kind, "shape", getattr(kind, "values", None))
        if expected is not None and not bind_dims(list(expected), actual, self._sizes):
            raise ImportModelError(f"expected a match of {kind}, found {actual}", self.builder.location)
        return value

    def _call(self, call: Any) -> Any:
        import tvm
        from tvm import relax

        if isinstance(call.op, relax.GlobalVar):
            callee = self._module[call.op]
            if isinstance(callee, relax.Function):
                return self._inline(call.op.name_hint, callee, call.args)
            raise self._unsupported(call.op.name_hint)
        if isinstance(call.op, relax.Var):
            return self._inline(call.op.name, self._values[call.op], call.args)
        if not isinstance(call.op, tvm.ir.Op):
            raise self._unsupported(str(call.op))
        name = str(call.op.name)
        if name in ("relax.dist.annotate_sharding", "relax.dist.redistribute"):
            value = self.value(call.args[0])
            return self._annotate(value, call.attrs.device_mesh, str(call.attrs.placement), self.builder.hint)
        return self._convert(name, call)

    def _convert(self, name: str, call: Any) -> Any:
        convert = lookup_relax(name)
        ours = name.removeprefix("relax.")
        pointwise = {entry.name for entry in entries() if Trait.POINTWISE in entry.traits}
        if convert is None and ours not in pointwise:
            callee = next(
                (n for a in call.args[:1] for k in ("name_hint", "global_symbol") if (n := getattr(a, k, ""))), ""
            )
            raise self._unsupported(f"{name} of {callee}" if callee else name)
        arguments = [self.value(item) for item in call.args]
        try:
            if convert is None:
                return self.builder.emit(ours, *arguments)
            results = [self._type(kind) for kind in _flat(call.ty_args)]
            return convert(self.builder, arguments, {**_attributes(call), "results": results})
        except DistIRError:
            raise
        except NotImplementedError as error:
            raise UnsupportedOpError(f"{name}: {error}", self.builder.location) from None

    def _inline(self, name: str, function: Any, arguments: Any) -> Any:
        from tvm import relax

        if name in self._active:
            raise ImportModelError(f"@{name} calls itself", self.builder.location)
        values = [self.value(item) for item in arguments]
        outer, location, hint = self._function, self.builder.location, self.builder.hint
        self._function = name
        self._active.append(name)
        # Each call binds the parameters' names again.
        for variable in relax.analysis.defined_symbolic_vars(function):
            self._sizes.pop(variable, None)
        for parameter, value in zip(function.params, values, strict=True):
            self._values[parameter] = self._match(value, parameter.ty)
        result = self.body(function.body)
        self._active.pop()
        self._function, self.builder.location, self.builder.hint = outer, location, hint
        return result

    def _apply_layout(self, value: Value, kind: Any, hint: str) -> Value:
        """Annotate the value if its Relax type has a layout."""
        mesh = getattr(kind, "device_mesh", None)
        return value if mesh is None else self._annotate(value, mesh, str(kind.placement), hint)

    def _annotate(self, value: Value, relax_mesh: Any, text: str, hint: str) -> Value:
        where = self.builder.location
        mesh, place = _mesh(relax_mesh, where)
        if self.meshes and self.meshes[0] != mesh:
            raise _mesh_mismatch(mesh, self.meshes[0], where)
        self.meshes, self.places = (mesh,), max(self.places, place + 1)
        if self.places > 1:
            value = self.builder.emit("to_place", value, place=place)
        placements = validate_placements(text.strip('"'), mesh, value.tensor.shape, where)
        self.builder.hint = hint if hint != value.name else f"{value.name}.sharded"
        annotated: Value = self.builder.emit("annotate_sharding", value, placements=placements)
        return annotated

    def _constant(self, expression: Any) -> Value:
        from torch.utils.dlpack import from_dlpack

        data = from_dlpack(expression.value)
        kind = self._type(expression.ty)
        if not kind.shape:
            return self.builder.constant(data.item(), kind.dtype)
        value = self.builder.input("constant", kind, "constant", self.builder.location)
        self.tensors[value.name] = data
        return value

    def _type(self, kind: Any) -> TensorType:
        kind = getattr(kind, "tensor_ty", kind)
        shape = getattr(kind, "shape", None)
        dtype = str(getattr(kind, "dtype", ""))
        if shape is None or dtype not in DTYPES:
            raise ImportModelError(f"expected a tensor of known shape, found {kind}", self.builder.location)
        return TensorType(tuple(self._number(n) for n in shape), dtype)

    def _number(self, expression: Any) -> Any:
        if isinstance(expression, (int, float)):
            return expression
        if isinstance(value := getattr(expression, "value", None), (int, float)):
            return value
        try:
            return convert_size(expression, self._sizes)
        except NotImplementedError:
            raise ImportModelError(
                f"expected a number or a size, found {expression}", self.builder.location,
                "give the shapes of inputs: input_shapes={name: (1, ...)}",
            ) from None  # fmt: skip

    def _checked(self, data: Any, kind: TensorType, name: str) -> torch.Tensor:
        tensor = as_tensor(data)
        actual = TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if actual != kind:
            raise ImportModelError(f"expected {kind} as the data of {name}, found {actual}", self.builder.location)
        return tensor

    def _unsupported(self, name: str) -> UnsupportedOpError:
        if is_data_dependent(name):
            return UnsupportedOpError(f"{name}: {DATA_DEPENDENT}", self.builder.location, DATA_DEPENDENT_HINT)
        return UnsupportedOpError(
            f"the op table has no Relax spelling for {name}",
            self.builder.location,
            "help(distir_relax.define_op) shows how to add one",
        )


def _flat(kinds: Any) -> Iterator[Any]:
    """Flatten the types of tuples."""
    for kind in kinds or ():
        fields = getattr(kind, "fields", None)
        yield from [kind] if fields is None else _flat(fields)


def _attributes(call: Any) -> dict[str, Any]:
    """Return the attributes of a Relax call as plain Python; ``op`` is the call's own name."""
    fields = type(call.attrs).__tvm_ffi_type_info__.fields if call.attrs is not None else ()
    return {"op": str(call.op.name), **{f.name: _plain(getattr(call.attrs, f.name)) for f in fields}}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value) if isinstance(value, str) else value
    if hasattr(value, "value"):
        return _plain(value.value)
    if hasattr(value, "__len__") and not hasattr(value, "type_code"):
        return [_plain(item) for item in value]
    return str(value)


def _mesh(relax_mesh: Any, where: str) -> tuple[DeviceMesh, int]:
    """Return a mesh, and its index among the groups of as many devices."""
    shape = tuple(int(n) for n in relax_mesh.shape)
    ids, size = [int(i) for i in relax_mesh.device_ids], math.prod(shape)
    first = ids[0] if ids else 0
    if ids != list(range(first, first + size)) or first % size:
        raise AnnotationError(
            f"expected {size} devices in order, starting at a multiple of {size}, found {ids}", where,
            "the meshes of a module are equal groups of devices: 0 to 1, 2 to 3",
        )  # fmt: skip
    return DeviceMesh(shape), first // size


def _mesh_mismatch(mesh: DeviceMesh, other: DeviceMesh, where: str) -> AnnotationError:
    return AnnotationError(f"expected meshes of one shape, found {other} and {mesh}", where)


def _declared_meshes(mod: Any) -> tuple[tuple[DeviceMesh, ...], int]:
    """Return the mesh of the module's global infos, and the number of meshes with its shape."""
    declared = dict(mod.global_infos).get("mesh", ()) if mod.global_infos else ()
    meshes = [_mesh(info, "module_global_infos") for info in declared]
    for mesh, _ in meshes:
        if mesh != meshes[0][0]:
            raise _mesh_mismatch(mesh, meshes[0][0], "module_global_infos")
    return tuple(mesh for mesh, _ in meshes[:1]), max((place + 1 for _, place in meshes), default=1)


def _leaves(result: Any, kind: Any) -> Iterator[tuple[Any, Any]]:
    """Return the values in a result, each with its declared type if there is one."""
    if isinstance(result, list):
        fields = list(getattr(kind, "fields", None) or [None] * len(result))
        for item, field in zip(result, fields, strict=True):
            yield from _leaves(item, field)
    else:
        yield result, kind


def _rebuild(result: Any, tensors: Iterator[Any]) -> Any:
    return tuple(_rebuild(item, tensors) for item in result) if isinstance(result, list) else next(tensors)
