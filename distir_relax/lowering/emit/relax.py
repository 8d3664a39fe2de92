"""Relax code generation: each rank program becomes a Relax function.

An op of the table becomes its `relax` expression. Ops that a rank's communicator performs become packed calls in
destination-passing style, which read and write buffers of TVM's virtual machine::

    distir.<op>(operands..., token, step, attributes as JSON, sizes, result, next token)

Relax considers such a call pure: it could remove one whose result is unused, or merge two equal ones. So each takes the
token returned by the preceding one, and the function returns the last: this chain of data dependences preserves program
order under any passes. Tokens carry no data.

If sizes are symbolic, each function takes their values as its last parameter, ``sizes: R.Shape([batch, sequence])``: a
rank may have no input with such a dim, or a part of it only. Symbolic attributes of communication are in its `sizes`;
the JSON has ``{"distir.size": 0}`` for the first of them.

TVM has no reshape or split to a tensor without elements, so such a result (the shard of a rank without heads, for
instance) is emitted as zeros of its shape.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from distir_relax.errors import DistIRError, UnsupportedOpError, VerificationError
from distir_relax.ir import PACKED, Function, Module, Op, PerRank, TensorType, Value, inline, print_op
from distir_relax.ir.symbols import module_symbols
from distir_relax.layout import SymbolicSize, is_symbolic
from distir_relax.lowering.emit.relax_exact import fill_where_empty
from distir_relax.lowering.emit.relax_namespace import SIZE_KEY, relax_scope
from distir_relax.lowering.emit.relax_sizes import RelaxSizes, static_size, with_own_names
from distir_relax.ops import Trait, is_zero, lookup, relax_expression

if TYPE_CHECKING:
    import tvm

PACKED_PREFIX = "distir."
CALL_PACKED = "distir_products.call"
"""The packed function ``(operands..., index) -> results`` that calls the packed weights with that index."""
STEPS_ATTRIBUTE = "distir.steps"
RANKS_ATTRIBUTE = "distir.ranks"
OUTPUTS_ATTRIBUTE = "distir.outputs"
SCHEDULE_ATTRIBUTE = "distir.schedule"
FAST_MATH_ATTRIBUTE = "distir.fast_math"
SIZES_ATTRIBUTE = "distir.sizes"


def to_relax(module: Module, fast_math: bool = False) -> tvm.IRModule:
    """Convert the ranked `module` to one IRModule, with a Relax function per distinct rank program, calls inlined.

    Parameters are the function's inputs in order, and the values of its symbols, if there are any; the result is the
    tuple of its outputs, and of a token if it communicates. The module attribute ``distir.ranks`` lists the function of
    each rank; the function attribute ``distir.sizes`` lists the symbols by name, and ``distir.schedule`` communicator
    calls in order, each as ``all_reduce 3``: the op and its step. With `fast_math`, functions have the attribute
    ``distir.fast_math``: the tvm backend need not preserve NaN in them.

    Raises `VerificationError` if the module is not ranked, or TVM infers another type for an op than the op table.
    """
    import tvm

    _check_stage(module)
    attrs = tvm.ir.make_node("ir.DictAttrs", **{RANKS_ATTRIBUTE: list(module.ranks)})
    return tvm.IRModule(_emit_functions(module, inline(module).functions, fast_math), attrs=attrs)


def to_relax_programs(module: Module, fast_math: bool = False) -> dict[str, tvm.IRModule]:
    """Convert each program of the ranked `module` to an IRModule with its function only.

    Raises the errors of `to_relax`.
    """
    import tvm

    _check_stage(module)
    return {f.name: tvm.IRModule(_emit_functions(module, [f], fast_math)) for f in inline(module).functions}


def to_relax_executable(module: Module, fast_math: bool = False) -> tvm.IRModule:
    """Convert what every call runs of the first function of `module`, at the executable stage, to an IRModule.

    The function is called ``main``. Packed weights are no parameters: an op that takes them is a call of
    ``distir_products.call`` with their place among `packed_weights`. Raises the errors of `to_relax`.
    """
    import tvm

    _check_stage(module, "executable")
    return tvm.IRModule(_emit_functions(module, [replace(module.main, name="main")], fast_math))


def packed_weights(function: Function) -> list[str]:
    """Return the inputs of a function that are packed weights: of those that are packed together, the first."""
    firsts = (next((v.name for v in op.operands if v.tensor.form == PACKED), "") for op in function.ops)
    return list(dict.fromkeys(filter(None, firsts)))


def _check_stage(module: Module, stage: str = "ranked") -> None:
    if module.stage != stage:
        raise VerificationError(f"expected a module of the {stage} stage, found the {module.stage} stage")


def _emit_functions(module: Module, functions: Sequence[Function], fast_math: bool) -> dict[Any, Any]:
    """Return the Relax functions, including those that they call."""
    from tvm import relax

    builder = relax.BlockBuilder()
    symbols = tuple(module_symbols(module).values())
    for function in functions:
        _Emitter(builder, RelaxSizes(symbols)).emit(function, fast_math)
    return dict(builder.get().functions.items())


class _Emitter:
    """Emission of one function into a `BlockBuilder`; `values` has the Relax expression of each value."""

    def __init__(self, builder: Any, sizes: RelaxSizes) -> None:
        self.builder = builder
        self.sizes = sizes
        self.scope = {**relax_scope(may_be_zero=sizes.may_be_zero), **sizes.scope()}
        self.values: dict[str, Any] = {}
        self.packed: list[str] = []

    def emit(self, function: Function, fast_math: bool) -> None:
        """Emit the function, with its attributes."""
        from tvm import relax

        parameters = []
        self.packed = packed_weights(function)
        for item in function.inputs:
            if item.value.tensor.form == PACKED:
                continue
            self.values[item.value.name] = relax.Var(item.value.name, self._type(item.value.tensor))
            parameters.append(self.values[item.value.name])
        attrs = {
            STEPS_ATTRIBUTE: _steps(function),
            OUTPUTS_ATTRIBUTE: len(function.outputs),
            SCHEDULE_ATTRIBUTE: [f"{op.name} {_step_of(op)}" for op in function.ops if _on_communicator(op)],
        }
        if names := list(self.sizes.variables):
            attrs[SIZES_ATTRIBUTE] = names
            parameters.append(relax.Var("sizes", relax.ShapeType(list(self.sizes.variables.values()))))
        if fast_math:
            attrs[FAST_MATH_ATTRIBUTE] = True
        with self.builder.function(function.name, parameters, attrs=attrs):
            try:
                with self.builder.dataflow():
                    result = self.builder.emit_output(self._body(function))
            except DistIRError:
                # A builder that is left inside a function prints a complaint to stderr.
                self.builder.emit_func_output(relax.Tuple([]))
                raise
            self.builder.emit_func_output(result)

    def _body(self, function: Function) -> Any:
        """Emit the ops of a function; return its result."""
        from tvm import relax

        start: Any = relax.const(0, "int32")
        token = start
        for op in function.ops:
            if _on_communicator(op):
                token = self._communication(op, token)
            else:
                self._op(op)
        outputs = [self.values[output.value.name] for output in function.outputs]
        return relax.Tuple([*outputs, *([] if token is start else [token])])

    def _communication(self, op: Op, token: Any) -> Any:
        """Emit the call of a rank's communicator; return the next token."""
        import tvm
        from tvm import relax

        operands = [self.values[v.name] for v in op.operands]
        step = tvm.tirx.IntImm("int64", _step_of(op))
        types = [*(self._type(value.tensor) for value in op.results), relax.TensorType((), "int32")]
        arguments = [*operands, token, step, *self._attributes(op)]
        call = relax.call_dps_packed(PACKED_PREFIX + op.name, arguments, types)
        *results, next_token = self._items(call, len(types), op)
        self._bind(op, results)
        return self.builder.emit(next_token, name_hint="token")

    def _attributes(self, op: Op) -> list[Any]:
        """Return an op's attributes as JSON, and the values of their symbolic sizes, which it refers to by index."""
        import tvm
        from tvm import relax

        symbolic: dict[int, int] = {}

        def plain(value: object) -> object:
            if isinstance(value, PerRank):
                raise VerificationError("a ranked program has no attributes that differ by rank")
            if isinstance(value, SymbolicSize):
                return {SIZE_KEY: symbolic.setdefault(value, len(symbolic))}
            return [plain(item) for item in value] if isinstance(value, tuple) else value

        text = json.dumps({key: plain(value) for key, value in op.attrs.items()})
        return [tvm.ir.StringImm(text), relax.ShapeExpr(self.sizes.shape(list(symbolic)))]

    def _op(self, op: Op) -> None:
        from tvm import relax

        types = [value.tensor for value in op.results]
        operands = [self.values[v.name] for v in op.operands if v.tensor.form != PACKED]
        if all(type_.elements == 0 for type_ in types) or is_zero(op):
            expressions: Any = [None] * len(types)
        else:
            expressions = self._expressions(op, operands)
            if not isinstance(expressions, tuple):
                expressions = [expressions] if len(types) == 1 else self._items(expressions, len(types), op)
            if Trait.ZERO_IF_EMPTY in lookup(op.name, op.location).traits:
                sizes = [n for x in operands for n in x.ty.shape]
                expressions = [fill_where_empty(call, sizes, self.sizes.may_be_zero) for call in expressions]
        emitted = [
            relax.op.zeros(self.sizes.shape(type_.shape), type_.dtype)
            if expression is None or type_.elements == 0
            else expression
            for type_, expression in zip(types, expressions, strict=True)
        ]
        self._bind(op, emitted)

    def _expressions(self, op: Op, operands: Sequence[Any]) -> Any:
        if len(operands) < len(op.operands):
            return self._call_packed(op, operands)
        names = [f"a{i}" for i in range(len(operands))]
        scope = {**self.scope, **dict(zip(names, operands, strict=True))}
        try:
            return eval(relax_expression(with_own_names(op), names), scope)
        except NotImplementedError as error:
            raise UnsupportedOpError(
                f"{op.name} has no form in TVM for {error}", op.location, "give that dim a fixed size, or use torch"
            ) from None

    def _call_packed(self, op: Op, operands: Sequence[Any]) -> Any:
        """Return the call of an op's packed weights on its other operands."""
        import tvm
        from tvm import relax

        index = self.packed.index(next(v.name for v in op.operands if v.tensor.form == PACKED))
        kinds = [self._type(value.tensor) for value in op.results]
        kind = kinds[0] if len(kinds) == 1 else relax.TupleType(kinds)
        return relax.op.call_pure_packed(CALL_PACKED, *operands, tvm.tirx.IntImm("int64", index), ty_args=kind)

    def _bind(self, op: Op, expressions: Sequence[Any]) -> None:
        for value, expression in zip(op.results, expressions, strict=True):
            emitted = self.builder.emit(expression, name_hint=value.name)
            self.values[value.name] = self._with_type(op, value, emitted)

    def _items(self, call: Any, count: int, op: Op) -> list[Any]:
        from tvm import relax

        results = self.builder.emit(call, name_hint=op.results[0].name)
        return [relax.TupleGetItem(results, i) for i in range(count)]

    def _with_type(self, op: Op, value: Value, emitted: Any) -> Any:
        """Return a value that has the expected type in TVM.

        If TVM cannot prove that sizes are equal, the value becomes a slice, from 0 to the expected sizes: a match cast
        to them crashes TVM's fusion, and its analysis of a reshape fails.
        """
        expected, shape = value.tensor, emitted.ty.shape
        if shape is not None and str(emitted.ty.dtype) == expected.dtype and len(shape) == len(expected.shape):
            unequal = [i for i, n in enumerate(shape) if not self.sizes.are_equal(n, expected.shape[i])]
            if not unequal:
                return emitted
            if all(static_size(shape[i]) is None or is_symbolic(expected.shape[i]) for i in unequal):
                ends = [self.sizes.size(expected.shape[i]) for i in unequal]
                return self.builder.emit(self.scope["R"].strided_slice(emitted, unequal, [0] * len(unequal), ends))
        raise VerificationError(f"{value} has type {emitted.ty} in TVM, expected {expected}", op.location)

    def _type(self, kind: TensorType) -> Any:
        from tvm import relax

        return relax.TensorType(self.sizes.shape(kind.shape), kind.dtype)


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


__all__: Sequence[str] = (
    "CALL_PACKED",
    "OUTPUTS_ATTRIBUTE",
    "PACKED_PREFIX",
    "RANKS_ATTRIBUTE",
    "SCHEDULE_ATTRIBUTE",
    "SIZES_ATTRIBUTE",
    "STEPS_ATTRIBUTE",
    "packed_weights",
    "to_relax",
    "to_relax_executable",
    "to_relax_programs",
)
