"""Namespace for the op table's Relax expressions: the Relax ops, and compositions for missing ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any

from distir_relax.kernels.prim_func_shapes import has_symbolic_shapes, with_shapes
from distir_relax.kernels.quantized import parts_of
from distir_relax.kernels.resample import Part, rows_of
from distir_relax.kernels.sampling import Adaptive, Pooling, Resizing, Sampling
from distir_relax.kernels.tvm_extern import unpacked
from distir_relax.lowering.emit.relax_attention import attention_gradients, attention_parts
from distir_relax.lowering.emit.relax_exact import OPAQUE, exact_ops, rms_norm_rounded, size_scalar
from distir_relax.lowering.emit.relax_norm_gradients import norm_gradients
from distir_relax.lowering.emit.relax_positions import indexed_tensor
from distir_relax.lowering.emit.relax_recurrent import recurrent_scope
from distir_relax.lowering.emit.relax_sizes import known_dim, static_size

CHECK_INDICES = "distir_indices.checked"
"""The packed function ``(indices, low, high, user, place, result)`` that the tvm backend registers."""
CALL_KERNEL = "distir_kernels.call"
"""The packed function ``(module, function, options as JSON, number of operands, operands..., results...)`` that the tvm
backend registers: it runs a kernel of `distir_relax.kernels` with torch."""
SIZE_KEY = "distir.size"
"""The key of a symbolic size in the JSON of a communication's attributes; the value is its index in the `sizes`."""


def relax_scope(exact: bool = True, may_be_zero: Callable[[Any], bool] = lambda size: True) -> dict[str, Any]:
    """Return the Relax ops as ``R``, and compositions of them such as the runtime's `resample`.

    With `exact`, TVM ops whose semantics differ from the table's are replaced (`relax_exact`); `may_be_zero` decides
    on a symbolic size.
    """
    from tvm import relax

    nn = {name: getattr(relax.op.nn, name) for name in dir(relax.op.nn)}
    ops = {name: getattr(relax.op, name) for name in dir(relax.op)}
    if exact:
        replaced = exact_ops({**ops, **{f"nn.{name}": op for name, op in nn.items()}}, may_be_zero)
        replaced |= {"nn.pad": _pad, "strided_slice": _strided_slice}
        nn |= {name.removeprefix("nn."): op for name, op in replaced.items() if name.startswith("nn.")}
        ops |= {**replaced, "image": _images()}
    ops |= {"nn": SimpleNamespace(**nn), "const": _constant}
    resample = SimpleNamespace(
        weigh=_weigh, maximum=_maximum, places=_places, Adaptive=Adaptive, Pooling=Pooling, Resizing=Resizing
    )
    recurrent = recurrent_scope(_bound)
    recurrent.gradients = _recurrent_gradients
    return {
        "R": SimpleNamespace(**ops),
        "attention_gradients": SimpleNamespace(
            attention_grads=attention_gradients(ops, ops["nn"].softmax, _causal_mask, _within_bounds)
        ),
        "attention_parts": SimpleNamespace(**attention_parts(ops, _within_bounds)),
        "attention_of_states": _attention_of_states,
        "causal_mask": _causal_mask,
        "within_bounds": _within_bounds,
        "conv_weight_grad": _conv_weight_grad,
        "tvm_extern": SimpleNamespace(call_tir=_call_tir, call_packed=_call_packed),
        "indices": SimpleNamespace(checked=_checked),
        "grouped_matmul": _grouped_matmul,
        "grouped_weight_grad": _grouped_weight_grad,
        "linear_weight_grad": _linear_weight_grad,
        "joined_products": _joined_products,
        "norms": SimpleNamespace(
            rms_norm_rounded=rms_norm_rounded, renormalized_rows=_renormalized_rows, **norm_gradients(ops)
        ),
        "positions": SimpleNamespace(rotary=_rotary, indexed=indexed_tensor(_constant, _bound)),
        "quantized": SimpleNamespace(
            product=_quantized_product,
            products=_quantized_products,
            rows=_quantized_rows,
            grouped_product=_of_quantized(_grouped_matmul),
            routed_product=_of_quantized(_routed_matmul),
        ),
        "random": SimpleNamespace(
            dropout=lambda x, *rest, rate: torch_kernel("random", "dropout", [x.ty], x, *rest, rate=rate),
            next_seed=lambda seed: torch_kernel("random", "next_seed", [seed.ty], seed),
            uniform=_uniform,
        ),
        "recurrent": recurrent,
        "resample": resample,
        "scans": SimpleNamespace(
            linear=lambda factors, terms, axis: torch_kernel("scans", "linear", [terms.ty], factors, terms, axis=axis),
            **{name: _scan(name) for name in ("cummax", "cummin", "logcumsumexp")},
        ),
        "sums": SimpleNamespace(in_order=lambda *terms: reduce(relax.op.add, terms)),
        "routing": SimpleNamespace(matmul=_routed_matmul, weight_grad=_routed_weight_grad, selected=_selected),
    }


