"""Cross entropy of logits or log-probabilities.

The log-softmax is decomposed, so that the class dim may be split (vocabulary parallelism, Shoeybi et al., Megatron-LM,
2019): its maximum and its sum of exponentials are reductions, and the label's logit is read by the device that holds
it. So logits are never gathered; three numbers per row are communicated.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.reduction.losses import reduce_loss
from distir_relax.ops.table import Builder, aten, broadcast_to, cast, like, promote, reshape_to

# ATen spellings


@aten("cross_entropy_loss.default")
def _cross_entropy(
    g: Builder,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    smoothing: float = 0.0,
) -> Any:
    """Loss of logits `x` (n, c, ...) with labels (n, ...), or probabilities of the shape of `x`.

    Narrow floats are computed in float32, as in torch: their sums cannot count beyond 256 labels.
    """
    if x.tensor.dtype in _NARROW:
        weight = None if weight is None else cast(g, weight, "float32")
        options = (weight, reduction, ignore_index, smoothing)
        return cast(g, _cross_entropy(g, cast(g, x, "float32"), target, *options), x.tensor.dtype)
    axis = _class_dim(x)
    shifted = _shifted(g, x, axis)
    if "float" in target.tensor.dtype:
        target = promote(g, target, x)[0]
        if smoothing:
            scaled = g.emit("multiply", target, like(g, x, 1 - smoothing))
            target = g.emit("add", scaled, like(g, x, smoothing / x.tensor.shape[axis]))
        normalizer = _normalizer(g, shifted, axis)
        rows = _weighted_sum(g, shifted, normalizer, _class_weights(g, weight, x, axis, target), axis)
        count = like(g, x, x.tensor.elements // max(1, x.tensor.shape[axis]))
        return _normalize(g, rows, count, reduction)
    labels = _Labels(g, x, target, weight, ignore_index)
    # Before the exponentials, which are then written in the place of the logits.
    selected = labels.select(shifted)
    normalizer = _normalizer(g, shifted, axis)
    losses = labels.weighted(g.emit("subtract", normalizer, selected))
    if not smoothing:
        return _normalize(g, losses, labels.total(), reduction)
    classes = _weighted_sum(g, shifted, normalizer, _class_weights(g, weight, x, axis), axis)
    parts = (
        g.emit("multiply", losses, like(g, x, 1 - smoothing)),
        g.emit("multiply", labels.masked(classes), like(g, x, smoothing / x.tensor.shape[axis])),
    )
    return _normalize(g, g.emit("add", *parts), labels.total(), reduction)


@aten("nll_loss_nd.default", "nll_loss.default", "nll_loss2d.default")
def _nll_loss(
    g: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = 1, ignore_index: int = -100
) -> Any:
    return nll_loss(g, x, target, weight, reduction, ignore_index)[0]


@aten("nll_loss_forward.default", "nll_loss2d_forward.default")
def nll_loss(
    g: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = 1, ignore_index: int = -100
) -> tuple[Any, Any]:
    """Return the loss of log-probabilities `x` (n, c, ...), and the total weight of the labels, 0 without reduction."""
    if x.tensor.dtype in _NARROW:
        weight = None if weight is None else cast(g, weight, "float32")
        both = nll_loss(g, cast(g, x, "float32"), target, weight, reduction, ignore_index)
        return tuple(cast(g, value, x.tensor.dtype) for value in both)
    labels = _Labels(g, x, target, weight, ignore_index)
    total = labels.total()
    loss = _normalize(g, labels.weighted(g.emit("negative", labels.select(x))), total, reduction)
    return loss, total if reduction else like(g, x, 0)


_NARROW = ("float16", "bfloat16")


class _Labels:
    """Class labels of rows: a mask of those that are not ignored, and their weights."""

    def __init__(self, g: Builder, x: Value, target: Value, weight: Value | None, ignore_index: int) -> None:
        self._g, self._axis, self._x = g, _class_dim(x), x
        labels = cast(g, target, "int64")
        self._counts = g.emit("not_equal", labels, g.constant(ignore_index, "int64"))
        # An ignored label is replaced by the first class, so that it can be looked up.
        self._numbers = g.emit("where", self._counts, labels, g.constant(0, "int64"))
        self._weights = None if weight is None else self.masked(g.aten("embedding.default", weight, self._numbers))

    def select(self, x: Value) -> Any:
        """Return the element of `x` at each label."""
        shape = self._numbers.tensor.shape
        column = reshape_to(self._g, self._numbers, (*shape[: self._axis], 1, *shape[self._axis :]))
        return reshape_to(self._g, self._g.aten("gather.default", x, self._axis, column), shape)

    def masked(self, rows: Value) -> Any:
        """Return `rows`, with zero where the label is ignored."""
        return self._g.emit("where", self._counts, rows, like(self._g, rows, 0))

    def weighted(self, rows: Value) -> Any:
        """Return `rows` times the weight of their class; zero where the label is ignored."""
        rows = self.masked(rows)
        return rows if self._weights is None else self._g.emit("multiply", rows, self._weights)

    def total(self) -> Any:
        """Return the total weight of all labels: their number, if classes have no weights."""
        weights = cast(self._g, self._counts, self._x.tensor.dtype) if self._weights is None else self._weights
        return self._g.aten("sum.default", weights)


def _class_dim(x: Value) -> int:
    return int(len(x.tensor.shape) > 1)


def _shifted(g: Builder, x: Value, axis: int) -> Any:
    """Return `x` minus the maximum of its row."""
    # The loss does not depend on the subtracted value, so the maximum needs no gradient.
    largest = g.emit("stop_gradient", g.emit("max", x, axis=(axis,), keepdims=True))
    return g.emit("subtract", x, largest)


def _normalizer(g: Builder, shifted: Value, axis: int) -> Any:
    """Return the logarithm of the sum of the exponentials of a row."""
    return g.emit("log", g.emit("sum", g.emit("exp", shifted), axis=(axis,), keepdims=False))


def _class_weights(g: Builder, weight: Value | None, x: Value, axis: int, target: Value | None = None) -> Any:
    """Return the weight of each class in each row: its class weight, its target probability, or their product."""
    if weight is None:
        return target
    shape = tuple(n if d == axis else 1 for d, n in enumerate(x.tensor.shape))
    weight = reshape_to(g, weight, shape)
    return weight if target is None else g.emit("multiply", target, weight)


def _weighted_sum(g: Builder, shifted: Value, normalizer: Value, weights: Value | None, axis: int) -> Any:
    """Return the sum of the losses of all classes, weighted, or with weight 1."""
    if weights is None:
        of_all = g.emit("multiply", normalizer, like(g, normalizer, shifted.tensor.shape[axis]))
        return g.emit("subtract", of_all, g.emit("sum", shifted, axis=(axis,), keepdims=False))
    lost = g.emit("sum", g.emit("multiply", shifted, weights), axis=(axis,), keepdims=False)
    weights = broadcast_to(g, weights, shifted.tensor.shape)
    total = g.emit("sum", weights, axis=(axis,), keepdims=False)
    return g.emit("subtract", g.emit("multiply", normalizer, total), lost)


def _normalize(g: Builder, rows: Value, count: Value, reduction: int) -> Any:
    """Reduce rows: none (0), their sum over `count` (1), or their sum (2)."""
    return g.emit("divide", reduce_loss(g, rows, 2), count) if reduction == 1 else reduce_loss(g, rows, reduction)
