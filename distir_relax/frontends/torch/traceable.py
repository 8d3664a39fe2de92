"""Functions of torch that `torch.export` cannot trace, or whose ops have no entry, in a form that it can.

A loss reads numbers to check them, a batch norm to average over all batches; others are one op of torch that is a few
of the table. While a model is exported, each is replaced by a formula of ours, whose result is compared with torch's
like that of any model (`export_check`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.support.torch_compat import BATCH_NORM, graph_op, private, replaced, tree_map

if TYPE_CHECKING:
    import torch

_NEVER = -1e30
"""The logarithm of a probability of zero: with infinity, gradients would be NaN."""


@contextmanager
def traceable_functions() -> Iterator[None]:
    """Within the context, the functions are replaced."""
    import torch
    from torch.overrides import TorchFunctionMode

    versions = _Versions()
    forms: dict[Any, Callable[..., Any]] = {**_forms(), torch.nn.functional.embedding: partial(_embedding, versions)}

    class Replace(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if versions.last:
                args, kwargs = tree_map(versions.of, (args, kwargs))
            return forms.get(func, func)(*args, **(kwargs or {}))

    with Replace(), replaced(BATCH_NORM, _batch_norm) as original:
        _batch_norm.original = original  # type: ignore[attr-defined]
        yield


@cache
def _forms() -> dict[Any, Callable[..., Any]]:
    import torch
    import torch.nn.functional as F

    return {
        torch.corrcoef: _corrcoef,
        torch.Tensor.corrcoef: _corrcoef,
        torch.Tensor.fill_diagonal_: _fill_diagonal,
        torch.Tensor.data.__get__: torch.Tensor.detach,  # type: ignore[attr-defined]
        torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
        private("torch._foreach_lerp_"): _lerp_all,
        F.ctc_loss: _ctc_loss,
        F.gaussian_nll_loss: _gaussian_nll_loss,
        F.multi_margin_loss: _multi_margin_loss,
        F.multilabel_margin_loss: _multilabel_margin_loss,
    }


def _batch_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of a batch norm; without a momentum its statistics are means over all batches so far."""
    import torch
    import torch.nn.functional as F

    if module.momentum is not None or not module.training or module.running_mean is None:
        return _batch_norm.original(module, x)  # type: ignore[attr-defined,no-any-return]
    y = F.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)
    dims = [0, *range(2, x.dim())]
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        share = 1 / module.num_batches_tracked.to(module.running_mean.dtype)
        found = x.detach().to(module.running_mean.dtype)
        for running, batch in ((module.running_mean, found.mean(dims)), (module.running_var, found.var(dims))):
            running.copy_(running + share * (batch - running))
    return y


