"""Gradients of layer norm and RMS norm; as for the norms, the normalized dims must be whole.

They are two ops, since the gradient of the input is split by rows, and those of weight and bias are sums over rows.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Code,
    Cost,
    Gradient,
    Rule,
    Semantics,
    Split,
    Types,
    broadcast_to,
    define,
    dim_names,
    filled,
    flops_per_operand,
    operands,
    parse_rule,
)


def layer_norm_gradient(b: Backward) -> tuple[Value | None, ...]:
    """Ba et al., Layer Normalization, 2016."""
    x, weight, bias = b.op.operands
    attrs = {"axes": b.attrs["axes"], "epsilon": b.attrs["epsilon"]}
    of_weight, of_bias = None, b.grad
    if 1 in b.wrt:
        of_weight, of_bias = b.emit("layer_norm_weight_grad", x, b.grad, **attrs, dtype=weight.tensor.dtype)
    elif of_bias.tensor.dtype != bias.tensor.dtype:
        of_bias = b.emit("astype", of_bias, dtype=bias.tensor.dtype)
    of_x = b.emit("layer_norm_grad", x, weight, b.grad, **attrs) if 0 in b.wrt else None
    return of_x, of_weight, of_bias


def rms_norm_gradient(b: Backward) -> tuple[Value | None, ...]:
    """Zhang and Sennrich, Root Mean Square Layer Normalization, 2019."""
    x, weight = b.op.operands
    attrs = {"axes": b.attrs["axes"], "epsilon": b.attrs["epsilon"]}
    dtype = weight.tensor.dtype
    of_weight = b.emit("rms_norm_weight_grad", x, b.grad, **attrs, dtype=dtype) if 1 in b.wrt else None
    return b.emit("rms_norm_grad", x, weight, b.grad, **attrs) if 0 in b.wrt else None, of_weight


def _infer_grad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, weight, grad = types
    if weight.shape != x.shape[attrs["axes"][0] :] or grad != x or weight.dtype not in (x.dtype, "float32"):
        raise ValueError(f"expected {x}, a weight of its dims {attrs['axes']}, and a gradient of its type")
    return (x,)


def _grad_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    row, inner = _dims(types, attrs)
    return parse_rule(
        f"{row} {inner}, {inner}, {row} {inner} -> {row} {inner}", [t.shape for t in types], [types[0].shape]
    )


def _infer_weight_grad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, grad = types
    if grad != x or attrs["dtype"] not in (x.dtype, "float32"):
        raise ValueError(f"expected {x}, a gradient of its type, and weights of its dtype or float32")
    return (TensorType(x.shape[attrs["axes"][0] :], attrs["dtype"]),)


def _weight_grad_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    row, inner = _dims(types, attrs)
    text = f"{row} {inner}, {row} {inner} -> {', '.join([inner] * len(results))}"
    return parse_rule(text, [t.shape for t in types], [t.shape for t in results])


def _dims(types: Types, attrs: Attrs) -> tuple[str, str]:
    """Return the factors of the rows, and those of the normalized dims."""
    names = dim_names(len(types[0].shape))
    return " ".join(names[: attrs["axes"][0]]), " ".join(f"[{names[axis]}]" for axis in attrs["axes"])


def _normal(b: Backward, is_centred: bool) -> tuple[Any, Any]:
    """Emit the normalized operand 0, and the factor that normalizes it."""
    x = b.x(0)
    centred = b.emit("subtract", x, _mean(b, x)) if is_centred else x
    epsilon = b.number(b.attrs["epsilon"], x)
    scale = b.emit("rsqrt", b.emit("add", _mean(b, b.emit("square", centred)), epsilon))
    return b.emit("multiply", centred, scale), scale


def _mean(b: Backward, value: Value) -> Any:
    return b.emit("mean", value, axis=b.attrs["axes"], keepdims=True)


def _define(norm: str, is_centred: bool) -> None:
    grad_name, weight_name = f"{norm}_grad", f"{norm}_weight_grad"

    def second(b: Backward) -> tuple[Value | None, ...]:
        """The gradient is a symmetric map `P` of the weighted gradient, which is the Jacobian of the normalized rows.

        With `h` the gradient of the result ``P(a) = s (a - mean(a) - n mean(a n))``, of normalized rows `n` with
        factor `s`, that of the rows is ``-(s n mean(h P(a)) + s P(h mean(a n) + a mean(h n)))``.
        """
        x, weight, grad = b.op.operands
        attrs = {"axes": b.attrs["axes"], "epsilon": b.attrs["epsilon"]}
        ones = filled(b.g, weight.tensor.shape, 1.0, weight.tensor.dtype)
        mapped = b.emit(grad_name, x, ones, b.grad, **attrs)
        of_x = None
        if 0 in b.wrt:
            normal, scale = _normal(b, is_centred)
            weighted = b.emit("multiply", grad, weight)
            parts = [
                b.emit("multiply", one, _mean(b, b.emit("multiply", other, normal)))
                for one, other in ((b.grad, weighted), (weighted, b.grad))
            ]
            along = b.emit("multiply", normal, _mean(b, b.emit("multiply", b.grad, b.y())))
            total = b.emit("add", along, b.emit(grad_name, x, ones, b.emit("add", *parts), **attrs))
            of_x = b.emit("negative", b.emit("multiply", total, scale))
        return of_x, b.emit("multiply", grad, mapped), b.emit("multiply", mapped, weight)

    def second_of_weights(b: Backward) -> tuple[Value | None, ...]:
        """The gradient is linear in the one of the normalized rows, whose Jacobian is that of the norm."""
        x, grad = b.op.operands
        of_weight, of_bias = (*b.grads, None)[:2]
        of_x = of_grad = None
        if of_weight is not None:
            attrs = {"axes": b.attrs["axes"], "epsilon": b.attrs["epsilon"]}
            of_x = b.emit(grad_name, x, of_weight, grad, **attrs) if 0 in b.wrt else None
            of_grad = b.emit("multiply", _normal(b, is_centred)[0], of_weight) if 1 in b.wrt else None
        if of_bias is not None and 1 in b.wrt:
            wide = broadcast_to(b.g, of_bias, x.tensor.shape)
            of_grad = wide if of_grad is None else b.emit("add", of_grad, wide)
        return of_x, of_grad

    results = 2 if is_centred else 1
    define(
        grad_name,
        Semantics(
            infer=_infer_grad,
            torch=f"norms.{grad_name}({{0}}, {{1}}, {{2}}, {{epsilon}})",
            linear=(operands(1), operands(2)),
        ),
        Split(_grad_rule),
        cost=Cost(flops=flops_per_operand(16.0), contiguous=(0, 2)),
        code=Code(relax=f"norms.{grad_name}({{0}}, {{1}}, {{2}}, {{axes}}, {{epsilon}})"),
        gradient=Gradient(all=second),
    )
    define(
        weight_name,
        Semantics(
            infer=lambda types, attrs: _infer_weight_grad(types, attrs) * results,
            torch=f"norms.{weight_name}({{0}}, {{1}}, {{axes}}, {{epsilon}}, torch.{{dtype!s}})",
            linear=(operands(1),),
        ),
        Split(_weight_grad_rule),
        cost=Cost(flops=flops_per_operand(10.0), contiguous=(0, 1)),
        code=Code(relax=f"norms.{weight_name}({{0}}, {{1}}, {{axes}}, {{epsilon}}, {{dtype}})"),
        gradient=Gradient(all=second_of_weights),
    )


for _norm, _is_centred in (("layer_norm", True), ("rms_norm", False)):
    _define(_norm, _is_centred)
