"""Emission to TVM: each rank program becomes a Relax function.

An op of the table becomes its `relax` expression. What a rank's communicator performs becomes a packed call in
destination-passing style, which reads and writes the buffers of TVM's virtual machine::

    distir.<op>(operands..., token, step, attributes as JSON, result, next token)

Relax takes such a call for pure: one whose result is not needed could be left out, two equal ones made one. So each
takes the token that the one before has given, and the function returns the last: whatever passes run, the program
order is a chain of data. Tokens hold nothing.

TVM has no reshape or split to a tensor without elements, so a result without elements (the shard of a rank that holds
no heads, say) is written as zeros of its shape.
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
    """The ranked `module` as one IRModule: a Relax function per distinct rank program, its calls written out.

    Parameters are the function's inputs in order; the result is the tuple of its outputs, and of a token where it
    communicates. The module attribute ``distir.ranks`` lists the function of each rank; the function attribute
    ``distir.schedule`` the calls of the communicator in their order, each as ``all_reduce 3``: the op and its step.
    With `fast_math` functions have the attribute ``distir.fast_math``: the tvm backend may drop NaN in them.

    Raises `VerificationError` when the module is not ranked, or TVM gives an op another type than the op table.
    """
    import tvm

    _check_stage(module)
    attrs = tvm.ir.make_node("ir.DictAttrs", **{RANKS_ATTRIBUTE: list(module.ranks)})
    return tvm.IRModule(_emit_functions(inline(module).functions, fast_math), attrs=attrs)


def to_relax_programs(module: Module, fast_math: bool = False) -> dict[str, tvm.IRModule]:
    """For each program of the ranked `module`, an IRModule that holds its function alone.

    Raises what `to_relax` raises.
    """
    import tvm

    _check_stage(module)
    return {f.name: tvm.IRModule(_emit_functions([f], fast_math)) for f in inline(module).functions}


def to_relax_json(module: Module, fast_math: bool = False) -> dict[str, str]:
    """For each program of the ranked `module`, the JSON of an IRModule that holds its function alone.

    Raises what `to_relax` raises.
    """
    import tvm

    return {name: tvm.ir.save_json(program) for name, program in to_relax_programs(module, fast_math).items()}


def _check_stage(module: Module) -> None:
    if module.stage != "ranked":
        raise VerificationError(f"expected a module of the ranked stage, found the {module.stage} stage")


def _emit_functions(functions: Sequence[Function], fast_math: bool) -> dict[Any, Any]:
    """The Relax functions, with those that they call."""
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
    """What each step is; where it stands in a function that was called several times, what it is each time."""
    found: dict[str, list[str]] = {}
    for op in function.ops:
        if "step" in op.attrs:
            found.setdefault(str(op.attrs["step"]), []).append(print_op(op))
    return {step: texts[0] if len(texts) == 1 else texts for step, texts in found.items()}


def _on_communicator(op: Op) -> bool:
    return Trait.ON_COMMUNICATOR in lookup(op.name, op.location).traits


def _step_of(op: Op) -> int:
    """The op's place in the schedule; 0 for what sends nothing."""
    return cast(int, op.attrs.get("step", 0))


def _emit_communication(builder: Any, op: Op, values: dict[str, Any], token: Any) -> Any:
    """Emit the call of a rank's communicator; the token that the next one takes."""
    import tvm
    from tvm import relax

    operands = [values[v.name] for v in op.operands]
    step = tvm.tirx.IntImm("int64", _step_of(op))
    kinds = [*(_relax_type(value.tensor) for value in op.results), relax.TensorType((), "int32")]
    call = relax.call_dps_packed(PACKED_PREFIX + op.name, [*operands, token, step, _attributes(op)], kinds)
    *found, after = _items(builder, call, len(kinds), op)
    _bind(builder, op, found, values)
    return builder.emit(after, name_hint="token")


def _emit_op(builder: Any, op: Op, values: dict[str, Any], scope: Mapping[str, Any]) -> None:
    from tvm import relax

    results = [value.tensor for value in op.results]
    operands = [values[v.name] for v in op.operands]
    if all(kind.elements == 0 for kind in results) or is_zero(op):
        found: Any = [None] * len(results)
    else:
        names = [f"a{i}" for i in range(len(operands))]
        found = eval(relax_expression(op, names), {**scope, **dict(zip(names, operands, strict=True))})
        if not isinstance(found, tuple):
            found = [found] if len(results) == 1 else _items(builder, found, len(results), op)
    made = [
        relax.op.zeros(kind.shape, kind.dtype) if expression is None or kind.elements == 0 else expression
        for kind, expression in zip(results, found, strict=True)
    ]
    _bind(builder, op, made, values)


def _bind(builder: Any, op: Op, expressions: Sequence[Any], values: dict[str, Any]) -> None:
    for value, expression in zip(op.results, expressions, strict=True):
        emitted = builder.emit(expression, name_hint=value.name)
        _check_type(op, value, emitted)
        values[value.name] = emitted


def _items(builder: Any, call: Any, count: int, op: Op) -> list[Any]:
    from tvm import relax

    whole = builder.emit(call, name_hint=op.results[0].name)
    return [relax.TupleGetItem(whole, i) for i in range(count)]


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
    found = TensorType(tuple(int(n) for n in shape), str(emitted.ty.dtype)) if shape is not None else None
    if found != expected:
        raise VerificationError(f"TVM gives {value} the type {found or emitted.ty}, expected {expected}", op.location)


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
