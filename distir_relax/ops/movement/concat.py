"""Concatenation and splitting along a dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from distir_relax.ir import Op, TensorType, Value
from distir_relax.layout import balanced_part, fixed_value, floor_divide, is_symbolic, maximum, minimum
from distir_relax.ops.movement import view_strides
from distir_relax.ops.movement.reshape import squeeze, unsqueeze
from distir_relax.ops.movement.slice import slice_dim
from distir_relax.ops.table import (
    FREE,
    Appending,
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Element,
    Gradient,
    IncrementalForm,
    IncrementalStep,
    OnnxOperands,
    PrefixWindow,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    all_of,
    all_operands,
    any_of,
    aten,
    axis_of,
    cast,
    compared,
    concatenated,
    define,
    dim_names,
    fill_before,
    gradient_of,
    index_of,
    is_number,
    joined,
    look_back,
    names_with,
    negated,
    no_flops,
    onnx,
    operands,
    parse_rule,
    parts_of,
    reindexed,
    relax,
)


def _infer_concat(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, shape = attrs["axis"], list(types[0].shape)
    for t in types[1:]:
        if [n for i, n in enumerate(t.shape) if i != axis] != [n for i, n in enumerate(shape) if i != axis]:
            raise ValueError(f"shapes {[t.shape for t in types]} do not join along dim {axis}")
    shape[axis] = sum(t.shape[axis] for t in types)
    return (TensorType(tuple(shape), types[0].dtype),)


def _concat_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """Equal parts are split like the dim they are concatenated to; if they differ, the dim must be whole."""
    axis = attrs["axis"]
    names = dim_names(len(results[0].shape))
    sizes = {t.shape[axis] for t in types}
    if len(types) > 1 and len(sizes) == 1:
        operands, result = [names_with(len(names), axis, names[axis])] * len(types), f"([parts] {names[axis]})"
    else:
        operands, result = [names_with(len(names), axis, f"[{names[axis]}_{i}]") for i in range(len(types))], "[r]"
    text = f"{', '.join(operands)} -> {names_with(len(names), axis, result)}"
    return parse_rule(text, [t.shape for t in types], [results[0].shape], {"parts": len(types)})


def _split_gradient(b: Backward) -> tuple[Value, ...]:
    sizes = tuple(v.tensor.shape[b.attrs["axis"]] for v in b.op.operands)
    parts = b.emit("split", b.grad, sizes=sizes, axis=b.attrs["axis"])
    return parts if isinstance(parts, tuple) else (parts,)


def _joined_element(
    elements: Sequence[Element], shapes: Sequence[Sequence[int]], attrs: Attrs, shape: Sequence[int]
) -> Element | None:
    """Return the element that all parts have, each from where it begins; masks may differ."""
    axis, indices = attrs["axis"], [index_of(dim) for dim in range(len(shape))]

    def at(part: Element, where: int) -> Element:
        return reindexed(part, [*indices[:axis], where, *indices[axis + 1 :]])

    end = shape[axis]
    found: Element | None = None
    for part, sizes in zip(reversed(elements), reversed(shapes), strict=True):
        begin = end - sizes[axis]
        mine = at(part, index_of(axis) - begin)
        if found is None or mine == found or (sizes[axis] == 1 and at(found, begin) == at(part, 0)):
            found = mine if found is None else found
        elif not is_number(mine):
            is_later = compared(end, "<=", index_of(axis), shape)
            found = any_of([all_of([negated(is_later), mine]), all_of([is_later, found])])
        else:
            return None
        end = begin
    return found


def _joined_dim(op: Op) -> tuple[int]:
    return (op.attrs["axis"],)  # type: ignore[return-value]


def _continue_concat(step: IncrementalStep) -> Value:
    """Read as many earlier positions as there are before the sequence, which the first ones are."""
    (number,) = [n for n, extra in enumerate(step.extras) if extra is not None]
    before, after = step.operands[:number], step.operands[number + 1 :]
    low, high = (sum(part.tensor.shape[step.dim] for part in parts) for parts in (before, after))
    x = look_back(step, number, low, -high)
    if before:
        first = before[0] if len(before) == 1 else step.emit("concat", *before, axis=step.dim)
        x = fill_before(step, x, low, first)
    return step.emit("concat", x, *after, axis=step.dim) if after else x


define(
    "concat",
    Semantics(
        infer=_infer_concat,
        torch="torch.cat([{*}], {axis})",
        linear=all_operands,
        moved=lambda parts, attrs: [concatenated(parts, attrs["axis"])],
        element=_joined_element,
    ),
    Split(_concat_rule),
    cost=FREE,
    code=Code(relax="R.concat([{*}], {axis})"),
    gradient=Gradient(all=_split_gradient),
    incremental=IncrementalForm(dims=_joined_dim, compute=_continue_concat, carries=True, is_windowed=True),
    traits={Trait.TRIVIAL, Trait.MOVES},
)


def _infer_append(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (whole,) = _infer_concat(types, attrs)
    axis, shape = attrs["axis"], list(whole.shape)
    _, count = attrs.get("part", (0, types[1].shape[axis]))
    shape[axis] = types[0].shape[axis] + count
    return (TensorType(tuple(shape), whole.dtype),)


def _append_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """The elements of operand 0 are the first of the result; those that are appended are on all devices."""
    axis, rank = attrs["axis"], len(results[0].shape)
    plain = names_with(rank, axis, "()")
    text = f"{plain}, {names_with(rank, axis, '[new]')} -> {plain}"
    rule = parse_rule(text, [t.shape for t in types], [results[0].shape])
    return replace(rule, windows=(PrefixWindow(axis, 0, axis, axis, types[0].shape[axis], results[0].shape[axis]),))


def _of_part(code: str, part: str = "{{1}}.narrow({{axis}}, {0}, {1})") -> Callable[[Attrs], str]:
    """Return code that takes a `part` of operand 1 if there is this attribute: its first element, and their number."""
    return lambda attrs: code.replace("{1}", part.format(*attrs["part"])) if "part" in attrs else code


_RELAX_PART = "R.strided_slice({{1}}, ({{axis}},), ({0},), ({0} + {1},))"

define(
    "append",
    Semantics(infer=_infer_append, torch=_of_part("sequence.append({0}, {1}, {axis})")),
    Split(_append_rule, windowed=lambda attrs, parts: {**attrs, "part": parts[attrs["axis"]]}),
    cost=Cost(flops=no_flops, moved=lambda types, attrs, results: 2.0 * types[1].bytes),
    code=Code(relax=_of_part("R.concat([{0}, {1}], {axis})", _RELAX_PART)),
    kernels=[Appending(_of_part("sequence.extend({0}, {length}, {1}, {axis})"))],
    traits={Trait.MOVES},
)


def _infer_split(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis, sizes = attrs["axis"], attrs["sizes"]
    shape = types[0].shape
    if sum(sizes) != shape[axis]:
        raise ValueError(f"sizes {sizes} do not add up to {shape[axis]}")
    return tuple(TensorType((*shape[:axis], n, *shape[axis + 1 :]), types[0].dtype) for n in sizes)


def _split_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names, axis, sizes = dim_names(len(types[0].shape)), attrs["axis"], attrs["sizes"]
    tail = " ".join(names[:axis]), " ".join(names[axis + 1 :])
    shapes = [t.shape for t in types], [t.shape for t in results]
    if len(set(sizes)) == 1:
        text = f"{tail[0]} ([parts] part) {tail[1]} -> " + ", ".join([f"{tail[0]} part {tail[1]}"] * len(sizes))
        return parse_rule(text, *shapes, sizes={"parts": len(sizes), "part": sizes[0]})
    parts = ", ".join(f"{tail[0]} [part{i}] {tail[1]}" for i in range(len(sizes)))
    return parse_rule(f"{tail[0]} [whole] {tail[1]} -> {parts}", *shapes)


def _relax_split(attrs: Attrs) -> str:
    ends = [sum(attrs["sizes"][: i + 1]) for i in range(len(attrs["sizes"]))]
    if 0 not in attrs["sizes"] and not is_symbolic(attrs["sizes"]):
        return f"R.split({{0}}, {ends[:-1]!r}, {{axis}})"
    # R.split creates no empty parts, and none of symbolic sizes.
    cuts = zip([0, *ends], ends, strict=False)
    return "(" + ", ".join(f"R.strided_slice({{0}}, ({{axis}},), ({a},), ({b},))" for a, b in cuts) + ",)"


def _concat_gradients(b: Backward) -> Value:
    parts = [part or b.zeros(result) for part, result in zip(b.grads, b.op.results, strict=True)]
    grad: Value = b.emit("concat", *parts, axis=b.attrs["axis"])
    return grad


define(
    "split",
    Semantics(
        infer=_infer_split,
        torch="{0}.split({sizes}, {axis})",
        linear=(operands(0),),
        moved=lambda parts, attrs: parts_of(parts[0], attrs["axis"], attrs["sizes"]),
    ),
    Split(
        _split_rule,
        localize=lambda attrs, types, results: {**attrs, "sizes": tuple(t.shape[attrs["axis"]] for t in results)},
    ),
    cost=FREE,
    code=Code(relax=_relax_split, strides=view_strides.split),
    gradient=gradient_of(_concat_gradients),
    traits={Trait.VIEW, Trait.MOVES},
)


# ATen spellings


@aten("cat.default", "concat.default", "concatenate.default")
def _cat(g: Builder, tensors: list[Any], dim: int = 0) -> Any:
    dtype = joined([t.tensor.dtype for t in tensors])
    parts = [cast(g, t, dtype) for t in tensors if t.tensor.shape != (0,)] or [cast(g, tensors[0], dtype)]
    if len(parts) == 1:
        return parts[0]
    return g.emit("concat", *parts, axis=axis_of(dim, len(parts[0].tensor.shape)))


@aten("stack.default")
def _stack(g: Builder, tensors: list[Any], dim: int = 0) -> Any:
    axis = axis_of(dim, len(tensors[0].tensor.shape) + 1)
    return _cat(g, [unsqueeze(g, t, axis) for t in tensors], axis)


@aten("hstack.default")
def _hstack(g: Builder, tensors: list[Any]) -> Any:
    return _cat(g, tensors, min(1, len(tensors[0].tensor.shape) - 1))


@aten("tensor_split.indices")
def _tensor_split(g: Builder, x: Value, indices: Sequence[int], dim: int = 0) -> Any:
    axis = axis_of(dim, len(x.tensor.shape))
    total = x.tensor.shape[axis]
    bounds = [slice(None, i).indices(total)[1] for i in indices]
    return tuple(
        slice_dim(g, x, axis, first, max(first, last))
        for first, last in zip([0, *bounds], [*bounds, total], strict=True)
    )


@aten("tensor_split.sections")
def _tensor_sections(g: Builder, x: Value, sections: int, dim: int = 0) -> Any:
    """Parts as equal as possible, the larger ones first."""
    size = x.tensor.shape[dim]
    return split_with_sizes(g, x, [balanced_part(size, sections, i) for i in range(sections)], dim)


@aten("split.Tensor", "unsafe_split.Tensor")
def _split(g: Builder, x: Value, size: int, dim: int = 0) -> Any:
    axis = axis_of(dim, len(x.tensor.shape))
    total = x.tensor.shape[axis]
    if not total:
        return (x,)
    count = fixed_value(-(-total // size))
    return split_with_sizes(g, x, [*[size] * (count - 1), total - size * (count - 1)], axis)


@aten("split_with_sizes.default", "split.sizes")
def split_with_sizes(g: Builder, x: Value, sizes: list[int], dim: int = 0) -> Any:
    """Return a tuple of values, even for a single part."""
    if len(sizes) == 1:
        return (x,)
    return g.emit("split", x, sizes=tuple(sizes), axis=axis_of(dim, len(x.tensor.shape)))


@aten("chunk.default", "unsafe_chunk.default")
def _chunk(g: Builder, x: Value, chunks: int, dim: int = 0) -> Any:
    if not x.tensor.shape[dim]:
        return (x,) * chunks
    return _split(g, x, -(-x.tensor.shape[dim] // chunks), dim)


@aten("unbind.int")
def _unbind(g: Builder, x: Value, dim: int = 0) -> Any:
    axis = axis_of(dim, len(x.tensor.shape))
    parts = split_with_sizes(g, x, [1] * fixed_value(x.tensor.shape[axis]), axis)
    return tuple(squeeze(g, part, axis) for part in parts)


# Relax spellings


@relax("relax.concat")
def _relax_concat(g: Builder, args: Any, attrs: Attrs) -> Any:
    return _cat(g, args[0], attrs["axis"] or 0)


@relax("relax.split")
def _relax_split_call(g: Builder, args: Any, attrs: Attrs) -> Any:
    axis = axis_of(attrs["axis"], len(args[0].tensor.shape))
    total, where = args[0].tensor.shape[axis], attrs["indices_or_sections"]
    if isinstance(where, int):
        size = -(-total // where)
        ends = [min(total, size * (i + 1)) for i in range(where)]
    else:
        ends = [*where, total]
    return split_with_sizes(g, args[0], [b - a for a, b in zip([0, *ends], ends, strict=False)], axis)


@relax("relax.stack")
def _relax_stack(g: Builder, args: Any, attrs: Attrs) -> Any:
    return g.aten("stack.default", args[0], attrs["axis"] or 0)


# ONNX spellings


@onnx("Concat")
def _onnx_concat(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _cat(g, [x[i] for i in range(len(x))], attrs["axis"])


@onnx("Split")
def _onnx_split(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    axis = axis_of(attrs.get("axis", 0), len(x[0].tensor.shape))
    total, sizes = x[0].tensor.shape[axis], x.numbers(1, attrs.get("split"))
    if sizes is None:
        count = attrs.get("num_outputs", attrs["outputs"])
        size = -floor_divide(-total, count)
        sizes = [maximum(0, minimum(size, total - i * size)) for i in range(count)]
    return split_with_sizes(g, x[0], sizes, axis)
