"""Replacement of Relax ops by kernels of ours, where these are faster than what TVM makes of the ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from distir_relax.lowering.emit.relax_sizes import static_size
from distir_relax.runtime.backends.tvm import kernels


def with_own_kernels(module: Any, host: kernels.Machine) -> Any:
    """Return a module whose only Relax function, ``main``, calls kernels instead of some ops."""
    from tvm import relax
    from tvm.ir import GenericConst

    function = relax_function(module)
    bindings = [b for block in function.body.blocks for b in block.bindings]
    builder = relax.BlockBuilder()
    kernels_of = {var: f for var, f in module.functions.items() if not isinstance(f, relax.Function)}
    values = {var: builder.add_func(f, var.name_hint) for var, f in kernels_of.items()}
    # Constants are inlined at their uses.
    values |= {b.var: b.value for b in bindings if isinstance(b.value, GenericConst)}
    values |= {parameter: parameter for parameter in function.params}
    result = function.body.body
    with builder.function("main", list(function.params)):
        with builder.dataflow():
            for b in bindings:
                if b.var in values:
                    continue
                call = _substitute(b.value, values)
                kernel = next((make for name, make in _KERNELS.items() if _is_op(call, name)), None)
                if kernel is not None and _suits(call):
                    call = kernel(builder, call, b.var.ty.shape, host)
                values[b.var] = (builder.emit_output if b.var == result else builder.emit)(call, name_hint=b.var.name)
        builder.emit_func_output(_substitute(result, values))
    return builder.get()


def relax_function(module: Any) -> Any:
    """Return the only Relax function of a module, which may hold kernels too. Raises ValueError unless there is one."""
    from tvm import relax

    [function] = [f for f in module.functions.values() if isinstance(f, relax.Function)]
    return function


def _product(builder: Any, call: Any, shape: Sequence[Any], host: kernels.Machine) -> Any:
    from tvm import relax

    a, b = call.args
    if len(a.ty.shape) < 2 or len(b.ty.shape) < 2:
        return call
    kernel = kernels.product(*_dims(a.ty.shape, b.ty.shape), _dtype(a), host)
    return relax.call_tir(builder.add_func(kernel, "product"), [a, b], relax.TensorType(shape, _dtype(a)))


def _softmax(builder: Any, call: Any, shape: Sequence[Any], host: kernels.Machine) -> Any:
    if call.attrs.axis not in (-1, len(shape) - 1):
        return call
    kernel = partial(kernels.softmax, dtype=_dtype(call.args[0]), machine=host)
    return _rowwise(builder, kernel, "softmax", call.args[:1])


def _layer_norm(builder: Any, call: Any, shape: Sequence[Any], host: kernels.Machine) -> Any:
    if [int(a) % len(shape) for a in call.attrs.axes] != [len(shape) - 1] or static_size(shape[-1]) is None:
        return call
    epsilon = float(call.attrs.epsilon)
    kernel = partial(kernels.layer_norm, dtype=_dtype(call.args[0]), epsilon=epsilon, machine=host)
    return _rowwise(builder, kernel, "layer_norm", call.args)


def _rowwise(builder: Any, kernel: Callable[..., Any], name: str, operands: Any) -> Any:
    """Call a kernel over the rows of the first operand, with its leading dims flattened."""
    from tvm import relax

    x = operands[0]
    *lead, n = x.ty.shape
    rows = math.prod(lead)
    flat = builder.emit(relax.op.reshape(x, (rows, n)))
    function = builder.add_func(kernel(*_dims((rows, n))[0]), name)
    call = relax.call_tir(function, [flat, *operands[1:]], relax.TensorType((rows, n), _dtype(x)))
    return relax.op.reshape(builder.emit(call), x.ty.shape)


_KERNELS: dict[str, Callable[[Any, Any, Sequence[Any], kernels.Machine], Any]] = {
    "relax.matmul": _product,
    "relax.nn.softmax": _softmax,
    "relax.nn.layer_norm": _layer_norm,
}


def _suits(call: Any) -> bool:
    """Whether the kernels support the operands: one floating dtype, and no empty tensor."""
    dtypes = {_dtype(x) for x in call.args}
    is_empty = any(static_size(n) == 0 for x in call.args for n in x.ty.shape)
    return len(dtypes) == 1 and dtypes <= set(kernels.FLOATS) and not is_empty


def _is_op(call: Any, name: str) -> bool:
    return getattr(getattr(call, "op", None), "name", None) == name


def _substitute(expression: Any, values: Mapping[Any, Any]) -> Any:
    from tvm import relax
    from tvm.ir.expr import is_prim_expr

    if isinstance(expression, (relax.Var, relax.GlobalVar)):
        # Variables of sizes stay.
        return expression if is_prim_expr(expression) else values[expression]
    if isinstance(expression, relax.Tuple):
        return relax.Tuple([_substitute(item, values) for item in expression.fields])
    if isinstance(expression, relax.TupleGetItem):
        return relax.TupleGetItem(_substitute(expression.tuple_value, values), expression.index)
    if isinstance(expression, relax.Call):
        arguments = [_substitute(item, values) for item in expression.args]
        return relax.Call(expression.op, arguments, expression.attrs, expression.ty_args)
    return expression


def _dims(*shapes: Sequence[Any]) -> list[tuple[kernels.Dim, ...]]:
    """Return shapes with names of a kernel's variables for symbolic sizes, one for equal sizes."""
    from tvm_ffi import structural_equal

    found: list[Any] = []

    def dim(size: Any) -> kernels.Dim:
        if (number := static_size(size)) is not None:
            return number
        if not any(structural_equal(size, other) for other in found):
            found.append(size)
        return next(f"{kernels.VARIABLE}{i}" for i, other in enumerate(found) if structural_equal(size, other))

    return [tuple(map(dim, shape)) for shape in shapes]


def _dtype(expression: Any) -> str:
    return str(expression.ty.dtype)