def _images() -> SimpleNamespace:
    """Return TVM's image ops; of symbolic spatial dims, it cannot compile a resize."""
    from tvm import relax

    def of_known_dims(op: Callable[..., Any]) -> Callable[..., Any]:
        def resize(x: Any, *args: Any, **kwargs: Any) -> Any:
            for axis in range(2, len(x.ty.shape)):
                known_dim(x, axis)
            return op(x, *args, **kwargs)

        return resize

    ops = {name: getattr(relax.op.image, name) for name in dir(relax.op.image)}
    return SimpleNamespace(**ops | {name: of_known_dims(ops[name]) for name in ("resize2d", "resize3d")})


def _constant(value: Any, dtype: str) -> Any:
    """As `relax.const`, also of a symbolic size."""
    from tvm import relax
    from tvm.ir.expr import is_prim_expr

    return size_scalar(value, dtype) if is_prim_expr(value) else relax.const(value, dtype)


def _rotary(x: Any, cos: Any, sin: Any) -> Any:
    """As `distir_relax.kernels.positions.rotary`."""
    from tvm import relax

    op, axis = relax.op, len(x.ty.shape) - 1
    half = int(x.ty.shape[axis]) // 2
    first, second = (
        _bound(op.strided_slice(x, [axis], [begin], [begin + half], assume_inbound=True)) for begin in (0, half)
    )
    swapped = _bound(op.concat([_bound(op.negative(second)), first], axis=axis))
    return op.add(_bound(op.multiply(x, cos)), _bound(op.multiply(swapped, sin)))


def _strided_slice(x: Any, axes: Any, begin: Any, end: Any, strides: Any = None) -> Any:
    """As `relax.op.strided_slice`, of which symbolic sizes are known: TVM's own clips the ends to those of `x`."""
    from tvm import relax

    x = _bound(x) if isinstance(x, relax.Call) else x
    sizes = [x.ty.shape[axis] for axis in axes]
    within = [_end_within(n, size) for n, size in zip(end, sizes, strict=True)]
    return relax.op.strided_slice(x, axes, begin, within, strides, assume_inbound=True)


def _end_within(end: Any, size: Any) -> Any:
    """Return the end of a slice without Python's conventions: negative, or the largest int32."""
    if not isinstance(end, int) or 0 <= end < 2**31 - 1:
        return end
    return size + end if end < 0 else size


def _pad(x: Any, widths: Sequence[Any], mode: str = "constant", value: float = 0.0) -> Any:
    """As `relax.op.nn.pad`, also by symbolic widths: those are concatenated."""
    from tvm import relax

    if all(isinstance(width, int) for width in widths):
        return relax.op.nn.pad(x, widths, mode, value)
    x = _bound(x) if isinstance(x, relax.Call) else x
    fill = relax.const(value, str(x.ty.dtype))

    def end(axis: int, width: Any) -> list[Any]:
        if isinstance(width, int) and width == 0:
            return []
        shape = list(x.ty.shape)
        shape[axis] = width
        return [_bound(relax.op.full(shape, fill))]

    for axis, (low, high) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        parts = [*end(axis, low), x, *end(axis, high)]
        x = _bound(relax.op.concat(parts, axis)) if len(parts) > 1 else x
    return x


