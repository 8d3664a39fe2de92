"""Hoisting of weight-only computation, and replacement of ops by kernels.

Everything that depends on weights only (transposes, padding, masks) moves to functions that run once when the weights
are loaded, one for each group of weights that meet there, so that a group is gone before the next is read; the rest is
``main``::

    prepare_0(weights...)                                -> (prepared..., factors...)
    main(inputs..., main weights..., prepared..., sizes) -> (outputs...)

Products with weights are calls of ``distir_products.call``, since packed weights are no tensors of TVM. `factors` are
the weights of these products, each followed by its bias if it has one (`kernels.packing`).

If there are symbolic sizes, `main` takes their values as a shape; what depends on them is computed in each call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distir_relax.kernels.packing import can_pack_bfloat16
from distir_relax.lowering.emit.relax_sizes import static_size
from distir_relax.runtime.backends.tvm import kernels

PREFIX = "distir."
CALL_PRODUCT = "distir_products.call"
"""The packed function ``(x, index) -> result`` that the tvm backend registers: the product with that index."""
TYPICAL_ROWS = 256
"""The number of rows that weights are packed for if it is symbolic."""


@dataclass(frozen=True)
class Product:
    """A product with a weight on its right: the weight is (out, in) if `transposed`, else (in, out).

    Its other operand has typically `rows` rows.
    """

    transposed: bool
    biased: bool
    rows: int


@dataclass(frozen=True)
class Preparation:
    """A group of weights, by index, that is prepared at once.

    The results of `function` are the values `prepared` of main's, by index, and then the factors of `products`. Without
    a function the results are the weights themselves.
    """

    function: str
    weights: tuple[int, ...]
    prepared: tuple[int, ...]
    products: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A module with `main` and the functions of `preparations`.

    `main_weights` are the indices of the weights that `main` takes unchanged; `calls` are the communicator methods that
    it calls; `products` are its products with weights.
    """

    module: Any
    main_weights: tuple[int, ...]
    calls: frozenset[str]
    products: tuple[Product, ...]
    preparations: tuple[Preparation, ...]

    @property
    def functions(self) -> list[str]:
        """Return the names of the functions that are called."""
        return [*(p.function for p in self.preparations if p.function), "main"]


def split_program(module: Any, inputs: Sequence[int], host: kernels.Machine) -> Split:
    """Split the Relax function of `module`; its parameters at the positions `inputs` are inputs, the others weights."""
    return _Splitter(module, inputs, host).run()


def relax_function(module: Any) -> Any:
    """Return the only Relax function of a module, which may hold kernels too. Raises ValueError unless there is one."""
    from tvm import relax

    [function] = [f for f in module.functions.values() if isinstance(f, relax.Function)]
    return function


