"""Matrix products: matmul and linear. Both are linear in each operand, the other held fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from distir_relax.ir import Op, TensorType, Value
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    OnnxOperands,
    Packed,
    QuantizedForm,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    broadcast_shape,
    define,
    dim_names,
    gradient_of,
    onnx,
    onnx_as_aten,
    operands,
    parse_rule,
    promote,
    relax,
    reshape_to,
)


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return 2.0 * results[0].elements * types[0].shape[-1]


def _product(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    inner, columns = types[0].shape[-1], results[0].shape[-1]
    if len(types[1].shape) == 2:
        return 1, results[0].elements // columns if columns else 0, columns, inner
    return math.prod(results[0].shape[:-2]), results[0].shape[-2], columns, inner


def _of_two_dims(packed: str) -> Callable[[Types], str]:
    """Return the code for a weight of two dims; a stack of matrices is not packed."""
    return lambda weights: packed if len(weights[0].shape) == 2 else ""


def _infer_matmul(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = types
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2] or a.dtype != b.dtype:
        raise ValueError("expected the last dim of the first operand to equal the second last of the second")
    batch = broadcast_shape([TensorType(a.shape[:-2], a.dtype), TensorType(b.shape[:-2], b.dtype)])
    return (TensorType((*batch, a.shape[-2], b.shape[-1]), a.dtype),)


def transpose(g: Builder, x: Value) -> Value:
    """Return `x` with its last two dims swapped."""
    axes = tuple(range(len(x.tensor.shape)))
    result: Value = g.emit("permute_dims", x, axes=(*axes[:-2], axes[-1], axes[-2]))
    return result


def _second_gradient(b: Backward) -> Value:
    if len(b.x(1).tensor.shape) == 2:
        # One product that sums over all rows, instead of many small ones that are summed afterwards.
        return b.emit("linear_weight_grad", b.x(), b.grad)  # type: ignore[no-any-return]
    return b.emit("matmul", transpose(b.g, b.x()), b.grad)  # type: ignore[no-any-return]


def _quantized_product(g: Builder, op: Op, weight: Sequence[Value]) -> Value:
    result: Value = g.emit("quantized_linear", op.operands[0], *weight)
    return result


define(
    "matmul",
    Semantics(infer=_infer_matmul, torch="products.matmul({0}, {1})", linear=(operands(0), operands(1))),
    Split("... m k, ... k n -> ... m n"),
    cost=Cost(flops=_flops, product=_product),
    code=Code(joined="joined_matmul", relax="R.matmul({0}, {1})"),
    kernels=[Packed(_of_two_dims("pack_linear({1}.t(), rows={rows})"))],
    gradient=gradient_of(lambda b: b.emit("matmul", b.grad, transpose(b.g, b.x(1))), _second_gradient),
    quantized=QuantizedForm(
        1, _quantized_product, is_transposed=True, applies=lambda op: len(op.operands[1].tensor.shape) == 2
    ),
)


def _infer_linear(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w = types[:2]
    if len(w.shape) != 2 or x.shape[-1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError("expected the last dim of the input to equal the last dim of the weight")
    return (TensorType((*x.shape[:-1], w.shape[0]), x.dtype),)


define(
    "linear",
    Semantics(infer=_infer_linear, torch="products.linear({0}, {1})", linear=(operands(0), operands(1))),
    Split("... k, n k -> ... n"),
    cost=Cost(flops=_flops, product=_product),
    code=Code(joined="joined_linear", relax="R.matmul({0}, R.permute_dims({1}))"),
    kernels=[Packed("pack_linear({1}, rows={rows})")],
    gradient=gradient_of(
        lambda b: (
            b.emit("matmul", b.grad, b.x(1))
            if len(b.grad.tensor.shape) > 1
            else b.emit("linear", b.grad, transpose(b.g, b.x(1)))
        ),
        lambda b: b.emit("linear_weight_grad", b.grad, b.x()),
    ),
    quantized=QuantizedForm(1, _quantized_product),
)


def _infer_weight_grad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = types
    if a.shape[:-1] != b.shape[:-1] or a.dtype != b.dtype or not a.shape or not b.shape:
        raise ValueError("expected two operands with the same leading dims")
    return (TensorType((a.shape[-1], b.shape[-1]), a.dtype),)


def _weight_grad_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    leading = " ".join(dim_names(len(types[0].shape) - 1))
    return parse_rule(f"{leading} n, {leading} k -> n k", [t.shape for t in types], [results[0].shape])


def _weight_grad_product(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    rows, columns = results[0].shape
    return 1, rows, columns, math.prod(types[0].shape[:-1])


# The gradient of a weight: a product over all leading dims at once, without a result for each of them.
define(
    "linear_weight_grad",
    Semantics(
        infer=_infer_weight_grad,
        torch="products.linear_weight_grad({0}, {1})",
        linear=(operands(0), operands(1)),
    ),
    Split(_weight_grad_rule),
    cost=Cost(
        flops=lambda types, attrs, results: 2.0 * types[0].elements * results[0].shape[1],
        product=_weight_grad_product,
        contiguous=(0, 1),
    ),
    code=Code(relax="linear_weight_grad({0}, {1})"),
    gradient=gradient_of(
        lambda b: b.emit("linear", b.x(1), b.grad), lambda b: b.emit("linear", b.x(0), transpose(b.g, b.grad))
    ),
)


def _infer_biased(infer: Any) -> Any:
    def infer_biased(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (result,) = infer(types[:2], attrs)
        if types[2] != TensorType(result.shape[-1:], result.dtype):
            raise ValueError(f"the bias {types[2]} does not fit the result {result}")
        return (result,)

    return infer_biased


# A product with its bias added, created by local fusion in a rank's program, where nothing is split any more. Its rule
# keeps the summed dim whole, since each device would add the bias to its own partial sum.
define(
    "linear_bias",
    Semantics(infer=_infer_biased(_infer_linear), torch="products.linear({0}, {1}, {2})"),
    Split("... [k], n [k], n -> ... n"),
    cost=Cost(flops=_flops, product=_product),
    code=Code(
        relax="R.add(R.matmul({0}, R.permute_dims({1})), {2})",
        patterns=("add(linear(0, 1), 2)",),
        joined="joined_linear_bias",
    ),
    kernels=[Packed("pack_linear({1}, {2}, rows={rows})")],
)
define(
    "matmul_bias",
    Semantics(infer=_infer_biased(_infer_matmul), torch="products.matmul({0}, {1}, {2})"),
    Split("... m [k], [k] n, n -> ... m n"),
    cost=Cost(flops=_flops, product=_product),
    code=Code(
        relax="R.add(R.matmul({0}, {1}), {2})",
        patterns=("add(matmul(0, 1), 2)",),
        joined="joined_matmul_bias",
    ),
    kernels=[Packed(_of_two_dims("pack_linear({1}.t(), {2}, rows={rows})"))],
)


# Products of one input with several weights, created by local fusion: one product if the weights are packed together.


def _joined_types(types: Types, step: int) -> list[Types]:
    """Return the operand types of each product: the input, its weight, and its bias if `step` is 2."""
    if len(types) <= step or (len(types) - 1) % step:
        raise ValueError(f"expected an input, and {'a weight and a bias' if step == 2 else 'a weight'} of each product")
    return [(types[0], *types[i : i + step]) for i in range(1, len(types), step)]


def _define_joined(name: str, one: str, weight: str, infer: Any) -> None:
    """Define the joined form of the product `name`, whose torch code is `one` of an input and ``w``, or ``*w``."""
    step = 2 if name.endswith("bias") else 1

    def infer_joined(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        products = _joined_types(types, step)
        if any(len(product[1].shape) != 2 for product in products):
            raise ValueError("expected weights of two dims")
        return tuple(infer(product, attrs)[0] for product in products)

    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        inner = "[k]" if step == 2 else "k"
        bias = ", n{0}" if step == 2 else ""
        weights = "".join(f", {weight.format(inner, f'n{i}')}{bias.format(i)}" for i in range(len(results)))
        outputs = ", ".join(f"... n{i}" for i in range(len(results)))
        return parse_rule(f"... {inner}{weights} -> {outputs}", [t.shape for t in types], [t.shape for t in results])

    def product(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
        columns = sum(t.shape[-1] for t in results)
        rows = math.prod(types[0].shape[:-1])
        return 1, rows, columns, types[0].shape[-1]

    each = "[{*}][1:]" if step == 1 else "zip([{*}][1::2], [{*}][2::2])"
    transposed, biased = name.startswith("matmul"), step == 2
    define(
        f"joined_{name}",
        Semantics(infer=infer_joined, torch=f"tuple({one} for w in {each})"),
        Split(rule),
        cost=Cost(flops=lambda types, attrs, results: 2.0 * math.prod(product(types, attrs, results)), product=product),
        code=Code(relax=f"joined_products({name.startswith('linear')}, {step}, {{*}})"),
        kernels=[Packed(f"pack_joined([{{weights}}], {transposed=}, {biased=}, rows={{rows}})")],
    )


_define_joined("linear", "products.linear({0}, w)", "{1} {0}", _infer_linear)
_define_joined("linear_bias", "products.linear({0}, *w)", "{1} {0}", _infer_biased(_infer_linear))
_define_joined("matmul", "products.matmul({0}, w)", "{0} {1}", _infer_matmul)
_define_joined("matmul_bias", "products.matmul({0}, *w)", "{0} {1}", _infer_biased(_infer_matmul))


# ATen spellings


@aten("linear.default")
def _linear(g: Builder, x: Value, weight: Value, bias: Value | None = None) -> Any:
    y = g.emit("linear", x, weight) if len(weight.tensor.shape) == 2 and x.tensor.shape else _matmul(g, x, weight)
    # The bias is a separate op: if the summed dim is split it must be added once, after the reduction.
    return y if bias is None else g.emit("add", y, bias)


@aten("mm.default", "bmm.default", "mv.default", "dot.default", "vdot.default", "matmul.default")
def _matmul(g: Builder, a: Value, b: Value) -> Any:
    if a.tensor.dtype == "bool":
        raise NotImplementedError("a product of booleans")
    matrix_a, matrix_b = a, b
    if len(a.tensor.shape) == 1:
        matrix_a = reshape_to(g, a, (1, *a.tensor.shape))
    if len(b.tensor.shape) == 1:
        matrix_b = reshape_to(g, b, (*b.tensor.shape, 1))
    y = g.emit("matmul", matrix_a, matrix_b)
    shape = y.tensor.shape
    if len(a.tensor.shape) == 1:
        shape = (*shape[:-2], shape[-1])
    if len(b.tensor.shape) == 1:
        shape = shape[:-1]
    return reshape_to(g, y, shape)


@aten("addmm.default", "baddbmm.default", "addmv.default")
def _addmm(g: Builder, bias: Any, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> Any:
    return _scale_and_add(g, bias, _matmul(g, a, b), beta, alpha)


@aten("addbmm.default")
def _addbmm(g: Builder, bias: Any, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> Any:
    return _scale_and_add(g, bias, g.emit("sum", _matmul(g, a, b), axis=(0,), keepdims=False), beta, alpha)


@aten("addr.default")
def _addr(g: Builder, bias: Any, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> Any:
    outer = g.emit("multiply", reshape_to(g, a, (a.tensor.elements, 1)), b)
    return _scale_and_add(g, bias, outer, beta, alpha)


def _scale_and_add(g: Builder, bias: Value, y: Value, beta: float, alpha: float) -> Any:
    """Emit ``beta * bias + alpha * y``; with `beta` 0 the bias is ignored even if NaN, as in torch."""
    if alpha != 1:
        y = g.emit("multiply", y, g.constant(alpha, y.tensor.dtype))
    if beta == 0:
        return y
    if beta != 1:
        bias = g.emit("multiply", bias, g.constant(beta, bias.tensor.dtype))
    return g.emit("add", *promote(g, y, bias))


# Relax spellings


@relax("relax.matmul")
def _relax_matmul(g: Builder, args: Any, attrs: Attrs) -> Any:
    if attrs["out_dtype"] not in (None, "", "void", args[0].tensor.dtype):
        raise NotImplementedError(f"a product of {args[0].tensor.dtype} in {attrs['out_dtype']}")
    return _matmul(g, *args)


# ONNX spellings

onnx_as_aten("MatMul", "matmul.default")


@onnx("Gemm")
def _onnx_gemm(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    a, b = x[0], x[1]
    if attrs.get("transA", 0):
        a = g.emit("permute_dims", a, axes=(1, 0))
    y = g.emit("linear" if attrs.get("transB", 0) else "matmul", a, b)
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0) if x.has(2) else 0
    return _scale_and_add(g, x[2] if beta else y, y, beta, alpha)