def _corrcoef(x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 2:
        return x.new_ones(())
    centered = x - x.mean(1, keepdim=True)
    products = centered @ centered.T
    sizes = products.diagonal().sqrt()
    return (products / sizes[:, None] / sizes[None]).clamp(-1, 1)


def _fill_diagonal(x: torch.Tensor, value: float, wrap: bool = False) -> torch.Tensor:
    import torch

    if wrap or x.dim() != 2:
        raise ImportModelError("fill_diagonal_ is called with `wrap` or on a tensor that is no matrix")
    return x.copy_(x.masked_fill(torch.eye(*x.shape, dtype=torch.bool), value))


def _set_data(x: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor other elements, as ``x.data = value`` does."""
    x.detach().copy_(value)


def _lerp_all(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    for x, end in zip(tensors, ends, strict=True):
        x.lerp_(end, weight)


class _Versions:
    """The parameters that the model has changed so far, as tensors of their own, which later ops take."""

    def __init__(self) -> None:
        self.last: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def of(self, x: Any) -> Any:
        """Return the present version of an argument."""
        return self.last.get(id(x), x)

    def change(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Let `after` take the place of a tensor; return it."""
        for number in [number for number, x in self.last.items() if x is before] or [id(before)]:
            self.last[number] = after
        # Numbers of tensors that are gone may be given to others.
        self._kept += [before, after]
        return after


def _embedding(
    versions: _Versions, ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> torch.Tensor:  # fmt: skip
    import torch
    import torch.nn.functional as F

    if max_norm is not None:
        weight = versions.change(weight, renormalized_rows()(weight, ids, max_norm, norm_type))
    if not scale_grad_by_freq:
        return F.embedding(ids, weight, padding_idx, sparse=sparse)
    rows = F.embedding(ids, weight, padding_idx)
    flat = ids.flatten()
    counts = weight.new_zeros(weight.shape[0]).index_add(0, flat, torch.ones_like(flat, dtype=weight.dtype))
    # The value of the rows, with their gradient divided.
    return rows.detach() + (rows - rows.detach()) / counts[ids][..., None]


@cache
def renormalized_rows() -> Any:
    """Return the op of an exported graph, ``distir::renormalized_rows``: the weight after a look-up."""
    from distir_relax.kernels import norms

    schema = "(Tensor weight, Tensor ids, float most, float order) -> Tensor"
    return graph_op("renormalized_rows", schema, norms.renormalized_rows, lambda w, *_: w.new_empty(w.shape))


def _gaussian_nll_loss(
    x: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor:
    var = x * 0 + var if isinstance(var, float) else var
    if var.shape != x.shape and var.shape == x.shape[:-1]:
        var = var.unsqueeze(-1)
    # The bound has no effect on gradients.
    bounded = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (bounded.log() + (x - target) ** 2 / bounded)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


def _multi_margin_loss(
    x: torch.Tensor, target: torch.Tensor, p: int = 1, margin: float = 1.0, weight: torch.Tensor | None = None,
    size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    import torch.nn.functional as F

    rows, labels = (x, target) if x.dim() == 2 else (x[None], target.reshape(1))
    excess = (margin - rows.gather(1, labels[:, None]) + rows).clamp(min=0) ** p
    others = 1 - F.one_hot(labels, rows.shape[1]).to(rows.dtype)
    loss = (excess * others).sum(1) / rows.shape[1]
    loss = loss if weight is None else loss * weight[labels]
    return _reduced(loss if x.dim() == 2 else loss[0], reduction)


def _multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> torch.Tensor:
    import torch

    rows, labels = (x, target) if x.dim() == 2 else (x[None], target[None])
    classes = rows.shape[1]
    # Labels end at the first that is negative.
    counts = (labels < 0).to(torch.int64).cumsum(1) == 0
    named = ((labels[:, :, None] == torch.arange(classes)) & counts[:, :, None]).any(1).to(rows.dtype)
    excess = (1 - rows.gather(1, labels.clamp(min=0))[:, :, None] + rows[:, None, :]).clamp(min=0)
    loss = (excess * counts[:, :, None] * (1 - named)[:, None, :]).sum((1, 2)) / classes
    return _reduced(loss if x.dim() == 2 else loss[0], reduction)


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Graves et al., Connectionist Temporal Classification, 2006: the forward variables, a step for each position."""
    import torch

    if log_probs.dim() != 3 or targets.dim() != 2:
        raise ImportModelError(
            f"ctc_loss needs log-probabilities (T, N, C) and targets (N, S), found {tuple(log_probs.shape)} and "
            f"{tuple(targets.shape)}",
            hint="pad the targets, with their lengths in target_lengths",
        )
    lengths, sizes = (torch.as_tensor(n) for n in (input_lengths, target_lengths))
    steps, batch, _ = log_probs.shape
    blanks = torch.full_like(targets, blank)
    labels = torch.stack([blanks, targets], 2).flatten(1)
    labels = torch.cat([labels, blanks[:, :1]], 1)
    # From one label to the next but one, unless a blank must be between them.
    skips = torch.cat([torch.zeros_like(labels[:, :2]), labels[:, 2:] - labels[:, :-2]], 1) != 0
    skips = skips & (labels != blank)
    scores = log_probs.gather(2, labels[None].expand(steps, -1, -1))
    never = scores.new_full((batch, 1), _NEVER)
    state = torch.cat([scores[0, :, :2], never.expand(-1, labels.shape[1] - 2)], 1)
    for step in range(1, steps):
        one = torch.cat([never, state[:, :-1]], 1)
        two = torch.cat([never, never, state[:, :-2]], 1).masked_fill(~skips, _NEVER)
        moved = torch.logsumexp(torch.stack([state, one, two]), 0) + scores[step]
        state = torch.where((step < lengths)[:, None], moved, state)
    last = state.gather(1, 2 * sizes[:, None])[:, 0]
    before = state.gather(1, (2 * sizes[:, None] - 1).clamp(min=0))[:, 0].masked_fill(sizes == 0, _NEVER)
    loss = -torch.logsumexp(torch.stack([last, before]), 0)
    loss = loss.masked_fill(loss > -_NEVER / 2, 0.0 if zero_infinity else math.inf)
    return (loss / sizes.clamp(min=1)).mean() if reduction == "mean" else _reduced(loss, reduction)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
