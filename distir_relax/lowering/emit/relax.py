"""Relax code generation: each rank program becomes a Relax function.

An op of the table becomes its `relax` expression. Ops that a rank's communicator performs become packed calls in
destination-passing style, which read and write buffers of TVM's virtual machine::

    distir.<op>(operands..., token, step, attributes as JSON, result, next token)

Relax considers such a call pure: it could remove one whose result is unused, or merge two equal ones. So each takes the
token returned by the preceding one, and the function returns the last: this chain of data dependences preserves program
order under any passes. Tokens carry no data.

TVM has no reshape or split to a tensor without elements, so such a result (the shard of a rank without heads, for
instance) is emitted as zeros of its shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from distir_relax.errors import VerificationError
from distir_relax.ir import Function, Module, Op, PerRank, TensorType, Value, inline, print_op
from distir_relax.lowering.emit.relax_namespace import relax_scope
from distir_relax.ops import Trait, is_zero, lookup, relax_expression

if TYPE_CHECKING:
    import tvm

PACKED_PREFIX = "distir."
STEPS_ATTRIBUTE = "distir.steps"
RANKS_ATTRIBUTE = "distir.ranks"
OUTPUTS_ATTRIBUTE = "distir.outputs"
SCHEDULE_ATTRIBUTE = "distir.schedule"
FAST_MATH_ATTRIBUTE = "distir.fast_math"


def to_relax(module: Module, fast_math: bool = False) -> tvm.IRModule:
    """Convert the ranked `module` to one IRModule, with a Relax function per distinct rank program, calls inlined.

    Parameters are the function's inputs in order; the result is the tuple of its outputs, and of a token if it
    communicates. The module attribute ``distir.ranks`` lists the function of each rank; the function attribute
    ``distir.schedule`` lists communicator calls in order, each as ``all_reduce 3``: the op and its step. With
    `fast_math`, functions have the attribute ``distir.fast_math``: the tvm backend need not preserve NaN in them.

    Raises `VerificationError` if the module is not ranked, or TVM infers another type for an op than the op table.
    """
    import tvm

    _check_stage(module)
    attrs = tvm.ir.make_node("ir.DictAttrs", **{RANKS_ATTRIBUTE: list(module.ranks)})
    return tvm.IRModule(_emit_functions(inline(module).functions, fast_math), attrs=attrs)


def to_relax_programs(module: Module, fast_math: bool = False) -> dict[str, tvm.IRModule]:
    """Convert each program of the ranked `module` to an IRModule with its function only.

    Raises the errors of `to_relax`.
    """
    import tvm

    _check_stage(module)
    return {f.name: tvm.IRModule(_emit_functions([f], fast_math)) for f in inline(module).functions}


def to_relax_json(module: Module, fast_math: bool = False) -> dict[str, str]:
    """Convert each program of the ranked `module` to the JSON of an IRModule with its function only.

    Raises the errors of `to_relax`.
    """
    import tvm

    return {name: tvm.ir.save_json(program) for name, program in to_relax_programs(module, fast_math).items()}


def _check_stage(module: Module) -> None:
    if module.stage != "ranked":
        raise VerificationError(f"expected a module of the ranked stage, found the {module.stage} stage")


def _emit_functions(functions: Sequence[Function], fast_math: bool) -> dict[Any, Any]:
    """Return the Relax functions, including those that they call."""
    from tvm import relax

    builder = relax.BlockBuilder()
    for function in functions:
        _emit_function(builder, function, fast_math)
    return dict(builder.get().functions.items())


def _emit_function(builder: Any, function: Function, fast_math: bool) -> None:
    from tvm import relax

    scope = relax_scope()
    values: dict[str, Any] = {}
    parameters = []
    for item in function.inputs:
        values[item.value.name] = relax.Var(item.value.name, _relax_type(item.value.tensor))
        parameters.append(values[item.value.name])
    attrs = {
        STEPS_ATTRIBUTE: _steps(function),
        OUTPUTS_ATTRIBUTE: len(function.outputs),
        SCHEDULE_ATTRIBUTE: [f"{op.name} {_step_of(op)}" for op in function.ops if _on_communicator(op)],
    }
    if fast_math:
        attrs[FAST_MATH_ATTRIBUTE] = True
    with builder.function(function.name, parameters, attrs=attrs):
        with builder.dataflow():
            token: Any = relax.const(0, "int32")
            for op in function.ops:
                if _on_communicator(op):
                    token = _emit_communication(builder, op, values, token)
                else:
                    _emit_op(builder, op, values, scope)
            outputs = [values[output.value.name] for output in function.outputs]
            last = [token] if attrs[SCHEDULE_ATTRIBUTE] else []
            result = builder.emit_output(relax.Tuple([*outputs, *last]))
        builder.emit_func_output(result)


def _steps(function: Function) -> dict[str, str | list[str]]:
    """Return the text of each step; a list of texts if the inlined function has it several times."""
    texts_of: dict[str, list[str]] = {}
    for op in function.ops:
        if "step" in op.attrs:
            texts_of.setdefault(str(op.attrs["step"]), []).append(print_op(op))
    return {step: step_texts[0] if len(step_texts) == 1 else step_texts for step, step_texts in texts_of.items()}


def _on_communicator(op: Op) -> bool:
    return Trait.ON_COMMUNICATOR in lookup(op.name, op.location).traits


def _step_of(op: Op) -> int:
    """Return the op's index in the schedule; 0 for ops without communication."""
    return cast(int, op.attrs.get("step", 0))