def torch_kernel(module: str, function: str, types: Sequence[Any], *operands: Any, **options: Any) -> Any:
    """Call a kernel of `distir_relax.kernels`, run by torch, without a Relax form; `result_types` are its results'."""
    import tvm
    from tvm import relax

    count = tvm.tirx.IntImm("int64", len(operands))
    texts = [tvm.ir.StringImm(text) for text in (module, function, json.dumps(options))]
    return relax.call_dps_packed(CALL_KERNEL, [*texts, count, *operands], types[0] if len(types) == 1 else list(types))


def _scan(name: str) -> Callable[..., Any]:
    """Return torch's scan of that name: values along an axis, and for extremes their indices."""

    def scan(x: Any, axis: int) -> Any:
        types = [x.ty] if name == "logcumsumexp" else [x.ty, _kinds([x.ty.shape], ["int64"])]
        return torch_kernel("ordering", name, types, x, axis=axis)

    return scan


def _uniform(seed: Any, *places: Any, dtype: str) -> Any:
    """As `distir_relax.kernels.random.uniform`."""
    type_ = _kinds([[place.ty.shape[0] for place in places]], [dtype])
    return torch_kernel("random", "uniform", [type_], seed, *places, dtype=dtype)


def _renormalized_rows(weight: Any, ids: Any, most: float, order: float) -> Any:
    """As `distir_relax.kernels.norms.renormalized_rows`."""
    return torch_kernel("norms", "renormalized_rows", [weight.ty], weight, ids, most=most, order=order)


def _recurrent_gradients(*operands: Any, wanted: Sequence[int], **options: Any) -> Any:
    """As `distir_relax.kernels.recurrent.gradients`."""
    types = [operands[i].ty for i in wanted]
    return torch_kernel("recurrent", "gradients", types, *operands, wanted=wanted, **options)