@dataclass(frozen=True)
class _Factors:
    """The variables of a weight and of a bias, which products share."""

    weight: Any
    transposed: bool
    bias: Any = None

    @property
    def variables(self) -> list[Any]:
        """Return the variables."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class _Splitter:
    """Builder of both functions. Values are keyed by the original variables; `early` are the weight-only ones.

    `products` have the left operand and the factors of each product with a weight, by its result.
    """

    def __init__(self, module: Any, inputs: Sequence[int], host: kernels.Machine) -> None:
        from tvm import relax
        from tvm.ir import GenericConst

        function = relax_function(module)
        self.kernels = {v: f for v, f in module.functions.items() if not isinstance(f, relax.Function)}
        self.inputs = [function.params[i] for i in inputs]
        self.sizes = [p for p in function.params if isinstance(p.ty, relax.ShapeType)]
        self.weights = [p for i, p in enumerate(function.params) if i not in inputs and p not in self.sizes]
        self.host = host
        bindings = [b for block in function.body.blocks for b in block.bindings]
        # Constants are inlined at their uses.
        self.constants = {b.var: b.value for b in bindings if isinstance(b.value, GenericConst)}
        self.bindings = [b for b in bindings if b.var not in self.constants]
        self.result = function.body.body
        self.definitions = {b.var: b.value for b in self.bindings}
        self.uses = Counter(v for b in self.bindings for v in _variables(b.value))
        self.values: dict[Any, Any] = {}
        self.early = self._find_early()
        late = [b for b in self.bindings if b.var not in self.early]
        self.products = {b.var: found for b in late if (found := self._product_of(b.var)) is not None}
        used = {self.result}
        for b in reversed(late):
            if b.var in used:
                used.update([self.products[b.var][0]] if b.var in self.products else _variables(b.value))
        self.late = [b for b in late if b.var in used and b.var != self.result]
        self.main_weights = [i for i, w in enumerate(self.weights) if w in used]
        self.crossing = [b.var for b in self.bindings if b.var in self.early and b.var in used]
        self.rows = self._typical_rows()

    def run(self) -> Split:
        """Build both functions, with their kernels."""
        from tvm import relax

        builder = relax.BlockBuilder()
        called = {var: builder.add_func(kernel, var.name_hint) for var, kernel in self.kernels.items()}
        self.constants |= called
        preparations = tuple(self._preparations(builder))
        order = [*self.inputs, *(self.weights[i] for i in self.main_weights), *self.crossing]
        parameters = {v: relax.Var(v.name, v.ty) for v in order}
        self.values = {**self.constants, **parameters}
        with builder.function("main", [*parameters.values(), *self.sizes]):
            with builder.dataflow():
                self._emit(builder, self.late)
                results = builder.emit_output(_substitute(self.definitions[self.result], self.values))
            builder.emit_func_output(results)
        calls = {name for b in self.bindings if (name := _packed_call(b.value)) is not None}
        products = [Product(f.transposed, f.bias is not None, rows) for f, rows in self.rows.items()]
        return Split(builder.get(), tuple(self.main_weights), frozenset(calls), tuple(products), preparations)

    def _preparations(self, builder: Any) -> Iterator[Preparation]:
        """Emit a function for each group of weights that meet before `main`, or in a product."""
        from tvm import relax

        early = [b for b in self.bindings if b.var in self.early]
        factors = [found.variables for found in self.rows]
        for number, members in enumerate(self._groups(early, factors)):
            weights = [w for w in self.weights if w in members]
            prepared = [i for i, v in enumerate(self.crossing) if v in members]
            products = [i for i, each in enumerate(factors) if each[0] in members]
            results = [*(self.crossing[i] for i in prepared), *(v for i in products for v in factors[i])]
            if not results:
                continue
            bindings = [b for b in early if b.var in members]
            if bindings:
                parameters = {w: relax.Var(w.name, w.ty) for w in weights}
                self.values = {**self.constants, **parameters}
                with builder.function(f"prepare_{number}", list(parameters.values())):
                    with builder.dataflow():
                        self._emit(builder, bindings)
                        output = builder.emit_output(relax.Tuple([self.values[v] for v in results]))
                    builder.emit_func_output(output)
            function = f"prepare_{number}" if bindings else ""
            taken = tuple(self.weights.index(w) for w in (weights if bindings else results))
            yield Preparation(function, taken, tuple(prepared), tuple(products))

    def _groups(self, early: Sequence[Any], factors: Sequence[Sequence[Any]]) -> list[set[Any]]:
        """Return the groups of weights that meet, with the values that are computed of them; one is of no weight."""
        groups: dict[Any, set[Any]] = {}
        for link in [*([b.var, *filter(self._is_fixed, _variables(b.value))] for b in early), *factors]:
            whole: set[Any] = set()
            for other in {id(groups[v]): groups[v] for v in link if v in groups}.values():
                whole |= other
            whole.update(link)
            groups.update(dict.fromkeys(whole, whole))
        found = list({id(group): group for group in groups.values()}.values())
        weights = set(self.weights)
        constant = [group for group in found if group.isdisjoint(weights)]
        return [*(group for group in found if not group.isdisjoint(weights)), set[Any]().union(*constant)]

    def _find_early(self) -> set[Any]:
        early: set[Any] = set()
        available = {*self.weights, *self.constants}
        for b in self.bindings:
            # Communication is never hoisted: ranks load their weights at different times.
            if _packed_call(b.value) is None and b.var != self.result and available.issuperset(_variables(b.value)):
                available.add(b.var)
                early.add(b.var)
        return early

    def _product_of(self, var: Any) -> tuple[Any, _Factors] | None:
        """For a product with a weight, or one with a bias added: return its left operand, and its factors."""
        call = self.definitions[var]
        if not _is_op(call, "relax.add"):
            return self._unbiased_product_of(var)
        for product, bias in (call.args, reversed(call.args)):
            if self.uses[product] == 1 and self._is_fixed(bias) and _is_bias(bias, var):
                found = self._unbiased_product_of(product)
                if found is not None:
                    return found[0], replace(found[1], bias=bias)
        return None

    def _unbiased_product_of(self, var: Any) -> tuple[Any, _Factors] | None:
        call: Any = self.definitions.get(var)
        # A product of bfloat16 is one of float32, between casts.
        is_narrow = _is_op(call, "relax.astype") and _dtype(var) == "bfloat16" and can_pack_bfloat16()
        if is_narrow:
            call = self.definitions.get(call.args[0])
        if not (_is_op(call, "relax.matmul") and _suits(call)) or len(call.args[1].ty.shape) != 2:
            return None
        x, weight = [self._before_cast(v, "bfloat16") for v in call.args] if is_narrow else call.args
        if x is None or weight is None or not self._is_fixed(weight):
            return None
        source: Any = self.definitions.get(weight)
        is_transposed = _is_op(source, "relax.permute_dims")
        return x, _Factors(source.args[0] if is_transposed else weight, is_transposed)

    def _before_cast(self, var: Any, dtype: str) -> Any:
        """Return the value of a dtype that `var` is a cast of; None if it is none."""
        call: Any = self.definitions.get(var)
        return call.args[0] if _is_op(call, "relax.astype") and _dtype(call.args[0]) == dtype else None

    def _is_fixed(self, var: Any) -> bool:
        return var in self.early or var in self.weights

    def _typical_rows(self) -> dict[_Factors, int]:
        """Return the number of rows that the factors of products are packed for, that of the largest product."""
        found: dict[_Factors, int] = {}
        for b in self.late:
            if b.var in self.products:
                x, factors = self.products[b.var]
                rows = static_size(math.prod([*x.ty.shape][:-1]))
                found[factors] = max(found.get(factors, 1), TYPICAL_ROWS if rows is None else rows)
        return found

    def _emit(self, builder: Any, bindings: Sequence[Any]) -> None:
        for b in bindings:
            if b.var in self.products:
                x, factors = self.products[b.var]
                call = _packed_product(self.values[x], list(self.rows).index(factors), b.var.ty)
            else:
                call = _substitute(b.value, self.values)
                kernel = next((make for name, make in _KERNELS.items() if _is_op(call, name)), None)
                if kernel is not None and _suits(call):
                    call = kernel(builder, call, b.var.ty.shape, self.host)
            self.values[b.var] = builder.emit(call, name_hint=b.var.name)


def _packed_product(x: Any, index: int, kind: Any) -> Any:
    from tvm import relax, tirx

    return relax.op.call_pure_packed(CALL_PRODUCT, x, tirx.IntImm("int64", index), ty_args=kind)


def _is_bias(bias: Any, var: Any) -> bool:
    """Whether `bias` has an element for each column of `var`, of its dtype."""
    shape = bias.ty.shape
    columns = static_size(var.ty.shape[-1])
    return len(shape) == 1 and static_size(shape[0]) == columns and _dtype(bias) == _dtype(var)


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


def _packed_call(call: Any) -> str | None:
    """Return the communicator's method that a packed call names; None for other functions."""
    if not _is_op(call, "relax.call_dps_packed") or not str(call.args[0].global_symbol).startswith(PREFIX):
        return None
    return str(call.args[0].global_symbol).removeprefix(PREFIX)


def _variables(expression: Any) -> list[Any]:
    """Return the variables of an expression, and those of its sizes."""
    from tvm import relax, tirx
    from tvm.ir.expr import is_prim_expr

    if isinstance(expression, relax.Var):
        return [expression]
    if isinstance(expression, relax.Tuple):
        return [v for item in expression.fields for v in _variables(item)]
    if isinstance(expression, relax.TupleGetItem):
        return _variables(expression.tuple_value)
    if isinstance(expression, relax.ShapeExpr):
        return [v for size in expression.values for v in _variables(size)]
    if isinstance(expression, relax.Call):
        sizes = [v for kind in expression.ty_args for v in relax.analysis.tir_vars_in_type(kind)]
        return [v for item in expression.args for v in _variables(item)] + sizes
    return list(tirx.analysis.undefined_vars(expression)) if is_prim_expr(expression) else []


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


def _numbers(expression: Any) -> tuple[int, ...]:
    """Return the shape of an expression without symbolic sizes."""
    return tuple(int(n) for n in expression.ty.shape)


def _dtype(expression: Any) -> str:
    return str(expression.ty.dtype)