def _emit_communication(builder: Any, op: Op, values: dict[str, Any], token: Any) -> Any:
    """Emit the call of a rank's communicator; return the next token."""
    import tvm
    from tvm import relax

    operands = [values[v.name] for v in op.operands]
    step = tvm.tirx.IntImm("int64", _step_of(op))
    types = [*(_relax_type(value.tensor) for value in op.results), relax.TensorType((), "int32")]
    call = relax.call_dps_packed(PACKED_PREFIX + op.name, [*operands, token, step, _attributes(op)], types)
    *results, next_token = _items(builder, call, len(types), op)
    _bind(builder, op, results, values)
    return builder.emit(next_token, name_hint="token")


def _emit_op(builder: Any, op: Op, values: dict[str, Any], scope: Mapping[str, Any]) -> None:
    from tvm import relax

    types = [value.tensor for value in op.results]
    operands = [values[v.name] for v in op.operands]
    if all(type_.elements == 0 for type_ in types) or is_zero(op):
        expressions: Any = [None] * len(types)
    else:
        names = [f"a{i}" for i in range(len(operands))]
        expressions = eval(relax_expression(op, names), {**scope, **dict(zip(names, operands, strict=True))})
        if not isinstance(expressions, tuple):
            expressions = [expressions] if len(types) == 1 else _items(builder, expressions, len(types), op)
    emitted = [
        relax.op.zeros(type_.shape, type_.dtype) if expression is None or type_.elements == 0 else expression
        for type_, expression in zip(types, expressions, strict=True)
    ]
    _bind(builder, op, emitted, values)


def _bind(builder: Any, op: Op, expressions: Sequence[Any], values: dict[str, Any]) -> None:
    for value, expression in zip(op.results, expressions, strict=True):
        emitted = builder.emit(expression, name_hint=value.name)
        _check_type(op, value, emitted)
        values[value.name] = emitted


def _items(builder: Any, call: Any, count: int, op: Op) -> list[Any]:
    from tvm import relax

    results = builder.emit(call, name_hint=op.results[0].name)
    return [relax.TupleGetItem(results, i) for i in range(count)]


def _attributes(op: Op) -> Any:
    import tvm

    return tvm.ir.StringImm(json.dumps({key: _plain(value) for key, value in op.attrs.items()}))


def _plain(value: object) -> object:
    if isinstance(value, PerRank):
        raise VerificationError("a ranked program has no attributes that differ by rank")
    return value


def _check_type(op: Op, value: Value, emitted: Any) -> None:
    expected = value.tensor
    shape = emitted.ty.shape
    actual = TensorType(tuple(int(n) for n in shape), str(emitted.ty.dtype)) if shape is not None else None
    if actual != expected:
        raise VerificationError(f"{value} has type {actual or emitted.ty} in TVM, expected {expected}", op.location)


def _relax_type(kind: TensorType) -> Any:
    from tvm import relax

    return relax.TensorType(kind.shape, kind.dtype)


__all__: Sequence[str] = (
    "OUTPUTS_ATTRIBUTE",
    "PACKED_PREFIX",
    "RANKS_ATTRIBUTE",
    "SCHEDULE_ATTRIBUTE",
    "STEPS_ATTRIBUTE",
    "to_relax",
    "to_relax_json",
    "to_relax_programs",
)