def _call_tir(source: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], *operands: Any) -> Any:
    """As `distir_relax.kernels.tvm_extern.call_tir`; the `PrimFunc` is added to the module."""
    from tvm import relax

    if all(0 in map(static_size, shape) for shape in shapes):
        zeros = [relax.op.zeros(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return zeros[0] if len(zeros) == 1 else relax.Tuple(zeros)
    function = unpacked(source)
    if not has_symbolic_shapes(function):
        operand_shapes = [[known_dim(x, dim) for dim in range(len(x.ty.shape))] for x in operands]
        function = with_shapes(function, [*operand_shapes, *shapes])
    name = str(function.attrs["global_symbol"]) if "global_symbol" in (function.attrs or {}) else "kernel"
    # Opaque: TVM's fusion fails on kernels whose sizes are integers of different widths.
    kernel = function.without_attr("global_symbol").with_attr("op_pattern", OPAQUE)
    variable = relax.BlockBuilder.current().add_func(kernel, name)
    return relax.call_tir(variable, list(operands), _kinds(shapes, dtypes))


def _linear_weight_grad(a: Any, b: Any) -> Any:
    """The product summed over all leading dims."""
    from tvm import relax

    rows = math.prod(list(a.ty.shape)[:-1])
    flat = [relax.op.reshape(x, (rows, list(x.ty.shape)[-1])) for x in (a, b)]
    return relax.op.matmul(relax.op.permute_dims(flat[0]), flat[1])


def _joined_products(transposed: bool, step: int, x: Any, *weights: Any) -> Any:
    """The products of one input with several weights; with a `step` of 2, a bias follows each."""
    from tvm import relax

    products = []
    for weight, *bias in zip(*(weights[i::step] for i in range(step)), strict=True):
        y = relax.op.matmul(x, relax.op.permute_dims(weight) if transposed else weight)
        products.append(relax.op.add(y, bias[0]) if bias else y)
    return tuple(products)


def _quantized_product(x: Any, *weight: Any) -> Any:
    """The product with a weight of values and scales, or with 4 bits values, scales and minimums."""
    from tvm import relax

    weight = _quantized_rows(*weight, grouped=len(weight[0].ty.shape) == 3, dtype=str(x.ty.dtype))
    return relax.op.matmul(x, relax.op.permute_dims(weight))


def _quantized_products(x: Any, *weights: Any) -> Any:
    """The products of one input with several such weights."""
    step = parts_of(str(weights[0].ty.dtype))
    return tuple(_quantized_product(x, *weights[i : i + step]) for i in range(0, len(weights), step))


def _of_quantized(product: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product of rows and matrices of groups, of a stack of such weights (n, k), which is dequantized."""

    def quantized(x: Any, *operands: Any) -> Any:
        from tvm import relax

        *weight, first, second = operands
        whole = _quantized_rows(*weight, grouped=len(weight[0].ty.shape) == 4, dtype=str(x.ty.dtype))
        return product(x, relax.op.permute_dims(whole, [0, 2, 1]), first, second)

    return quantized


def _quantized_rows(values: Any, scales: Any, *minimums: Any, grouped: bool, dtype: str) -> Any:
    """Rows of such a weight, computed in float32."""
    from tvm import relax

    op, shape = relax.op, values.ty.shape
    if minimums:
        low = op.bitwise_and(values, relax.const(15, "uint8"))
        values = op.concat([low, op.right_shift(values, relax.const(4, "uint8"))], axis=-1)
    y = op.multiply(op.astype(values, "float32"), op.astype(scales, "float32"))
    y = op.add(y, op.astype(minimums[0], "float32")) if minimums else y
    if grouped:
        *leading, groups, size = shape
        y = op.reshape(relax.BlockBuilder.current().normalize(y), (*leading, groups * size * (2 if minimums else 1)))
    return op.astype(y, dtype)


def _conv_weight_grad(
    conv: Any, x: Any, y: Any, kernel: Sequence[int], strides: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], channels: int,
) -> Any:  # fmt: skip
    """A convolution by `conv` with batch and channel dims swapped, and strides and dilation too."""
    from tvm import relax

    op = relax.op
    n, _, *sizes = x.ty.shape
    groups = known_dim(x, 1) // channels
    rest = range(3, 3 + len(sizes))
    x = op.reshape(op.permute_dims(op.reshape(x, (n, groups, channels, *sizes)), (2, 1, 0, *rest)),
                   (channels, groups * n, *sizes))  # fmt: skip
    swapped = (1, 0, *range(2, 2 + len(sizes)))
    gradient = op.permute_dims(conv(x, op.permute_dims(y, swapped), dilation, padding, strides, groups), swapped)
    # If strides do not divide the input evenly, there are extra windows after the kernel's.
    axes = list(range(2, 2 + len(sizes)))
    return op.strided_slice(gradient, axes, [0] * len(sizes), list(kernel))


def _call_packed(name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], *operands: Any) -> Any:
    """As `distir_relax.kernels.tvm_extern.call_packed`."""
    from tvm import relax

    return relax.call_dps_packed(name, list(operands), _kinds(shapes, dtypes))


def _checked(ids: Any, low: int, high: int, user: str, where: str) -> Any:
    """As `distir_relax.kernels.indices.checked`, as a packed function: users of the result come after the check."""
    import tvm
    from tvm import relax

    bounds = [tvm.tirx.IntImm("int64", bound) if isinstance(bound, int) else bound for bound in (low, high)]
    texts = [tvm.ir.StringImm(text) for text in (user, where)]
    return relax.call_dps_packed(CHECK_INDICES, [ids, *bounds, *texts], ids.ty)


def _kinds(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> Any:
    from tvm import relax

    kinds = [relax.TensorType(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return kinds[0] if len(kinds) == 1 else kinds


def _causal_mask(query: Any, key: Any) -> Any:
    """A boolean (s, t) mask: row i attends to columns 0 to i."""
    from tvm import relax

    rows, columns = (relax.op.arange(0, x.ty.shape[2], 1, "int64") for x in (query, key))
    return relax.op.greater_equal(relax.op.expand_dims(rows, 1), relax.op.expand_dims(columns, 0))


def _within_bounds(bounds: Any, key: Any) -> Any:
    """A boolean mask (s, t), or (b, 1, s, t): row i attends to the columns from its first on, before its end."""
    from tvm import relax

    # TVM does not prove that a range has the size that it is given, if that is symbolic.
    columns = _bound(relax.op.reshape(_bound(relax.op.arange(0, key.ty.shape[2], 1, "int64")), [key.ty.shape[2]]))
    bounds = _bound(relax.op.expand_dims(bounds, 1)) if len(bounds.ty.shape) == 3 else bounds
    axes = [len(bounds.ty.shape) - 1]
    first, end = (_bound(relax.op.strided_slice(bounds, axes, [n], [n + 1])) for n in (0, 1))
    return _bound(relax.op.logical_and(relax.op.greater_equal(columns, first), relax.op.less(columns, end)))


def _attention_of_states(attend: Callable[..., Any], new: Sequence[Any], past: Sequence[Any], views: Any) -> Any:
    """As `distir_relax.kernels.attention.attend_states`; `attend` gives the attention to keys and values."""
    from tvm.relax import op

    wholes, viewed = [], []
    for parts, (axis, shape, axes) in zip(zip(past, new, strict=True), views, strict=True):
        wholes.append(view := _bound(op.concat(list(parts), axis)))
        view = _bound(op.reshape(view, shape)) if shape else view
        viewed.append(_bound(op.permute_dims(view, axes)) if axes else view)
    return (attend(*viewed), *wholes)


def _grouped_matmul(x: Any, weights: Any, starts: Any, ends: Any) -> Any:
    """Each row times the matrix of its group; zero for a row without a group."""
    return _masked_matmul(x, weights, _row_mask_by_range(x, starts, ends))


def _routed_matmul(x: Any, weights: Any, ids: Any, groups: Any) -> Any:
    """As `distir_relax.kernels.routing.matmul`."""
    return _masked_matmul(x, weights, _row_mask_by_id(ids, groups))


def _masked_matmul(x: Any, weights: Any, rows: Any) -> Any:
    from tvm import relax

    op = relax.op
    products = op.matmul(op.expand_dims(x, 0), weights)
    return op.sum(op.where(rows, products, relax.const(0, str(x.ty.dtype))), 0)


def _grouped_weight_grad(x: Any, y: Any, starts: Any, ends: Any) -> Any:
    """For each group, the weight gradient of its rows."""
    return _masked_weight_grad(x, y, _row_mask_by_range(x, starts, ends))


def _routed_weight_grad(x: Any, y: Any, ids: Any, groups: Any) -> Any:
    """As `distir_relax.kernels.routing.weight_grad`."""
    return _masked_weight_grad(x, y, _row_mask_by_id(ids, groups))


def _masked_weight_grad(x: Any, y: Any, rows: Any) -> Any:
    from tvm import relax

    op = relax.op
    masked = op.where(rows, op.expand_dims(x, 0), relax.const(0, str(x.ty.dtype)))
    return op.matmul(op.permute_dims(masked, (0, 2, 1)), op.expand_dims(y, 0))


def _selected(x: Any, ids: Any, groups: Any) -> Any:
    """As `distir_relax.kernels.routing.selected`."""
    from tvm import relax

    op = relax.op
    selected = op.max(op.astype(_row_mask_by_id(ids, groups), "int32"), 0)
    shape = list(x.ty.shape)
    selected = op.reshape(op.greater(selected, relax.const(0, "int32")), [shape[0], *[1] * (len(shape) - 1)])
    return op.where(selected, x, relax.const(0, str(x.ty.dtype)))


def _row_mask_by_id(ids: Any, groups: Any) -> Any:
    """A boolean (group, row, 1) mask of the rows of each group, by group id."""
    from tvm import relax

    op = relax.op
    return op.expand_dims(op.equal(op.expand_dims(ids, 0), op.expand_dims(groups, 1)), 2)


def _row_mask_by_range(x: Any, starts: Any, ends: Any) -> Any:
    """A boolean (group, row, 1) mask of the rows of each group, by its range of rows."""
    from tvm import relax

    op = relax.op
    rows = op.arange(0, x.ty.shape[0], 1, str(starts.ty.dtype))
    first, end = op.expand_dims(starts, 1), op.expand_dims(ends, 1)
    return op.expand_dims(op.logical_and(op.greater_equal(rows, first), op.less(rows, end)), 2)


def _weigh(x: Any, axis: int, sampling: Sampling, size: int, part: Part = ()) -> Any:
    """As `distir_relax.kernels.resample.weigh`."""
    from tvm import relax

    op, dtype = relax.op, str(x.ty.dtype)
    rows = rows_of(sampling, known_dim(x, axis), size, part, dtype == "float64")
    windows = _gather_windows(x, axis, rows.positions)
    if rows.weights is None:
        return _bound(op.squeeze(windows, [axis + 1]))
    wide = dtype if dtype == "float64" else "float32"
    weights = relax.const(rows.weights.reshape(*rows.weights.shape, *_ones(x, axis)), wide)
    total = op.sum(op.multiply(windows if dtype == wide else op.astype(windows, wide), weights), axis + 1)
    return _bound(total if dtype == wide else op.astype(total, dtype))


def _maximum(x: Any, axis: int, sampling: Sampling, size: int, part: Part = ()) -> Any:
    """As `distir_relax.kernels.resample.maximum`."""
    from tvm import relax

    rows = rows_of(sampling, known_dim(x, axis), size, part, False)
    return _bound(relax.op.max(_gather_windows(x, axis, rows.positions), axis + 1))


def _places(
    x: Any, samplings: Sequence[Sampling], sizes: Sequence[int], strides: Sequence[int], parts: Sequence[Part] = ()
) -> Any:
    """As `distir_relax.kernels.resample.places`."""
    from tvm import relax

    op = relax.op
    place = _bound(op.zeros(x.ty.shape, "int64"))
    for axis in reversed(range(2, len(x.ty.shape))):
        part = parts[axis - 2] if parts else ()
        rows = rows_of(samplings[axis - 2], known_dim(x, axis), sizes[axis - 2], part, False)
        position = (rows.positions + (part[1] if part else 0)) * strides[axis - 2]
        along = relax.const(position.reshape(*position.shape, *_ones(x, axis)), "int64")
        windows = _gather_windows(x, axis, rows.positions)
        where = op.add(_gather_windows(place, axis, rows.positions), along)
        best = op.argmax(windows, axis + 1, keepdims=True)
        place = _bound(op.squeeze(op.gather_elements(where, best, axis + 1), [axis + 1]))
        x = _bound(op.max(windows, axis + 1))
    return place


def _gather_windows(x: Any, axis: int, positions: Any) -> Any:
    """Replace dim `axis` of `x` by two: the elements of the result, and the elements that each depends on."""
    from tvm import relax

    shape = list(x.ty.shape)
    elements = relax.op.take(x, relax.const(positions.reshape(-1), "int64"), axis)
    return _bound(relax.op.reshape(elements, (*shape[:axis], *positions.shape, *shape[axis + 1 :])))


def _bound(call: Any) -> Any:
    """Bind `call` to a variable of the function under construction, with its type inferred."""
    from tvm import relax

    return relax.BlockBuilder.current().emit(call)


def _ones(x: Any, axis: int) -> tuple[int, ...]:
    return (1,) * (len(x.ty.shape) - axis - 1)
